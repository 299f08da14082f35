"""How often guesses are right: learned for each kind of them, while generating."""

from collections import defaultdict

from swarm.client.speculation.limits import CalibrationLimits


class Calibration:
    """Counts right and wrong guesses."""

    def __init__(self, limits: CalibrationLimits | None = None) -> None:
        self._limits = limits or CalibrationLimits()
        self._right: defaultdict[int, float] = defaultdict(float)
        self._seen: defaultdict[int, float] = defaultdict(float)

    def likelihood(self, kind: int, prior: float | None = None) -> float:
        """Return how likely a guess of this kind is to be right, where all before it are.

        prior: the same as far as the draft knows, where it knows anything.
        """
        weight = self._limits.prior_weight
        prior = self._limits.prior_right if prior is None else prior
        return (self._right[kind] + prior * weight) / (self._seen[kind] + weight)

    def saw(self, kind: int, *, is_right: bool) -> None:
        """Learn of one guess."""
        fade = 1.0 - 1.0 / self._limits.memory
        self._right[kind] = self._right[kind] * fade + is_right
        self._seen[kind] = self._seen[kind] * fade + 1.0

    def forget(self) -> None:
        """A token has passed without a guess: what was learned counts less, so that guesses are tried again."""
        fade = 1.0 - 0.25 / self._limits.memory
        for counts in (self._right, self._seen):
            for kind in counts:
                counts[kind] *= fade
