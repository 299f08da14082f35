"""How long to wait before something is late: learned from how long it usually takes."""


class Usual:
    """How long something usually takes: mean and deviation, smoothed as in RFC 6298, section 2."""

    def __init__(self, bounds_s: tuple[float, float, float]) -> None:
        """bounds_s: the least to wait, what to wait before anything is known, and the most."""
        self._least_s, self.wait_s, self._most_s = bounds_s
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def known(self) -> bool:
        """Whether anything has been observed."""
        return self._mean_s is not None

    def observe(self, took_s: float) -> None:
        """Learn; `wait_s` is then what it hardly ever exceeds."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            self._deviation_s += (abs(took_s - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (took_s - self._mean_s) / 8
        self.wait_s = min(self._most_s, max(self._least_s, self._mean_s + 4 * self._deviation_s))
