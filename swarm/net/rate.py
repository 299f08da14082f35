"""How often something may happen."""


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
