"""How fast the slowest server of a route can be, for throughput. Pure."""

from dataclasses import dataclass

import numpy as np

from swarm.client.planning.request import PlanningLimits
from swarm.client.planning.stages import Ints, Part, Stages


@dataclass(frozen=True, slots=True)
class Pace:
    """The time that no stage exceeds, how many blocks each server does in it, and some ways that keep it."""

    stage_ms: float
    limit: Ints
    ways: tuple[list[Part], ...]


def quickest_pace(stages: Stages, limits: PlanningLimits) -> Pace:
    """Make the slowest stage about as fast as it can be. A stage of n blocks takes max(stage_floor_ms, n * block_ms).

    The pace is found by bisection, to within `stage_slack`. A greedy trial decides whether a pace can be kept: an exact
    answer, with one turn for each server, is as hard as scheduling is. Every block must have a holder.
    """

    def at_pace(ms: float) -> Pace:
        limit = np.minimum(ms / stages.block_ms + 1e-9, stages.n_blocks).astype(np.int64)
        ways = (_in_turn(stages, limit, furthest_first=first) for first in (False, True))
        return Pace(ms, limit, tuple(way for way in ways if way is not None))

    quickest = at_pace(limits.stage_floor_ms)
    if quickest.ways:
        return quickest
    least, quickest = limits.stage_floor_ms, at_pace(float((stages.block_ms * (stages.stop - stages.start)).max()))
    while quickest.stage_ms > least * limits.stage_slack:
        tried = at_pace((least * quickest.stage_ms) ** 0.5)
        if tried.ways:
            quickest = tried
        else:
            least = tried.stage_ms
    return quickest


def _in_turn(stages: Stages, limit: Ints, *, furthest_first: bool) -> list[Part] | None:
    """Give every peer one turn, of as many blocks as its limit allows: first whose span ends first, or goes furthest.

    The former uses many servers and fails least; the latter uses few.
    """
    unused = limit > 0
    parts: list[Part] = []
    at = 0
    while at < stages.n_blocks:
        free = stages.holders[at][unused[stages.holders[at]]]
        if not len(free):
            return None
        reach = np.minimum(stages.stop[free], at + limit[free])
        rank = stages.stop[free] - reach * (stages.n_blocks + 1) if furthest_first else stages.stop[free] - reach / 1e4
        chosen = int(rank.argmin())
        parts.append(Part(int(free[chosen]), at, int(reach[chosen])))
        unused &= stages.peer != stages.peer[free[chosen]]
        at = int(reach[chosen])
    return parts
