"""What each peer may take of a server: openings, steps, tokens and bytes of activations per second.

An account belongs to a proven identity. Activations are charged to their session's owner, also if a hop sends them, and
refused with a time to come back at. A past is taken on credit: the next pieces come when the debt is paid. Messages
that move no session forward are charged to channels, which read less then: answers would cost more. Sessions and
memory have limits of their own (`admission`, `pool`).

Identities are free, so accounts keep one peer from taking everything, and cannot stop a crowd.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.net.rate import TokenBucket
from swarm.server.gateways import GatewayAllowance
from swarm.server.limits import AccountLimits
from swarm.server.refusals import Declined


@dataclass(frozen=True, slots=True)
class Account:
    """One peer's."""

    steps: TokenBucket
    tokens: TokenBucket
    bytes: TokenBucket
    openings: TokenBucket

    @classmethod
    def of(cls, limits: AccountLimits) -> "Account":
        """Make a full one."""
        return cls(
            TokenBucket(limits.steps_per_s, limits.steps_burst),
            TokenBucket(limits.tokens_per_s, limits.tokens_burst),
            TokenBucket(limits.bytes_per_s, limits.bytes_burst),
            TokenBucket(limits.openings_per_s, limits.openings_burst),
        )

    def is_settled(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        return all(bucket.is_full(now) for bucket in (self.steps, self.tokens, self.bytes, self.openings))

    def debt_s(self, now: float) -> float:
        """Return the seconds until what was taken on credit is paid."""
        return max(self.steps.wait_s(now), self.tokens.wait_s(now), self.bytes.wait_s(now))


class Accounts:
    """Those of all peers that did something lately. `now`: seconds, on any one clock."""

    def __init__(
        self, limits: AccountLimits | None = None, gateways: Mapping[str, GatewayAllowance] | None = None
    ) -> None:
        """gateways: peers that may have more."""
        self._gateways = gateways or {}
        self.limits = limits or AccountLimits()  # of accounts that are made from now on
        self.peers: dict[str, Account] = {}
        self._openings = TokenBucket(self.limits.all_openings_per_s, self.limits.all_openings_burst)

    def charge_opening(self, peer: str, now: float) -> Declined | None:
        """Charge a request that makes caches and connections. Returns why not."""
        limits = self._limits_of(peer)
        if (wait_s := self.of(peer).openings.take(now)) > 0:
            return Declined("busy", f"more than {limits.openings_per_s:.0f} openings a second", wait_s)
        if peer not in self._gateways and (wait_s := self._openings.take(now)) > 0:
            return Declined("busy", f"more than {limits.all_openings_per_s:.0f} openings a second by all peers", wait_s)
        return None

    def charge_step(self, owner: str, tokens: int, n_bytes: int, now: float) -> Declined | None:
        """Charge a step, its tokens of all rows and its activations. Returns why not."""
        account = self.peers.get(owner) or self.of(owner)
        if (wait_s := account.steps.take(now)) > 0:
            return Declined("busy", f"more than {self._limits_of(owner).steps_per_s:.0f} steps a second", wait_s)
        if (wait_s := account.tokens.take(now, tokens)) > 0:
            return Declined("busy", f"more than {self._limits_of(owner).tokens_per_s:.0f} tokens a second", wait_s)
        if (wait_s := account.bytes.take(now, n_bytes)) > 0:
            return self._too_many_bytes(wait_s)
        return None

    def give_back(self, owner: str, tokens: int) -> None:
        """Give back tokens that were charged and not computed."""
        self.of(owner).tokens.give(tokens)

    def lend(self, owner: str, tokens: int, n_bytes: int, now: float) -> Declined | None:
        """Charge a piece of a past, on credit where that is needed. Returns why not."""
        account = self.of(owner)
        if (wait_s := account.debt_s(now)) > self.limits.debt_s_max:
            return Declined("busy", "too much of a past at once", wait_s)
        account.steps.owe(now)
        account.tokens.owe(now, tokens)
        account.bytes.owe(now, n_bytes)
        return None

    def of(self, peer: str) -> Account:
        """Return a peer's account; a new one is full."""
        account = self.peers.get(peer)
        if account is None:
            account = self.peers[peer] = Account.of(self._limits_of(peer))
        return account

    def sweep(self, now: float) -> None:
        """Forget those that are settled."""
        for peer in [peer for peer, account in self.peers.items() if account.is_settled(now)]:
            del self.peers[peer]

    def _limits_of(self, peer: str) -> AccountLimits:
        gateway = self._gateways.get(peer)
        return self.limits if gateway is None else gateway.of(self.limits)

    def _too_many_bytes(self, wait_s: float) -> Declined:
        return Declined("busy", f"more than {self.limits.bytes_per_s / 2**20:.0f} MiB of activations a second", wait_s)
