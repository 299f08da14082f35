"""What each peer may take of a server: openings, steps and bytes per second, and how often it may be told no.

An account belongs to a proven identity. Activations are charged to their session's owner, whoever sends them, and
refused with a time to come back at. Everything else is charged to whoever sends it, of whom less is read: that costs
nothing, where answers would cost something. Sessions and cache have limits of their own (`handler`, `pool`).

Identities are free: this keeps one peer from taking everything, and cannot stop a crowd.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.net.channel import Channel
from swarm.net.rate import Bucket
from swarm.server.session import Declined

STEPS_PER_S, STEPS_BURST = 2000.0, 4000.0  # and other messages
BYTES_PER_S, BYTES_BURST = 128.0 * 2**20, 512.0 * 2**20  # of activations
OPENINGS_PER_S, OPENINGS_BURST = 20.0, 128.0  # and reroutes: they make caches and connections
REFUSALS_PER_S, REFUSALS_BURST = 50.0, 500.0


@dataclass(slots=True)
class Account:
    """One peer's."""

    steps: Bucket = field(default_factory=lambda: Bucket(STEPS_PER_S, STEPS_BURST))
    bytes: Bucket = field(default_factory=lambda: Bucket(BYTES_PER_S, BYTES_BURST))
    openings: Bucket = field(default_factory=lambda: Bucket(OPENINGS_PER_S, OPENINGS_BURST))
    refusals: Bucket = field(default_factory=lambda: Bucket(REFUSALS_PER_S, REFUSALS_BURST))

    def is_settled(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        return all(bucket.is_full(now) for bucket in (self.steps, self.bytes, self.openings, self.refusals))


class Accounts:
    """Those of all peers that did something lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def charge_opening(self, peer: str) -> None:
        """Charge what makes caches and connections. Raises Declined."""
        if (wait_s := self._of(peer).openings.take(self._clock())) > 0:
            raise Declined("no_room", f"more than {OPENINGS_PER_S:.0f} openings a second", wait_s)

    def charge_activations(self, owner: str, n_bytes: int) -> None:
        """Charge a step, or a piece of the past. Raises Declined."""
        now, account = self._clock(), self._of(owner)
        if (wait_s := account.steps.take(now)) > 0:
            raise Declined("no_room", f"more than {STEPS_PER_S:.0f} steps a second", wait_s)
        if (wait_s := account.bytes.take(now, n_bytes)) > 0:
            raise Declined("no_room", f"more than {BYTES_PER_S / 2**20:.0f} MiB of activations a second", wait_s)

    def note_message(self, channel: Channel) -> None:
        """Count a message that is no activation."""
        if (wait_s := self._of(channel.peer).steps.take(self._clock())) > 0:
            channel.pause(wait_s)

    def note_refusal(self, channel: Channel) -> None:
        """Count a message that was good for nothing."""
        if (wait_s := self._of(channel.peer).refusals.take(self._clock())) > 0:
            channel.pause(wait_s)

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
