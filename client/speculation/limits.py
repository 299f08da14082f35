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
    cut_off: float = limit(0.02, "", "a guess that is less likely to become the text hardly saves a trip")
    cut_off_busy: float = limit(0.1, "", "the same where it delays others' steps")
    load_busy: float = limit(2.0, "steps", "announced by a hop that others use; one may be this client's own")
    load_max: float = limit(4.0, "steps", "announced by a hop that has more to do than guesses")
    lookup_min: float = limit(0.5, "", "guesses of look-up that are less likely leave their place to a draft model")


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """How quickly it is learned how often guesses are right."""

    prior_right: float = limit(0.6, "", "of guesses of which nothing is known yet")
    prior_shift: float = limit(1.0, "", "log-odds: the likeliest token of a draft is right more often than it says")
    prior_weight: float = limit(0.25, "", "of no shift, in the curvature of the log-likelihood: that of one guess")
    said_min: float = limit(0.01, "", "no draft is taken for less sure")
    said_max: float = limit(0.99, "", "no draft is taken for surer")
    memory: int = limit(64, "guesses", "older ones count less and less")
    kept_share: float = limit(0.5, "", "of what was learned of a draft model in one text counts in the next one")


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """When plain steps are better than guesses, unless the user asks for these."""

    trip_s_min: float = limit(0.02, "s", "on a quicker route nothing is guessed")
    drafts_min: float = limit(2.0, "guesses", "of a draft model fit into a trip, or nothing is guessed")
    step_s_min: float = limit(0.01, "s", "between steps of a draft model's guesses: each is work for client and hops")
    hop_share: float = limit(0.5, "", "of the slowest hop's time may go to these steps")
    forgets: float = limit(0.99, "", "share of a guess's time that is remembered with each plain token")
    tokens: int = limit(24, "tokens", "with guesses are compared with those without")
    lost: float = limit(1.02, "", "times a plain token: guesses that take longer pause")
    pause_min: int = limit(32, "tokens", "the first pause; each further one is twice as long")
    pause_max: int = limit(512, "tokens", "the longest pause")
