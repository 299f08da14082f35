"""Auditors of a swarm in which one server is wrong at times find it, and no other one, though replays may fail."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from swarm.client.auditing.docket import Docket, DocketLimits
from swarm.client.auditing.edges import Edge
from swarm.client.auditing.inquest import Ask, Replay, Verdict, inquest, processes_of
from swarm.client.planning.route import Hop
from tests.client.test_inquest import hop

LIES_SESSION, LIES_REPLAY = 0.46, 0.63  # of 1 position in 100, of 60 steps and of 100 positions
AUDITS_MAX, REPLAYS_MAX = 50, 64  # of the liar, as in benchmarks/patrol.py, and of an audit
FIRST, SECOND = tuple(hop(0, 6) for _ in range(3)), tuple(hop(6, 12) for _ in range(3))
LIAR = SECOND[2]


@dataclass
class World:
    """A swarm of two spans, three servers each. fails: the share of replays that fail. burst: after it,
    for how many more replays a server of the route is gone.
    """

    draws: Random
    fails: float
    burst: int
    left_out: set[str] = field(default_factory=set)
    down: dict[str, int] = field(default_factory=dict)  # by process: for how many replays
    lies: int = 0

    def route(self, kept: Collection[Hop], without: Collection[str] = ()) -> tuple[Hop, ...] | None:
        """Draw the hops that are not kept."""
        hops = []
        for servers in (FIRST, SECOND):
            gone = {*without, *processes_of(kept)}
            able = [s for s in servers if s.process not in gone and s.peer_id not in self.left_out]
            own = next((each for each in kept if each in servers), None)
            if own is None and not able:
                return None
            hops.append(own or self.draws.choice(able))
        return tuple(hops)

    def audit(self, docket: Docket) -> tuple[Hop, Verdict]:
        """Have a session through a server that is drawn, and audit it."""
        servers = {each.process: each for each in (*FIRST, *SECOND) if each.peer_id not in self.left_out}
        drawn = servers[docket.draw(tuple(servers)) or ""]
        route = self.route((drawn,))
        assert route is not None
        claim = self.outputs(route, LIES_SESSION)

        def order(hops: Sequence[Hop]) -> list[Hop]:
            return sorted(hops, key=lambda each: each.process != drawn.process)

        course = inquest(claim, lambda one, other: one.outputs == other.outputs, order=order)
        ask, disagrees = next(course), False
        for _ in range(REPLAYS_MAX):
            replay = self.replay(ask)
            disagrees |= replay is not None
            try:
                ask = course.send(replay)
            except StopIteration as end:
                return drawn, end.value
        return drawn, Verdict(unclear=processes_of(route) if disagrees else frozenset())

    def replay(self, ask: Ask) -> Replay | None:
        route = self.route(ask.kept, ask.without)
        if route is None:
            return None
        is_down = any(self.down.get(process, 0) for process in processes_of(route))
        self.down = {process: left - 1 for process, left in self.down.items() if left > 1}
        if not is_down and self.draws.random() < self.fails:
            is_down, self.down[self.draws.choice(route).process] = True, self.burst
        return None if is_down else self.outputs(route, LIES_REPLAY)

    def outputs(self, route: tuple[Hop, ...], chance: float) -> Replay:
        """A lie is another one each time."""
        lies = LIAR in route and self.draws.random() < chance
        self.lies += lies
        return Replay(route, {0: self.lies if lies else 0})


def patrol(seed: int, fails: float, burst: int) -> tuple[int, set[str]]:
    """Audit until the liar is found. Returns in how many audits it was, and the others that were taken for wrong."""
    world, of_liar = World(Random(seed), fails, burst), 0
    docket = Docket(DocketLimits(), world.draws)
    while of_liar < AUDITS_MAX and LIAR.peer_id not in world.left_out:
        drawn, verdict = world.audit(docket)
        findings = docket.take(drawn.peer_id, verdict.given(docket.ledger.note(verdict)))
        of_liar += LIAR.peer_id in findings.agreed | findings.doubted | findings.wrong
        world.left_out |= findings.wrong
    return of_liar if LIAR.peer_id in world.left_out else 0, world.left_out - {LIAR.peer_id}


def test_a_doubt_that_a_wrong_server_explains_is_gone() -> None:
    doubt = Verdict(doubted=frozenset({"liar", "honest"}))
    assert not doubt.given(frozenset({"liar"})).suspected
    assert doubt.given(frozenset({"another"})).suspected == {"liar", "honest"}


def test_a_server_whose_outputs_are_wrong_explains_doubts_of_receipts_and_of_its_other_processes() -> None:
    docket = Docket(DocketLimits(), Random(1))
    assert not docket.compare([Edge(frozenset({"liar/1#outputs", "honest/1#inputs"}), agrees=False)])
    docket.take("honest", Verdict(cleared=frozenset({"honest/1"})))
    assert docket.doubted == {"liar", "honest"}, "right outputs excuse no receipt"
    earlier = Verdict(doubted=frozenset({"liar/2", "neighbour/1"}))
    docket.take("neighbour", earlier.given(docket.ledger.note(earlier)))
    assert docket.doubted == {"liar", "honest", "neighbour"}
    wrong = Verdict(wrong=frozenset({"liar/1"}))
    assert docket.take("liar", wrong.given(docket.ledger.note(wrong))).wrong == {"liar"}
    assert not docket.doubted


@pytest.mark.parametrize(
    ("fails", "burst", "least"), [(0.0, 0, 0.99), (0.05, 12, 0.99), (0.2, 1, 0.99), (0.2, 12, 0.8), (0.4, 12, 0.5)]
)
@pytest.mark.parametrize("runs", [30, pytest.param(500, marks=pytest.mark.long)])
def test_the_liar_is_found_and_nobody_else(fails: float, burst: int, least: float, runs: int) -> None:
    results = [patrol(seed, fails, burst) for seed in range(runs)]
    assert not [others for _, others in results if others], "an honest server is taken for wrong"
    assert sum(audits > 0 for audits, _ in results) >= (least if runs > 100 else 0.9 * least) * runs
