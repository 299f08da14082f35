"""How long to wait before something is late: learned from how long it took before."""


class Timeout:
    """A timeout that follows what it bounds: mean and deviation, smoothed as in RFC 6298, section 2."""

    def __init__(self, bounds_s: tuple[float, float, float]) -> None:
        """bounds_s: the least to wait, the wait before anything is known, and the most."""
        self._least_s, self.wait_s, self._most_s = bounds_s
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def known(self) -> bool:
        """Whether anything has been observed."""
        return self._mean_s is not None

    def observe(self, took_s: float) -> None:
        """Learn; `wait_s` is then hardly ever exceeded."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            self._deviation_s += (abs(took_s - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (took_s - self._mean_s) / 8
        self.wait_s = min(self._most_s, max(self._least_s, self._mean_s + 4 * self._deviation_s))
