"""How often something may happen: a token bucket, and a fair queue for one that many share. Times are passed in."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Payer = TypeVar("Payer", bound=Hashable)


class TokenBucket:
    """A token bucket that lends: while it holds anything it gives any amount, and the next taker waits for the debt.

    So large amounts pass, too. Times are in seconds.
    """

    __slots__ = ("_at", "_burst", "_level", "_per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = 0.0

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take, and return 0.0; or take nothing, and return the seconds until it can be taken."""
        # `_fill`, inlined: this is called several times a step
        level = self._level + (now - self._at) * self._per_s if now > self._at else self._level
        self._at = now
        if level <= 0:
            self._level = level
            return -level / self._per_s + 1e-3
        self._level = min(self._burst, level) - amount
        return 0.0

    def owe(self, now: float, amount: float = 1.0) -> float:
        """Take tokens that have been used already. Returns the seconds until the debt is paid."""
        self._fill(now)
        self._level -= amount
        return self.wait_s(now)

    def wait_s(self, now: float, kept: float = 0.0) -> float:
        """Return the seconds until the debt is paid, and this share of the burst is there."""
        self._fill(now)
        return max(0.0, (kept * self._burst - self._level) / self._per_s)

    def used(self, now: float) -> float:
        """Return the share of the burst that was taken and has not come back: at most 1."""
        self._fill(now)
        return min(1.0, 1.0 - self._level / self._burst)

    def give(self, amount: float) -> None:
        """Give back tokens that were taken."""
        self._level = min(self._burst, self._level + amount)

    def change(self, per_s: float) -> None:
        """Fill it at another rate from now on."""
        self._per_s = per_s

    def is_full(self, now: float) -> bool:
        """Whether all tokens that were taken have come back."""
        self._fill(now)
        return self._level >= self._burst

    @property
    def per_s(self) -> float:
        """Tokens that come each second."""
        return self._per_s

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now


class FairQueue(TokenBucket, Generic[Payer]):
    """A token bucket that many share. Payers that find it empty queue for it with their debts.

    A debt is taken when its turn has come, one after the other. So a crowd delays a payer only once, payers that leave
    take their debts with them, and the bucket itself never owes more than the last debt.
    """

    __slots__ = ("_debts",)

    def __init__(self, per_s: float, burst: float) -> None:
        super().__init__(per_s, burst)
        self._debts: dict[Payer, float] = {}  # first come, first served

    def pay(self, payer: Payer, amount: float, now: float) -> bool:
        """Take the amount if no debt waits and there are tokens; else add it to the payer's debt. Returns whether."""
        if not self._debts and self.take(now, amount) == 0:
            return True
        self._debts[payer] = self._debts.get(payer, 0.0) + amount
        return False

    def leave(self, payer: Payer) -> None:
        """Forget a payer's debt."""
        self._debts.pop(payer, None)

    def settle(self, now: float) -> Payer | None:
        """Pay the first debt if its turn has come. Returns its payer."""
        payer = next(iter(self._debts), None)
        if payer is None or self.take(now, self._debts[payer]) > 0:
            return None
        del self._debts[payer]
        return payer

    def next_s(self, now: float) -> float | None:
        """Return the seconds until the first debt can be paid; None if there is none."""
        return self.wait_s(now) if self._debts else None
