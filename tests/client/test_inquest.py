"""Who was wrong, from replays on other routes. Outputs are the names of the wrong servers that took part."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest

from swarm.blocks import Blocks
from swarm.client.auditing.inquest import Replay, Verdict, inquest, processes_of, with_hop
from swarm.client.auditing.ledger import Ledger, LedgerLimits
from swarm.client.planning.route import Hop
from swarm.identity import Identity
from tests.client.test_route import server


def hop(start, stop):
    return Hop(server(start, stop, identity=Identity.generate()), Blocks(start, stop))


@dataclass
class World:
    """Servers that answer replays. wrong: those that lie in each. at_times: those that lie in the session only."""

    servers: tuple[Hop, ...]
    wrong: tuple[Hop, ...] = ()

    def outputs(self, route):
        return {0: processes_of(route) & processes_of(self.wrong)}

    def replay(self, ask):
        hops, at = [], 0
        for kept in (*ask.kept, None):
            until = 12 if kept is None else kept.blocks.start
            while at < until:
                found = next((each for each in self.servers if self.takes(each, at, ask)), None)
                if found is None:
                    return None
                hops.append(Hop(found.signed, Blocks(at, min(until, found.blocks.stop))))
                at = hops[-1].blocks.stop
            if kept is not None:
                hops.append(kept)
                at = kept.blocks.stop
        return Replay(tuple(hops), self.outputs(hops))

    @staticmethod
    def takes(each, at, ask):
        return at in each.blocks and each.process not in {*ask.without, *processes_of(ask.kept)}

    def verdict(self, route, claim=None):
        told = Replay(route, self.outputs(route) if claim is None else claim)
        course, asked = inquest(told, lambda a, b: a.outputs == b.outputs), 0
        ask = next(course)
        while True:
            asked += 1
            try:
                ask = course.send(self.replay(ask))
            except StopIteration as end:
                assert asked <= 100
                return end.value


A, B, C = hop(0, 4), hop(4, 8), hop(8, 12)
ROUTE = (A, B, C)
D, E = hop(0, 6), hop(6, 12)
F = hop(0, 12)
LIED = {0: frozenset({"somebody"})}


def names(*hops):
    return processes_of(hops)


def test_servers_that_agree_with_others_are_cleared():
    assert World((*ROUTE, D, E)).verdict(ROUTE) == Verdict(cleared=names(A, B, C, D, E))


@pytest.mark.parametrize("liar", ROUTE, ids=["first", "second", "third"])
def test_a_third_holder_shows_who_is_wrong(liar):
    verdict = World((*ROUTE, D, E, F), (liar,)).verdict(ROUTE)
    assert verdict.wrong == names(liar)
    assert not verdict.doubted


@dataclass
class Neighbours(World):
    """One server lies where a certain other one is next to it in the route, and nowhere else."""

    liar: Hop | None = None
    victim: Hop | None = None

    def outputs(self, route):
        pairs = [{one.process, other.process} for one, other in pairwise(route)]
        assert self.liar is not None
        assert self.victim is not None
        return {0: {self.liar.process, self.victim.process} in pairs}


@pytest.mark.parametrize("is_rival", [False, True], ids=["beside a suspect", "beside a server of the reference"])
def test_a_server_that_lies_only_beside_another_gets_it_not_blamed(is_rival):
    others = hop(0, 4), hop(4, 8), hop(8, 12)
    victim = others[0] if is_rival else A
    world = Neighbours((*ROUTE, *others, hop(0, 4), hop(4, 8)), liar=others[1], victim=victim)
    verdict = world.verdict(ROUTE, None if is_rival else LIED)
    assert victim.process not in verdict.wrong
    assert verdict.suspected, "something was wrong"


@dataclass
class Sparing(World):
    """One server is right where a certain other one is next to it, and wrong in the same way everywhere else."""

    liar: Hop | None = None
    spared: Hop | None = None

    def outputs(self, route):
        assert self.liar is not None
        assert self.spared is not None
        return {0: names(self.liar) <= processes_of(route) and not names(self.spared) <= processes_of(route)}


@pytest.mark.parametrize("is_behind", [False, True], ids=["before it", "behind it"])
def test_a_server_that_is_right_only_beside_another_gets_it_not_blamed(is_behind):
    """The liar spoils the reference. So the honest one that it spares is the one that makes a difference there."""
    firsts, seconds = [hop(0, 6) for _ in range(5)], [hop(6, 12) for _ in range(5)]
    spared, liar = (firsts[4], seconds[0]) if is_behind else (seconds[4], firsts[0])
    world = Sparing((*firsts, *seconds), liar=liar, spared=spared)
    route = (spared, seconds[2]) if is_behind else (firsts[2], spared)
    verdict = world.verdict(route)
    assert verdict.wrong == names(liar)
    assert not verdict.suspected


def test_a_replay_between_others_that_fails_once_convicts_no_server():
    failed = []

    class Failing(Neighbours):
        def replay(self, ask):
            if len(ask.kept) == 1 and ask.without and not failed:  # the accused between other hops
                failed.append(ask)
                return None
            return super().replay(ask)

    others = hop(0, 4), hop(4, 8), hop(8, 12)
    world = Failing((*ROUTE, *others, hop(0, 4), hop(4, 8)), liar=others[1], victim=A)
    assert A.process not in world.verdict(ROUTE, LIED).wrong
    assert failed


def test_a_server_without_others_around_it_is_contradicted_all_the_same():
    alone = hop(4, 12)
    assert World((A, alone, hop(0, 4), D), (A,)).verdict((A, alone)).wrong == names(A)


def test_two_wrong_servers_are_both_found():
    assert World((*ROUTE, D, E, F), (A, C)).verdict(ROUTE).wrong == names(A, C)


def test_the_server_that_contradicts_may_be_the_wrong_one():
    verdict = World((A, D, F, B, C), (D,)).verdict((A, hop(4, 12)))
    assert verdict.wrong == names(D)


def test_without_a_third_holder_both_are_doubted():
    verdict = World((*ROUTE, D, E), (A,)).verdict(ROUTE)
    assert (verdict.wrong, verdict.doubted) == (frozenset(), names(A, D, E))


@pytest.mark.parametrize("rarely", [0.3, 0.63, 0.9])
def test_replays_that_fail_get_no_honest_server_found(rarely):
    """One of six servers is wrong at times, each time in another way, and three of ten replays fail."""
    draws, servers = random.Random(rarely), [*(hop(0, 6) for _ in range(3)), *(hop(6, 12) for _ in range(3))]
    liar = names(servers[-1])

    class Failing(World):
        def outputs(self, route):
            is_wrong = processes_of(route) & liar and draws.random() < rarely
            return {0: draws.random() if is_wrong else -1.0}

        def replay(self, ask):
            draws.shuffle(servers)
            return super().replay(ask) if draws.random() > 0.3 else None

    world, found = Failing(servers), Counter()
    for _ in range(400):
        ledger, wrong = Ledger(), frozenset()
        for _ in range(50):
            route = tuple(
                draws.choice([each for each in servers if each.blocks == part]) for part in (D.blocks, E.blocks)
            )
            if wrong := ledger.note(world.verdict(route)):
                break
        found[wrong] += 1
    assert found.keys() <= {liar, frozenset()}
    assert found[liar] > 50


def test_of_three_that_differ_it_is_unclear_who_is_wrong():
    class Each(World):
        def outputs(self, route):
            return {0: next(iter(processes_of(route)))}

    one, two, three = hop(0, 12), hop(0, 12), hop(0, 12)
    assert Each((one, two, three)).verdict((one,)) == Verdict(unclear=names(one, two, three))


def test_a_hop_that_was_wrong_once_is_one_of_the_route():
    assert World((*ROUTE, D, E)).verdict(ROUTE, LIED).doubted == names(A, B, C)


def test_a_reference_that_was_wrong_once_is_doubted():
    class Fickle(World):
        count = 0

        def outputs(self, route):
            self.count += D.process in processes_of(route)
            return {0: self.count if D.process in processes_of(route) and self.count == 1 else 0}

    assert Fickle((D, E, hop(0, 12))).verdict((F,), {0: 0}).doubted == names(D, E)


class Random(World):
    """Its wrong servers answer otherwise each time."""

    count = 0

    def outputs(self, route):
        self.count += 1
        liars = processes_of(route) & processes_of(self.wrong)
        return {0: (self.count, liars) if liars else frozenset()}


def test_a_reference_that_contradicts_itself_gives_way_and_its_server_is_found():
    last = hop(0, 12)
    verdict = Random((hop(4, 8), hop(4, 8), *ROUTE, D, E, F, last), (D, B)).verdict(ROUTE)
    assert verdict.wrong == names(B, D)
    assert not verdict.doubted


def test_where_all_references_contradict_themselves_nothing_shows_which_servers_are_wrong():
    others = tuple(hop(0, 12) for _ in range(6))
    world = Random((*ROUTE, *others), (*others, A))
    assert world.verdict(ROUTE) == Verdict(unclear=names(*ROUTE, *others))


def test_references_that_contradict_themselves_frame_no_server_of_several_sessions():
    ledger = Ledger()
    for _ in range(4):
        others = tuple(hop(0, 12) for _ in range(6))
        route = (A, *(hop(h.blocks.start, h.blocks.stop) for h in ROUTE[1:]))
        assert not ledger.note(Random((*route, *others), others).verdict(route))
    assert ledger.audits.wrong == ()


def test_a_third_holder_that_differs_from_both_gives_way_to_the_next():
    second, third, fourth = hop(0, 4), hop(0, 4), hop(0, 4)

    class Each(World):
        def outputs(self, route):
            return {0: tuple(sorted(processes_of(route) & processes_of(self.wrong)))}

    world = Each((D, E, *ROUTE, second, third, fourth), (A, second))
    assert world.verdict(ROUTE).wrong == names(A)


@pytest.mark.parametrize("wrong_in", range(3, 20), ids=str)
def test_a_server_that_is_wrong_at_times_gets_no_other_one_blamed(wrong_in):
    """The reference's server is right twice, and wrong in one replay of the many behind that."""

    class AtTimes(World):
        count = 0

        def outputs(self, route):
            self.count += D.process in processes_of(route)
            is_wrong = D.process in processes_of(route) and self.count == wrong_in
            return {0: ("once",) if is_wrong else tuple(processes_of(route) & processes_of(self.wrong))}

    verdict = AtTimes((D, E, *ROUTE, F, hop(0, 12)), (A,)).verdict(ROUTE)
    assert verdict.wrong <= names(A, D)


def test_one_hop_is_audited_where_no_other_route_exists():
    other = hop(4, 8)
    assert World((*ROUTE, other)).verdict(ROUTE).cleared == names(B, other), "the others were in both routes"
    assert World((*ROUTE, other, hop(4, 8)), (B,)).verdict(ROUTE).wrong == names(B)


def test_those_that_make_no_difference_in_each_others_place_are_alike():
    first, middle, last = (hop(each.blocks.start, each.blocks.stop) for each in ROUTE)
    verdict = World((*ROUTE, first, middle, last, F), (A,)).verdict(ROUTE)
    assert verdict.alike == names(B, C, middle, last)
    verdict = World((*ROUTE, D, E, F), (A,)).verdict(ROUTE)
    assert verdict.alike == names(B, C), "the others remain in the route with other blocks"


def test_a_wrong_server_is_never_alike():
    every = (*ROUTE, D, E, F, hop(0, 12))
    for liars in ((A, D), (D,), (A, B), (E,)):
        assert not World(every, liars).verdict(ROUTE).alike & names(*liars)


class Each(World):
    """Each of its wrong servers is wrong in its own way."""

    def outputs(self, route):
        return {0: tuple(sorted(processes_of(route) & processes_of(self.wrong)))}


def test_two_thirds_that_agree_show_that_both_sides_are_wrong():
    liar, right, fellow = hop(4, 8), hop(4, 8), hop(4, 8)
    first, last = hop(0, 4), hop(8, 12)
    verdict = Each((first, liar, last, right, fellow, *ROUTE), (liar, B)).verdict(ROUTE)
    assert verdict.wrong == names(B, liar)
    assert verdict.cleared == names(right, fellow)
    assert not verdict.suspected


def test_of_a_crowd_of_liars_nobody_is_doubted_alone():
    first, last = hop(0, 4), hop(8, 12)
    crowd = [hop(4, 8) for _ in range(4)]
    verdict = Each((first, *crowd, last, *ROUTE), (B, *crowd)).verdict(ROUTE)
    assert verdict.unclear == names(B, *crowd)
    assert not verdict.wrong | verdict.doubted


def test_nothing_is_said_where_nobody_else_can_be_asked():
    assert World(ROUTE).verdict(ROUTE, LIED) == Verdict()


def test_a_hop_takes_the_place_of_parts_of_others():
    assert [str(each.blocks) for each in with_hop((D, E), B)] == ["0:4", "4:8", "8:12"]
    assert [each.process for each in with_hop((D, E), B)] == [D.process, B.process, E.process]


def test_doubts_in_different_companies_show_who_was_in_all_of_them():
    ledger = Ledger()
    assert not ledger.note(Verdict(doubted=frozenset({"a/1", "b/1", "c/1"})))
    assert not ledger.note(Verdict(doubted=frozenset({"a/1", "b/1"})))
    assert ledger.note(Verdict(doubted=frozenset({"b/1", "d/1"}))) == {"b/1"}
    assert (ledger.audits.wrong, ledger.audits.disputed) == (("b",), 3)


def test_a_server_that_others_agree_with_is_doubted_no_more():
    ledger = Ledger()
    for _ in range(4):
        assert not ledger.note(Verdict(doubted=frozenset({"a/1"})))
        ledger.note(Verdict(cleared=frozenset({"a/1"})))
    assert ledger.audits.wrong == ()


def test_one_doubt_shows_nobody():
    assert not Ledger().note(Verdict(doubted=frozenset({"a/1"})))


def test_audits_are_counted_by_what_they_showed():
    ledger = Ledger()
    ledger.note(Verdict(cleared=frozenset({"a/1"})))
    ledger.note(Verdict())
    assert ledger.note(Verdict(wrong=frozenset({"b/1"}))) == {"b/1"}
    ledger.note(Verdict(wrong=frozenset({"b/2"})))
    audits = ledger.audits
    assert (audits.agreed, audits.disputed, audits.unaudited, audits.wrong) == (1, 2, 1, ("b",))


def test_doubts_are_bounded():
    ledger = Ledger(LedgerLimits(doubts_max=2))
    for name in "abcaa":
        assert not ledger.note(Verdict(doubted=frozenset({f"{name}/1"})))


def test_a_doubt_that_a_wrong_server_explains_counts_no_more():
    ledger = Ledger()
    for liar in ("x/1", "y/1"):
        assert not ledger.note(Verdict(doubted=frozenset({"honest/1", liar})))
    assert ledger.note(Verdict(wrong=frozenset({"x/1"}))) == {"x/1"}
    assert not ledger.note(Verdict(doubted=frozenset({"honest/1", "z/1"})))
    assert ledger.note(Verdict(doubted=frozenset({"honest/1", "q/1"}))) == {"honest/1"}, "three are left"


def test_where_several_are_wrong_nobody_is_counted():
    ledger = Ledger()
    for liar in ("x/1", "y/1", "z/1", "q/1"):
        assert not ledger.note(Verdict(unclear=frozenset({"honest/1", liar})))
    assert ledger.audits.disputed == 4
