"""How long a token takes around a session's route: what the client has measured itself, and no server can claim."""

from collections import deque
from dataclasses import dataclass
from statistics import median

from swarm.client.planning.route import Hop
from swarm.client.session.standing import Layout
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class RingLimits:
    """Which times count."""

    steps_min: int = limit(16, "steps", "of one token on one route; of fewer the client learns nothing")
    steps_kept: int = limit(64, "steps", "whose median counts, the latest")


@dataclass(frozen=True, slots=True)
class Use:
    """What a session has shown of its last route. token_ms: the median time of one token around it."""

    hops: tuple[Hop, ...]
    token_ms: float


class Ring:
    """The times of one session's tokens on the route that it has now."""

    def __init__(self, limits: RingLimits = RingLimits()) -> None:
        self._limits = limits
        self._layout = Layout()
        self._took_s: deque[float] = deque(maxlen=limits.steps_kept)

    def note(self, layout: Layout, took_s: float) -> None:
        """Note a step of one token that travelled alone. layout: of its route; times on another one are forgotten."""
        if layout is not self._layout:
            self._layout = layout
            self._took_s.clear()
        self._took_s.append(took_s)

    @property
    def use(self) -> Use | None:
        """What the route has shown so far; None of too few steps."""
        if len(self._took_s) < self._limits.steps_min:
            return None
        return Use(self._layout.hops, 1000 * median(self._took_s))
