"""How often guesses are right: learned for each kind of them, while generating.

Guesses of one kind are as likely as they say, but for one shift of their log-odds. It is learned by logistic
regression: a Newton step for each guess that is compared with the text, in which older ones count less and less. It
begins above zero, since a draft's likeliest token is the model's more often than the draft says.

How much surer a draft is than it says hardly depends on the text. So the next text begins with half of what was learned
of guesses that say how likely they are. Those of look-up say nothing, and are learned anew in each text.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

from swarm.client.speculation.drafts import Guess
from swarm.client.speculation.limits import CalibrationLimits


@dataclass(slots=True)
class _Shift:
    """Of the log-odds of one kind. known: what was seen of it, in the curvature of the log-likelihood."""

    log_odds: float = 0.0
    known: float = 0.0


class Calibration:
    """Compares what guesses say with what they were."""

    def __init__(self, limits: CalibrationLimits | None = None, said: Mapping[int, _Shift] | None = None) -> None:
        """said: the shifts of guesses that say how likely they are, by their kind; it takes them for its own."""
        self._limits = limits or CalibrationLimits()
        self._said = defaultdict(_Shift, said or {})
        self._silent: defaultdict[int, _Shift] = defaultdict(_Shift)  # those of all others

    def likelihood(self, guess: Guess) -> float:
        """Return how likely a guess is to be right, where all before it are."""
        limits = self._limits
        said, shift = limits.prior_right, self._shift(guess).log_odds
        if guess.likely is not None:
            said, shift = guess.likely, shift + limits.prior_shift
        said = min(max(said, limits.said_min), limits.said_max)
        return 1.0 / (1.0 + exp(-log(said / (1.0 - said)) - shift))

    def saw(self, guess: Guess, *, is_right: bool) -> None:
        """Learn of one guess."""
        likelihood, shift = self.likelihood(guess), self._shift(guess)
        shift.known = shift.known * (1.0 - 1.0 / self._limits.memory) + likelihood * (1.0 - likelihood)
        shift.log_odds += (is_right - likelihood) / (shift.known + self._limits.prior_weight)

    def forget(self) -> None:
        """A token has passed without a guess: what was learned counts less, so that guesses are tried again."""
        fade = 1.0 - 0.125 / self._limits.memory
        for shift in (*self._said.values(), *self._silent.values()):
            shift.known *= fade
            shift.log_odds *= fade

    def next(self) -> "Calibration":
        """Return the one for another text of the same draft."""
        part = self._limits.kept_share
        kept = {kind: _Shift(part * shift.log_odds, part * shift.known) for kind, shift in self._said.copy().items()}
        return Calibration(self._limits, kept)

    def _shift(self, guess: Guess) -> _Shift:
        return (self._silent if guess.likely is None else self._said)[guess.kind]


class Calibrations:
    """Those of one draft's texts. Each begins with what the latest one has learned."""

    def __init__(self) -> None:
        self._latest = Calibration()

    def next(self) -> Calibration:
        """Return the one for another text. Any thread may call it."""
        self._latest = self._latest.next()
        return self._latest
