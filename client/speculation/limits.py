"""Bounds on guessing ahead."""

from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class AheadLimits:
    """How far a session goes ahead of what is known."""

    tokens_max: int = limit(64, "tokens", "in flight; models with sliding windows keep so many more positions")
    frame_tokens: int = limit(8, "tokens", "one step carries no more guesses; servers compute it with others' steps")
    frame_tokens_min: int = limit(4, "tokens", "room for fewer guesses waits, unless nothing is in flight")
    frames_max: int = limit(32, "steps", "in flight: the window of a hop")
    cut_off: float = limit(0.1, "", "a guess that is less likely to become the text costs servers more than it saves")
    trip_s_min: float = limit(0.02, "s", "on a quicker route nothing is guessed unless the user asks for it")


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """How quickly it is learned how often guesses are right."""

    prior_right: float = limit(0.6, "", "of guesses of which nothing is known yet")
    prior_weight: float = limit(4.0, "guesses", "so many seen ones count as much as that assumption")
    memory: int = limit(64, "guesses", "older ones count less and less")
