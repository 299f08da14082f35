"""Finds the servers of a route that computed wrongly: asks for replays, and draws the conclusions. Pure.

An audit computes a session's positions anew on a reference route, of other servers. If the outputs differ, the
reference computes them once more. One that contradicts itself has a server that is wrong at random, and shows nothing:
others take its place, and its servers are suspects, too. Then each suspect is put into the reference by itself, and
each server of the reference into the session's route. One that makes a difference is accused, and those in whose place
it stood: a third holder of the same blocks says which side is right.

    third == before      the one that was put in computes wrongly, if it is wrong again and again
    third == with it     those in whose place it stood do
    third == a third     both sides do: two that are independent agree on other outputs
    no third             one of the two sides does
    all differ           several do, and nothing says which

A suspect that is wrong in the same way twice is wrong. Else it has to differ in each of several replays, between which
the reference repeats itself: so a server of the reference that is wrong at times gets no other one blamed. Hops know
the hops beside them, so one of these must not get a server blamed by what it does beside that one:

    it lies there alone         the accused is right between other hops, if there are any
    it is right there alone     so it has spoiled what the accused is compared with: between other hops the accused
                                makes no difference to a control, which has another server in its place

If none makes a difference, a server was wrong once. If the session's route stands by its answers, and the reference
does not, it was one of the reference; if it is the other way round, one of the session's.

A replay begins like the session (`swarm.client.auditing.replaying`).
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from swarm.blocks import Blocks
from swarm.client.planning.route import Hop
from swarm.limits import limit

Outputs = Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class InquestLimits:
    """How far an audit goes."""

    references_max: int = limit(
        6, "routes", "that may contradict themselves; then nothing shows which servers are wrong"
    )
    thirds_max: int = limit(
        5, "holders", "that are asked which side is right, where the ones before differ from all others"
    )
    repeats_min: int = limit(
        4, "replays", "in which a server differs each time, and each time in another way, is wrong"
    )


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
    """The findings of an audit, by processes.

    cleared: they agree with independent ones. wrong: two independent holders contradict it. doubted: one of them
    computed wrongly. unclear: several of them did, so that it says little of any one. alike: of a dispute, those that
    made no difference in each other's place. That shows less, because a liar behind them may ignore its input. A
    verdict of nothing says that no other server could be asked.
    """

    cleared: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    doubted: frozenset[str] = frozenset()
    unclear: frozenset[str] = frozenset()
    alike: frozenset[str] = frozenset()

    @property
    def suspected(self) -> frozenset[str]:
        """Those that may be wrong."""
        return self.doubted | self.unclear

    def given(self, wrong: frozenset[str]) -> "Verdict":
        """Return what is left to say where these processes are known to be wrong: they explain doubts of them."""
        return Verdict(
            cleared=self.cleared - wrong,
            wrong=wrong,
            doubted=frozenset() if self.doubted & wrong else self.doubted,
            unclear=self.unclear - wrong,
            alike=self.alike - wrong,
        )

    @property
    def accuses(self) -> bool:
        """Whether any server is wrong, or may be."""
        return bool(self.wrong or self.suspected)


Agree = Callable[[Replay, Replay], bool]
Inquest = Generator[Ask, Replay | None, Verdict]


def inquest(
    claim: Replay,
    agree: Agree,
    limits: InquestLimits = InquestLimits(),
    order: Callable[[Sequence[Hop]], Sequence[Hop]] = tuple,
) -> Inquest:
    """Ask for replays, one after the other; a replay that cannot be had is None. Returns the verdict.

    claim: the answers of the session's route. agree: whether outputs are of the same computation. order: in which a
    single hop of it is replaced, where not all can be: else those behind it would never be audited.
    """
    route = claim.route
    reference = yield from _reference(route, order)
    if reference is None:
        return Verdict()
    suspects = [hop for hop in route if hop.process not in processes_of(reference.route)]
    if agree(claim, reference):  # a hop of both routes shows nothing: it may be wrong in both
        return Verdict(cleared=processes_of(route) ^ processes_of(reference.route))
    base, fickle = yield from _steady(reference, route, agree, limits)
    if base is None:  # a doubt of the session would let unsteady references frame a server of several sessions
        return Verdict(unclear=processes_of((*route, *fickle)))
    if agree(claim, base):
        suspects = []
    found = yield from _accusations((*suspects, *fickle), base, agree, limits)
    if found.accuses:
        return found
    # A hop of several routes may be wrong at times, in one of them. A doubt that left it out would blame the others.
    shared = processes_of(route) - processes_of(suspects)
    if not suspects:
        unsteady = processes_of(fickle) | (processes_of(reference.route) & shared if fickle else frozenset())
        return Verdict(cleared=processes_of((*route, *base.route)) - unsteady, doubted=unsteady)
    again = yield Ask(route)
    if again is None or not agree(again, claim):
        return Verdict(doubted=processes_of(route))
    others = [hop for hop in base.route if hop.process not in processes_of(route)]
    found = yield from _accusations(others, again, agree, limits)
    return found if found.accuses else Verdict(doubted=processes_of(others) | (shared & processes_of(base.route)))


def processes_of(hops: Iterable[Hop]) -> frozenset[str]:
    """Return the processes of hops."""
    return frozenset(hop.process for hop in hops)


def with_hop(route: tuple[Hop, ...], hop: Hop) -> tuple[Hop, ...]:
    """Return the route with a hop in the place of those that have its blocks, or parts of those hops."""
    return (*_part(route, route[0].blocks.start, hop.blocks.start), hop, *_part(route, hop.blocks.stop, _stop(route)))


def _rivals(hop: Hop, base: Replay) -> tuple[Hop, ...]:
    """Return the hops in whose place a hop stands in a route."""
    return _part(base.route, hop.blocks.start, hop.blocks.stop)


def _part(route: tuple[Hop, ...], start: int, stop: int) -> tuple[Hop, ...]:
    """Return the hops of a route for these blocks."""
    parts = ((hop, max(start, hop.blocks.start), min(stop, hop.blocks.stop)) for hop in route)
    return tuple(Hop(hop.signed, Blocks(a, b), hop.latency_ms) for hop, a, b in parts if a < b)


def _stop(route: tuple[Hop, ...]) -> int:
    return route[-1].blocks.stop


def _reference(
    route: tuple[Hop, ...], order: Callable[[Sequence[Hop]], Sequence[Hop]]
) -> Generator[Ask, Replay | None, Replay | None]:
    """Ask for a route without any of these hops; else for one with all but one of them."""
    reference = yield Ask(without=processes_of(route))
    if reference is not None or len(route) == 1:
        return reference
    for hop in order(route):
        reference = yield Ask(tuple(other for other in route if other is not hop), frozenset({hop.process}))
        if reference is not None:
            return reference
    return None


def _steady(
    reference: Replay, route: tuple[Hop, ...], agree: Agree, limits: InquestLimits
) -> Generator[Ask, Replay | None, tuple[Replay | None, tuple[Hop, ...]]]:
    """Return a reference that repeats itself, or None, and the hops of those that did not."""
    fickle: tuple[Hop, ...] = ()
    found = reference
    for left in reversed(range(limits.references_max)):
        again = yield Ask(found.route)
        if again is not None and agree(again, found):
            return found, fickle
        fickle += tuple(hop for hop in found.route if hop.process not in processes_of(route))
        other = (yield Ask(without=processes_of((*route, *fickle)))) if left else None
        if other is None:
            break
        found = other
    return None, fickle


def _accusations(
    hops: Sequence[Hop], base: Replay, agree: Agree, limits: InquestLimits
) -> Generator[Ask, Replay | None, Verdict]:
    """Put each hop into a route by itself. Returns the verdict on all of them."""
    verdicts = []
    for hop in hops:
        swapped = yield Ask(with_hop(base.route, hop))
        if swapped is None:
            continue
        if agree(swapped, base):
            gone = processes_of(base.route) - processes_of(swapped.route)  # what is in both routes may be wrong in both
            verdicts.append(Verdict(alike=gone | {hop.process}))
        else:
            verdicts.append((yield from _third(hop, swapped, base, agree, limits)))
    return _joined(verdicts)


def _third(
    hop: Hop, swapped: Replay, base: Replay, agree: Agree, limits: InquestLimits
) -> Generator[Ask, Replay | None, Verdict]:
    """Ask third holders of a hop's blocks whether the hop is wrong, or those that the route has in its place."""
    others, rivals = _rivals(hop, base), processes_of(_rivals(hop, base))
    beside = (
        *_part(base.route, base.route[0].blocks.start, hop.blocks.start),
        *_part(base.route, hop.blocks.stop, _stop(base.route)),
    )
    near, accused, newcomers = processes_of(beside), frozenset({hop.process}), frozenset[str]()
    thirds: list[Replay] = []  # that differ from both sides, and from each other
    for _ in range(limits.thirds_max):
        third = yield Ask(beside, rivals | accused | newcomers)
        if third is None:
            break
        if agree(third, base):
            again = yield from _wrong_again(hop, swapped, base, agree, limits)
            if again is None:
                return Verdict(doubted=accused | processes_of(base.route))
            accusation = yield from _contradicted((hop,), near, base, agree, limits, is_alike=again)
            return _joined([Verdict(cleared=rivals), accusation])
        if agree(third, swapped):
            accusation = yield from _contradicted(others, near, swapped, agree, limits)
            return _joined([Verdict(cleared=accused), accusation])
        own = processes_of(third.route) - near
        for other in thirds:
            if agree(third, other):
                right = own | (processes_of(other.route) - near)
                again = yield from _wrong_again(hop, swapped, base, agree, limits)
                first = Verdict(doubted=accused | near)
                if again is not None:
                    first = yield from _contradicted((hop,), near, third, agree, limits, is_alike=again)
                second = yield from _contradicted(others, near, third, agree, limits)
                return _joined([Verdict(cleared=right), first, second])
        thirds.append(third)
        newcomers |= own
    return Verdict(unclear=rivals | accused | newcomers) if thirds else Verdict(doubted=rivals | accused | near)


def _contradicted(
    hops: Sequence[Hop],
    beside: frozenset[str],
    right: Replay,
    agree: Agree,
    limits: InquestLimits,
    is_alike: bool = True,
) -> Generator[Ask, Replay | None, Verdict]:
    """Return the verdict on hops that two independent holders contradict: a single one is wrong, between others, too.

    beside: those that it stood between. They know it, and could be wrong, or right, where it is next to them alone;
    then it or they are in doubt. right: what the others have computed, beside the same ones. is_alike: it is wrong in
    the same way each time. Else one of those beside it may have been wrong at times, so that nothing is shown unless it
    is wrong between others.
    """
    blamed = processes_of(hops)
    if len(blamed) > 1:
        return Verdict(doubted=blamed)
    is_clear = not beside or is_alike
    for _ in range(limits.repeats_min if beside else 0):
        elsewhere = yield Ask(tuple(hops), beside)  # None may be a replay that has failed: it is asked for again
        if elsewhere is not None and (yield from _differs(elsewhere, blamed, beside, right, agree)):
            return Verdict(wrong=blamed)
        is_clear &= elsewhere is None
    return Verdict(wrong=blamed) if is_clear else Verdict(doubted=blamed | beside)


def _differs(
    elsewhere: Replay, blamed: frozenset[str], beside: frozenset[str], right: Replay, agree: Agree
) -> Generator[Ask, Replay | None, bool]:
    """Return whether the accused makes a difference between other hops: to `right`, and to another server there.

    Some of these hops may be wrong, too. Then the difference has to repeat itself.
    """
    if agree(elsewhere, right):
        return False
    around = tuple(hop for hop in elsewhere.route if hop.process not in blamed)
    control = yield Ask(around, blamed | beside)
    if control is None or agree(control, elsewhere):
        return False
    if agree(control, right):
        return True
    for replay in (control, elsewhere):
        again = yield Ask(replay.route)
        if again is None or not agree(again, replay):
            return False
    return True


def _wrong_again(
    hop: Hop, swapped: Replay, base: Replay, agree: Agree, limits: InquestLimits
) -> Generator[Ask, Replay | None, bool | None]:
    """Repeat an accusation. Returns whether the hop is wrong in the same way, or otherwise each time; None: neither.

    Each time the route has to be right without it.
    """
    for _ in range(limits.repeats_min - 1):
        again = yield Ask(with_hop(base.route, hop))
        if again is None or agree(again, base):
            return None
        if agree(again, swapped):
            return True
        before = yield Ask(base.route)
        if before is None or not agree(before, base):
            return None
    return False


def _joined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return all verdicts as one: the worst of a server counts, and a doubt that a wrong one explains does not."""

    def all_of(each: Callable[[Verdict], frozenset[str]]) -> frozenset[str]:
        return frozenset[str]().union(*map(each, verdicts))

    wrong = all_of(lambda verdict: verdict.wrong)
    verdicts = [replace(verdict.given(wrong), wrong=frozenset()) for verdict in verdicts]
    doubted = all_of(lambda verdict: verdict.doubted)
    unclear = all_of(lambda verdict: verdict.unclear) - doubted
    blamed = wrong | doubted | unclear
    cleared, alike = (all_of(each) - blamed for each in (lambda v: v.cleared, lambda v: v.alike))
    return Verdict(cleared, wrong, doubted, unclear, alike)
