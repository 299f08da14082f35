"""How often something may happen."""

import asyncio
from typing import Protocol


class Bucket:
    """A token bucket that lends: whoever finds anything in it may take more than is there, and waits the longer then.

    So what comes in large pieces passes, too. Times are the caller's, in seconds.
    """

    __slots__ = ("_at", "_burst", "_level", "_per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = 0.0

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take, and return 0.0; or take nothing, and return the seconds until one can."""
        # `_fill`, inlined: this is called several times a step
        level = self._level + (now - self._at) * self._per_s if now > self._at else self._level
        self._at = now
        if level <= 0:
            self._level = level
            return -level / self._per_s + 1e-3
        self._level = min(self._burst, level) - amount
        return 0.0

    def owe(self, now: float, amount: float = 1.0) -> float:
        """Take what has been used already. Returns the seconds until anybody may take again."""
        self._fill(now)
        self._level -= amount
        return self.wait_s(now)

    def wait_s(self, now: float) -> float:
        """Return the seconds until anybody may take again."""
        self._fill(now)
        return max(0.0, -self._level / self._per_s)

    def give(self, amount: float) -> None:
        """Give back what was taken for nothing."""
        self._level = min(self._burst, self._level + amount)

    def change(self, per_s: float) -> None:
        """Fill it at another rate from now on."""
        self._per_s = per_s

    def is_full(self, now: float) -> bool:
        """Whether all that was taken has come back."""
        self._fill(now)
        return self._level >= self._burst

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now


class Payer(Protocol):
    """Who has used something, and does not go on before it is paid for."""

    def paid(self, line: "Line") -> None:
        """It is paid for, and the bucket may go on to the next one."""
        ...


class Line(Bucket):
    """A bucket that many share, who wait for it in a line when there is nothing in it.

    What they have used is taken when it is their turn, one after the other: so nobody is passed by, whoever leaves is
    owed for no more, and the bucket itself never owes more than the last one took. Lives in the event loop.
    """

    __slots__ = ("_timer", "_waiting")

    def __init__(self, per_s: float, burst: float) -> None:
        super().__init__(per_s, burst)
        self._waiting: dict[Payer, float] = {}  # what each has used; whoever came first is first
        self._timer: asyncio.TimerHandle | None = None

    def pay(self, payer: Payer, amount: float, now: float) -> bool:
        """Take it, if nobody waits and there is something; else stand in line, and be told when it has been taken."""
        if not self._waiting and self.take(now, amount) == 0:
            return True
        self._waiting[payer] = self._waiting.get(payer, 0.0) + amount
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.wait_s(now), self._next)
        return False

    def leave(self, payer: Payer) -> None:
        """Wait no more."""
        self._waiting.pop(payer, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        payer, amount = next(iter(self._waiting.items()))
        wait_s = self.take(loop.time(), amount)
        if wait_s == 0:
            del self._waiting[payer]
        self._timer = loop.call_later(wait_s, self._next) if self._waiting else None
        if wait_s == 0:
            payer.paid(self)
