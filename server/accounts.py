"""What each peer may take of a server: openings, steps and bytes of activations per second.

An account belongs to a proven identity. Activations are charged to their session's owner, whoever sends them, and
refused with a time to come back at; a past is taken on credit, and what is paid brings the next pieces. What moves no
session forward is counted by the channel that brings it (`swarm.net.gate.Toll`), of which less is read: that costs
nothing, where answers would cost something. Sessions and cache have limits of their own (`handler`, `pool`).

Identities are free: this keeps one peer from taking everything, and cannot stop a crowd.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.net.rate import TokenBucket
from swarm.server.session import Declined

STEPS_PER_S, STEPS_BURST = 2000.0, 4000.0  # pieces of a past included
BYTES_PER_S, BYTES_BURST = 128.0 * 2**20, 512.0 * 2**20  # of activations
DEBT_S_MAX = 0.5  # then pieces are refused too; a client that hears nothing for longer begins to doubt the hop
OPENINGS_PER_S, OPENINGS_BURST = 8.0, 64.0  # and reroutes: they make caches and connections
ALL_OPENINGS_PER_S, ALL_OPENINGS_BURST = 100.0, 96.0  # of all peers together


@dataclass(slots=True)
class Account:
    """One peer's."""

    steps: TokenBucket = field(default_factory=lambda: TokenBucket(STEPS_PER_S, STEPS_BURST))
    bytes: TokenBucket = field(default_factory=lambda: TokenBucket(BYTES_PER_S, BYTES_BURST))
    openings: TokenBucket = field(default_factory=lambda: TokenBucket(OPENINGS_PER_S, OPENINGS_BURST))

    def is_settled(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        return all(bucket.is_full(now) for bucket in (self.steps, self.bytes, self.openings))


class Accounts:
    """Those of all peers that did something lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._openings = TokenBucket(ALL_OPENINGS_PER_S, ALL_OPENINGS_BURST)

    def __len__(self) -> int:
        return len(self._accounts)

    def charge_opening(self, peer: str) -> None:
        """Charge what makes caches and connections. Raises Declined."""
        now = self._clock()
        if (wait_s := self._of(peer).openings.take(now)) > 0:
            raise Declined("busy", f"more than {OPENINGS_PER_S:.0f} openings a second", wait_s)
        if (wait_s := self._openings.take(now)) > 0:
            raise Declined("busy", f"more than {ALL_OPENINGS_PER_S:.0f} openings a second by all peers", wait_s)

    def charge_activations(self, owner: str, n_bytes: int) -> None:
        """Charge a step. Raises Declined."""
        now, account = self._clock(), self._of(owner)
        if (wait_s := account.steps.take(now)) > 0:
            raise Declined("busy", f"more than {STEPS_PER_S:.0f} steps a second", wait_s)
        if (wait_s := account.bytes.take(now, n_bytes)) > 0:
            raise Declined("busy", f"more than {BYTES_PER_S / 2**20:.0f} MiB of activations a second", wait_s)

    def lend_activations(self, owner: str, n_bytes: int) -> None:
        """Charge a piece of the past, on credit where that is needed. Raises Declined."""
        if (wait_s := self.debt_s(owner)) > DEBT_S_MAX:
            raise Declined("busy", f"more than {BYTES_PER_S / 2**20:.0f} MiB of activations a second", wait_s)
        now, account = self._clock(), self._of(owner)
        account.steps.owe(now)
        account.bytes.owe(now, n_bytes)

    def debt_s(self, owner: str) -> float:
        """Return the seconds until what was taken on credit is paid."""
        now, account = self._clock(), self._of(owner)
        return max(account.steps.wait_s(now), account.bytes.wait_s(now))

    def sweep(self) -> None:
        """Forget those that are settled."""
        now = self._clock()
        for peer in [peer for peer, account in self._accounts.items() if account.is_settled(now)]:
            del self._accounts[peer]

    def _of(self, peer: str) -> Account:
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = Account()
        return account
