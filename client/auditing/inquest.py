"""Finds the servers of a route that computed wrongly: asks for replays, and draws the conclusions. Pure.

An audit computes a session's positions anew on a reference route, of other servers. If the outputs differ, each server
of the session's route is put into the reference route by itself, then each of the reference into the session's route.
One that makes a difference is accused, and those in whose place it stood: a third holder of the same blocks says which
side is right.

    third == before      the one that was put in computes wrongly
    third == with it     those in whose place it stood do
    no third             one of them does

If none makes a difference, a server was wrong once. If the session's route stands by its answers, and the reference
does not, it was one of the reference; if it is the other way round, one of the session's.

A replay looks to servers like any prompt.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.blocks import Blocks
from swarm.client.planning.route import Hop

Outputs = Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class Ask:
    """A replay that is wanted. kept: hops at their places, in order; others, without these processes, fill the rest."""

    kept: tuple[Hop, ...] = ()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Replay:
    """The outputs of a route that has computed the session's positions anew."""

    route: tuple[Hop, ...]
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit has shown, by processes.

    cleared: they agree with independent ones. wrong: two independent holders contradict it. doubted: one of them
    computed wrongly. A verdict of nothing says that no other server could be asked.
    """

    cleared: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    doubted: frozenset[str] = frozenset()


Agree = Callable[[Replay, Replay], bool]
Inquest = Generator[Ask, Replay | None, Verdict]


def inquest(claim: Replay, agree: Agree) -> Inquest:
    """Ask for replays, one after the other; a replay that cannot be had is None. Returns the verdict.

    claim: what the session's route has answered. agree: whether outputs are of the same computation.
    """
    route = claim.route
    reference = yield from _reference(route)
    if reference is None:
        return Verdict()
    suspects = [hop for hop in route if hop.process not in processes_of(reference.route)]
    if agree(claim, reference):
        return Verdict(cleared=processes_of((*suspects, *reference.route)))
    if verdicts := (yield from _accusations(suspects, reference, agree)):
        return _joined(verdicts)
    again = yield Ask(route)
    if again is None or not agree(again, claim):
        return Verdict(doubted=processes_of(suspects))
    others = [hop for hop in reference.route if hop.process not in processes_of(route)]
    if verdicts := (yield from _accusations(others, again, agree)):
        return _joined(verdicts)
    return Verdict(doubted=processes_of(others))


def processes_of(hops: Iterable[Hop]) -> frozenset[str]:
    """Return the processes of hops."""
    return frozenset(hop.process for hop in hops)


def with_hop(route: tuple[Hop, ...], hop: Hop) -> tuple[Hop, ...]:
    """Return the route with a hop in the place of those that have its blocks, or parts of those hops."""
    return (*_part(route, route[0].blocks.start, hop.blocks.start), hop, *_part(route, hop.blocks.stop, _stop(route)))


def _part(route: tuple[Hop, ...], start: int, stop: int) -> tuple[Hop, ...]:
    """Return the hops of a route for these blocks."""
    parts = ((hop, max(start, hop.blocks.start), min(stop, hop.blocks.stop)) for hop in route)
    return tuple(Hop(hop.signed, Blocks(a, b), hop.latency_ms) for hop, a, b in parts if a < b)


def _stop(route: tuple[Hop, ...]) -> int:
    return route[-1].blocks.stop


def _reference(route: tuple[Hop, ...]) -> Generator[Ask, Replay | None, Replay | None]:
    """Ask for a route without any of these hops; else for one with all but one of them."""
    reference = yield Ask(without=processes_of(route))
    if reference is not None or len(route) == 1:
        return reference
    for index, hop in enumerate(route):
        reference = yield Ask((*route[:index], *route[index + 1 :]), frozenset({hop.process}))
        if reference is not None:
            return reference
    return None


def _accusations(hops: Sequence[Hop], base: Replay, agree: Agree) -> Generator[Ask, Replay | None, list[Verdict]]:
    """Put each hop into a route by itself. Returns the verdicts on those that make a difference."""
    verdicts = []
    for hop in hops:
        swapped = yield Ask(with_hop(base.route, hop))
        if swapped is not None and not agree(swapped, base):
            verdicts.append((yield from _third(hop, swapped, base, agree)))
    return verdicts


def _third(hop: Hop, swapped: Replay, base: Replay, agree: Agree) -> Generator[Ask, Replay | None, Verdict]:
    """Ask a third holder of a hop's blocks whether the hop is wrong, or those that the route has in its place."""
    rivals = processes_of(_part(base.route, hop.blocks.start, hop.blocks.stop))
    beside = (
        *_part(base.route, base.route[0].blocks.start, hop.blocks.start),
        *_part(base.route, hop.blocks.stop, _stop(base.route)),
    )
    third = yield Ask(beside, rivals | {hop.process})
    accused = frozenset({hop.process})
    if third is None:
        return Verdict(doubted=rivals | accused)
    if agree(third, base):
        return Verdict(cleared=rivals, wrong=accused)
    if agree(third, swapped):
        return Verdict(cleared=accused, wrong=rivals) if len(rivals) == 1 else Verdict(accused, doubted=rivals)
    newcomers = processes_of(third.route) - processes_of(beside)
    return Verdict(doubted=rivals | accused | newcomers)


def _joined(verdicts: list[Verdict]) -> Verdict:
    wrong = frozenset().union(*(verdict.wrong for verdict in verdicts))
    doubted = frozenset().union(*(verdict.doubted for verdict in verdicts)) - wrong
    cleared = frozenset().union(*(verdict.cleared for verdict in verdicts)) - wrong - doubted
    return Verdict(cleared, wrong, doubted)
