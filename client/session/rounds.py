"""What rounds of questions to the hops show: which hop a step waits for, and whether anything moves. Pure.

All hops have answered when a round is looked at. The *front* is the first hop that is not done. A front that computes
may take its time as long as it finishes jobs, and after a minute another hop is asked, if there is one. If the front
has nothing to compute, and no byte comes to it, the message that it waits for is lost. So it is if bytes come for
long, and nothing is whole then: that is said by a hop that lies, or whose neighbour sends no end.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.client.session.limits import WatchLimits
from swarm.protocol.messages import Progress
from swarm.protocol.replay import runs


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nothing comes to hop `front`, or to the client if it is the number of hops. again: retransmit first."""

    front: int
    again: bool


@dataclass(frozen=True, slots=True)
class Wedged:
    """Hop `front` has something to compute, and does not compute it."""

    front: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Hop `front` has been busy with others for so long that another hop may be quicker."""

    front: int


class Rounds:
    """The rounds of questions in one step, or one repair. Pure: answers and the time go in."""

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._before: object = None
        self._quiet_rounds = 0
        self._moved_at = 0.0
        self._place: object = None
        self._there_since = 0.0

    def judge(
        self, hops: Sequence[Progress], done: Sequence[bool], due: int, now: float, refusals: int = 0
    ) -> Stuck | Wedged | Overdue | None:
        """Look at one round of answers. done: for each hop, whether it has sent on step, or position, `due`.

        refusals: how many there have been. A step that a hop refuses has arrived there.
        """
        front = next((index for index, is_done in enumerate(done) if not is_done), len(hops))
        computing = front < len(hops) and hops[front].under_way > 0
        place = (front, due, *((hops[front].length, hops[front].under_way) if front < len(hops) else ()))
        if self._place != place:
            self._place, self._there_since = place, now
        there_s = now - self._there_since
        if computing and there_s > self._limits.overdue_s:
            self._there_since = now
            return Overdue(front)
        progress = hops[front].jobs_done if computing else [(hop.applied, hop.length) for hop in hops]
        state = (front, computing, refusals, progress)
        moves = state != self._before
        if not computing and front < len(hops) and there_s <= self._limits.receives_s:
            moves = moves or hops[front].quiet_ms < 1000 * self._limits.quiet_s
        self._before = state
        if moves:
            self._moved_at = now
            self._quiet_rounds = 0
            return None
        if computing:
            return Wedged(front) if now - self._moved_at > self._limits.wedged_s else None
        self._quiet_rounds += 1
        if self._quiet_rounds == self._limits.resend_rounds:
            return Stuck(front, again=True)
        return Stuck(front, again=False) if self._quiet_rounds >= self._limits.give_up_rounds else None


def rebuilding_front(hops: Sequence[Progress], lacking: Collection[int], due: int) -> int:
    """Return the hop that a past of `due` positions waits for, on its way to some hops; else the number of hops.

    Hops that get it one from the other wait for the last one, because no more is sent than that one has room for. So it
    is the last hop that computes; else the last that lacks what the hop before it has; else the first one.
    """
    for first, count in runs(lacking):
        run = range(first, first + count)
        if all(hops[index].length >= due and not hops[index].under_way for index in run):
            continue
        computing = [index for index in run if hops[index].under_way]
        behind = [index for index in run[1:] if hops[index].length < hops[index - 1].length]
        return (computing or behind or [first])[-1]
    return len(hops)
