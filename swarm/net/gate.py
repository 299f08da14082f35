"""The read gate: when a channel is read, as a decision without loop, clock or carrier.

Reading a peer costs this side time. Each peer has token buckets of its own (`Allowance`), shared by its channels:
within them it is read at once. More is a debt, which all peers pay from the budgets that they share (`Budget`), in
turn. While a channel has a debt its gate is closed: its carrier is not read, so the peer's next bytes wait at its end.
The gate opens when the shared budget has paid, or when the peer's own tokens cover the debt, whichever comes first: a
crowd cannot slow a peer below its own allowance.

A gate also closes for a moment after some frames, so that other channels are read (`yield_turn`).

A peer that is not read cannot tell a busy server from a dead one, so it is sent keepalives while its gate closes.

The owner arms one timer for `wake_at`, calls `wake` then, and reads while `is_open`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from swarm.net.limits import ChannelLimits
from swarm.net.rate import TokenBucket


class Toll(NamedTuple):  # one is made for every step: a frozen dataclass takes three times as long
    """The worth of a message, as the handler that took it judges. The channel charges it, once."""

    idle: bool = False  # it moved no session forward: one unit and its tensors' bytes are charged
    free_bytes: int = 0  # of a decode step that was accepted: these bytes are given back
    payer: "Payer | None" = None  # pays instead of the channel that brought it


class Payer(Protocol):
    """A channel, as far as it pays for messages."""

    def charge_idle(self, n_bytes: int) -> None:
        """Charge a message that moved no session forward. n_bytes: of its tensors."""
        ...


PROGRESS = Toll()
IDLE = Toll(idle=True)


class Allowance:
    """The free tokens of one peer, for all of its channels together; or of one channel whose peer is not proven."""

    __slots__ = ("__weakref__", "idle", "keepalives", "read")

    def __init__(self, limits: ChannelLimits) -> None:
        reading, keepalives = limits.reading, limits.keepalives
        self.idle = TokenBucket(reading.idle_per_s, reading.idle_burst)
        self.read = TokenBucket(reading.bytes_per_s, reading.bytes_burst)
        self.keepalives = TokenBucket(1 / keepalives.every_s, keepalives.burst)


class Budget(Protocol):
    """A fair queue that all channels share. It calls `ReadGate.paid` when a debt is paid."""

    def pay(self, payer: "ReadGate", amount: float, now: float) -> bool:
        """Pay now, or add to the gate's debt. Returns whether it is paid."""
        ...

    def leave(self, payer: "ReadGate") -> None:
        """Forget the gate's debt."""
        ...


class ReadGate:
    """The gate of one channel."""

    __slots__ = (
        "_allowance",
        "_closed_at",
        "_closed_s",
        "_debts",
        "_ended",
        "_keepalive_at",
        "_limits",
        "_look_at",
        "_on_paid",
        "_proven",
        "is_open",
    )

    def __init__(self, limits: ChannelLimits, on_paid: Callable[[], None]) -> None:
        """on_paid: called when a shared budget has paid the last debt; the owner calls `wake` then, too."""
        self.is_open = True
        self._limits = limits
        self._on_paid = on_paid
        self._allowance = Allowance(limits)
        self._proven = False
        self._ended = False
        self._debts: dict[Budget, tuple[TokenBucket, float]] = {}  # how much, and the peer's own tokens for it
        self._look_at = 0.0  # when a closed gate may open
        self._closed_at, self._closed_s = 0.0, 0.0  # when it last closed, and for how long in all before
        self._keepalive_at: float | None = None

    @property
    def allowance(self) -> Allowance:
        """The free tokens of its peer."""
        return self._allowance

    def trust(self, allowance: Allowance) -> None:
        """The peer has proven itself: it has this allowance from now on, and is sent keepalives."""
        self._allowance, self._proven = allowance, True

    # Charges

    def charge_read(self, n_bytes: int, shared: Budget, now: float) -> None:
        """Charge bytes that were read."""
        free = self._allowance.read
        if wait_s := free.take(now, n_bytes):
            self._borrow(free, shared, n_bytes, wait_s, now)

    def charge_idle(self, n_bytes: int, shared: Budget, now: float) -> None:
        """Charge a message that moved no session forward. n_bytes: of its tensors."""
        free, amount = self._allowance.idle, 1 + n_bytes / self._limits.reading.idle_bytes
        if wait_s := free.take(now, amount):
            self._borrow(free, shared, amount, wait_s, now)

    def give_back(self, n_bytes: int) -> None:
        """Do not count the bytes of an accepted decode step: computing bounds how many of them there can be.

        Else a peer that decodes faster than its free bytes come is read as slowly as one that sends too much.
        """
        self._allowance.read.give(min(n_bytes, self._limits.reading.step_bytes_free))

    def is_free_keepalive(self, now: float) -> bool:
        """Whether a keepalive that arrived is one that its peer may send uncharged."""
        return self._allowance.keepalives.take(now) == 0

    def yield_turn(self, now: float) -> None:
        """Close until the loop has looked at the other channels."""
        if self.is_open and not self._ended:
            self._close(now, 0.0)

    def _borrow(self, free: TokenBucket, shared: Budget, amount: float, wait_s: float, now: float) -> None:
        """Pay from the shared budget; else close until that has paid, or the peer's own tokens would."""
        if self._ended or shared.pay(self, amount, now):
            return
        _, before = self._debts.get(shared, (free, 0.0))
        self._debts[shared] = (free, before + amount)
        if self.is_open:
            self._close(now, wait_s)
        if self._proven and self._keepalive_at is None:
            self._keepalive_at = now + self._limits.keepalives.every_s

    # When it opens

    @property
    def wake_at(self) -> float | None:
        """When the owner must call `wake`: to open it, or to send a keepalive. None while there is no reason to."""
        if self.is_open:
            return self._keepalive_at
        return self._look_at if self._keepalive_at is None else min(self._look_at, self._keepalive_at)

    def wake(self, now: float) -> bool:
        """Open it if it may. Returns whether a keepalive is due."""
        if not self.is_open and (now >= self._look_at or not self._debts):
            self._look(now)
        if self._keepalive_at is None or now < self._keepalive_at:
            return False
        # After short pauses in a row no keepalive comes any earlier: the peer's pings wait behind its other bytes.
        self._keepalive_at = now + self._limits.keepalives.every_s if self._debts else None
        return True

    def paid(self, shared: Budget) -> None:
        """A shared budget has paid its debt: called by the budget."""
        self._debts.pop(shared, None)
        if not self._debts:
            self._on_paid()

    def end(self) -> None:
        """The channel has ended: it owes nothing any more, and nothing opens it."""
        self._ended = True
        self._keepalive_at = None
        for shared in self._debts:
            shared.leave(self)
        self._debts.clear()

    def closed_s(self, now: float) -> float:
        """For how long it has been closed, in all."""
        return self._closed_s if self.is_open else self._closed_s + now - self._closed_at

    def _close(self, now: float, for_s: float) -> None:
        self.is_open = False
        self._closed_at = now
        self._look_at = now + min(for_s, self._limits.reading.pause_s_max)

    def _look(self, now: float) -> None:
        """Open, unless neither the peer's own tokens nor the shared budgets cover its debts."""
        wait_s = 0.0
        for shared, (free, amount) in list(self._debts.items()):
            if missing_s := free.take(now, amount):
                wait_s = max(wait_s, missing_s)
            else:
                del self._debts[shared]
                shared.leave(self)
        if self._debts:
            self._look_at = now + min(wait_s, self._limits.reading.pause_s_max)
            return
        self.is_open = True
        self._closed_s += now - self._closed_at
