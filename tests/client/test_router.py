"""What a router plans with: the processes that it avoids, and how old a reading of the directory may be."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from swarm.blocks import Blocks
from swarm.client.planning.route import Hop, process_of
from swarm.client.planning.router import Reading, Router, RouterLimits, Wanted, reading_for
from swarm.client.session.avoidance import Avoidance
from swarm.client.session.membership import Membership
from swarm.client.session.plan import SessionPlan
from swarm.dht.directory import Survey
from swarm.errors import NoRoute, Unreachable
from swarm.identity import Identity
from tests.client.test_route import server

pytestmark = pytest.mark.virtual_clock

WANTED = Wanted("00" * 32, "model", 6, "float32")
PLAN = SessionPlan("00" * 32, positions_max=8, rollback_max=0, step_timeout_s=1.0, wait_for_blocks_s=0.0)
LIMITS = RouterLimits()
HOUR_S = 3600.0

HELD = ((Blocks(0, 6), "float32"),)


class Reads:
    """A directory whose answers are given, and counted. A look-up takes no time unless `takes_s` says so."""

    def __init__(self, *servers):
        self.servers, self.surveys, self.others, self.silent = servers, 0, (), False
        self.early, self.takes_s = (), 0.0
        self.began = time.time() - asyncio.get_running_loop().time()

    def now(self):
        return self.began + asyncio.get_running_loop().time()

    async def survey(self, root, n_blocks, heard):
        self.surveys += 1
        heard([SimpleNamespace(data=each.data, signed=each) for each in self.early])
        await asyncio.sleep(self.takes_s)
        if self.silent:
            raise Unreachable("the swarm", (), 1.0)
        return Survey(tuple(self.servers), ())

    def updated(self, survey, root, n_blocks, heard):
        return Survey((*survey.servers, *(entry.signed for entry in heard)), ())

    async def models(self, name):
        if self.others is None:
            raise Unreachable("the swarm", (), 1.0)
        return self.others


class Sessions:
    """In place of the real ones: a session is a plan, and the round trips that it measured."""

    def __init__(self, avoidance):
        self.avoidance, self.any_open, self.latency_ms = avoidance, False, None

    async def open(self, plan, blocks, planner, limits, first, renewed):
        self.any_open = True
        hops = await planner(blocks, (), (), True)
        self.ended = asyncio.get_running_loop().create_future()
        return SimpleNamespace(route=[replace(hop, latency_ms=self.latency_ms) for hop in hops], ended=self.ended)

    async def close(self):
        self.any_open = False


def router_of(*servers):
    directory, now = Reads(*servers), asyncio.get_running_loop().time
    avoidance = Avoidance(now, now)
    return Router(WANTED, directory, avoidance), directory, avoidance


def membership_of(*servers):
    router, directory, avoidance = router_of(*servers)
    return Membership(router, Sessions(avoidance)), directory


async def planned(router, *arguments):
    return [hop.signed for hop in await router.plan(Blocks(0, 6), *arguments)]


def elapsed_s(since):
    return asyncio.get_running_loop().time() - since


@pytest.mark.parametrize(
    ("age_s", "repairing", "fresh", "reading"),
    [
        (LIMITS.survey_age_s - 0.1, False, False, Reading.NO),
        (LIMITS.survey_age_s, False, False, Reading.FIRST),
        (LIMITS.survey_fresh_s - 0.1, False, True, Reading.NO),
        (LIMITS.survey_fresh_s, False, True, Reading.FIRST),
        (LIMITS.survey_fresh_s - 0.1, True, False, Reading.NO),
        (LIMITS.survey_fresh_s, True, False, Reading.BESIDE),
        (HOUR_S, True, False, Reading.BESIDE),
        (LIMITS.survey_fresh_s - 0.1, True, True, Reading.NO),
        (LIMITS.survey_fresh_s, True, True, Reading.FIRST),
    ],
)
def test_age_and_purpose_decide_whether_a_plan_reads(age_s, repairing, fresh, reading):
    assert reading_for(age_s, LIMITS, repairing=repairing, fresh=fresh) is reading


async def test_the_process_that_failed_longest_ago_is_taken_first():
    servers = [server(0, 6, tps=rate) for rate in (100.0, 10.0, 1.0)]
    router, _, avoidance = router_of(*servers)
    (process_of_first,) = [hop.process for hop in await router.plan(Blocks(0, 6))]
    processes = [process_of_first]
    for _ in range(2):
        (hop,) = await router.plan(Blocks(0, 6), processes)
        processes.append(hop.process)
    named = {process_of(signed.announcement): signed for signed in servers}
    first, second, third = (named[process] for process in processes)  # the faster two cost the same
    assert await planned(router) == [first]
    for process in (processes[1], processes[2], processes[0]):  # each of them, a moment apart
        avoidance.failed(process)
        await asyncio.sleep(1.0)
    assert await planned(router) == [second]
    assert await planned(router, [processes[1]]) == [third]


async def test_a_repair_reads_the_directory_beside_its_plan():
    old, new = server(0, 6, tps=1.0), server(0, 6, tps=100.0)
    router, directory, _ = router_of(old)
    assert await planned(router) == [old]
    directory.servers = [old, new]
    await asyncio.sleep(HOUR_S)
    assert await planned(router, (), HELD) == [old]
    await asyncio.sleep(0.01)
    assert directory.surveys == 2
    assert await planned(router, (), HELD) == [new]


async def test_a_repairs_next_attempt_knows_the_records_that_have_come():
    """Of a look-up that is under way: dead nodes may delay its end, while a spare's record is there."""
    old, new = server(0, 6, tps=1.0), server(0, 6, tps=100.0)
    router, directory, _ = router_of(old)
    assert await planned(router) == [old]
    await asyncio.sleep(HOUR_S)
    directory.takes_s, directory.early = 2.0, (new,)
    assert await planned(router, (), HELD) == [old]
    await asyncio.sleep(0.01)
    assert await planned(router, (), HELD) == [new]
    assert directory.surveys == 2
    await asyncio.sleep(3.0)
    assert router.surveys.latest.servers == (old,), "the whole look-up has the last word"


async def test_a_repair_waits_a_moment_where_it_knows_ended_processes_alone():
    ended, new = server(0, 6, tps=1.0), server(0, 6, tps=1.0)
    router, directory, avoidance = router_of(ended)
    (hop,) = await router.plan(Blocks(0, 6))
    avoidance.failed(hop.process)
    await asyncio.sleep(LIMITS.survey_fresh_s)
    directory.takes_s, began = 10 * LIMITS.ended_s, asyncio.get_running_loop().time()
    assert await planned(router, (), HELD) == [ended], "it failed just now: perhaps only a connection broke"
    assert elapsed_s(began) == 0.0
    await asyncio.sleep(HOUR_S)
    began = asyncio.get_running_loop().time()
    assert await planned(router, (), HELD) == [ended]
    assert elapsed_s(began) == pytest.approx(LIMITS.ended_s)
    directory.takes_s, directory.servers = LIMITS.ended_s / 4, (ended, new)
    await asyncio.sleep(HOUR_S)
    began = asyncio.get_running_loop().time()
    assert await planned(router, (), HELD) == [new]
    assert elapsed_s(began) < LIMITS.ended_s


async def test_a_cut_off_repair_does_not_wait_for_the_directory():
    router, directory, avoidance = router_of(server(0, 3))
    with pytest.raises(NoRoute):
        await planned(router)
    await asyncio.sleep(LIMITS.survey_fresh_s)
    directory.takes_s = HOUR_S
    began = asyncio.get_running_loop().time()
    for process in ("a", "b"):
        avoidance.lost(process, began + 1.0)
    with pytest.raises(NoRoute):
        await planned(router, (), HELD, True)
    assert elapsed_s(began) == 0.0
    await asyncio.sleep(0.01)
    assert directory.surveys == 2, "it is read nevertheless, for the next try"


async def test_a_young_survey_is_fresh():
    router, directory, _ = router_of(server(0, 3))
    for fresh in (False, True, True):
        with pytest.raises(NoRoute):
            await planned(router, (), (), fresh)
    assert directory.surveys == 1
    await asyncio.sleep(LIMITS.survey_fresh_s)
    with pytest.raises(NoRoute):
        await planned(router, (), (), True)
    assert directory.surveys == 2


async def test_plans_at_the_same_time_share_a_look_up():
    one = server(0, 6)
    router, directory, _ = router_of(one)
    directory.takes_s = 2.0
    first = asyncio.create_task(planned(router))
    second = asyncio.create_task(planned(router))
    await asyncio.sleep(1.0)
    first.cancel()  # the other one still waits for the same look-up
    assert await second == [one]
    assert directory.surveys == 1


async def test_another_root_under_the_name_explains_and_never_is_the_failure():
    swarm, directory = membership_of()
    directory.others = [SimpleNamespace(root="11" * 32)]
    with pytest.raises(NoRoute, match="11" * 32):
        await swarm.open(Blocks(0, 6), PLAN)


async def test_a_failed_look_up_reports_no_other_model():
    swarm, directory = membership_of()
    directory.others = None
    with pytest.raises(NoRoute, match="no server has them"):
        await swarm.open(Blocks(0, 6), PLAN)


async def test_servers_of_another_protocol_are_reported():
    swarm, directory = membership_of()
    directory.survey = lambda *_: asyncio.sleep(0, Survey((server(0, 3),), (7,)))
    with pytest.raises(NoRoute, match=r"servers of protocol \(7,\) were left out"):
        await swarm.open(Blocks(0, 6), PLAN)


async def test_an_old_survey_serves_while_the_directory_cannot_be_read():
    one = server(0, 6)
    router, directory, _ = router_of(one)
    directory.silent = True
    with pytest.raises(Unreachable):
        await planned(router)
    directory.silent = False
    assert await planned(router) == [one]
    directory.silent = True
    await asyncio.sleep(HOUR_S)
    assert await planned(router) == [one]
    assert await planned(router, (), HELD, True) == [one]
    with pytest.raises(NoRoute, match="cannot be read"):
        await planned(router, (), ((Blocks(0, 6), "float32+q4_0"),), True)


async def test_a_repair_uses_the_first_answers_of_a_look_up():
    half, rest = server(0, 3), server(3, 6)
    router, directory, _ = router_of(half)
    with pytest.raises(NoRoute):
        await planned(router)
    await asyncio.sleep(LIMITS.survey_fresh_s)
    directory.early, directory.servers, directory.takes_s = [rest], [half], 10.0  # a node that does not answer for long
    began = asyncio.get_running_loop().time()
    assert await planned(router, (), HELD, True) == [half, rest]
    assert elapsed_s(began) == pytest.approx(LIMITS.early_s)
    assert await planned(router, (), HELD) == [half, rest]
    await asyncio.sleep(10.0)
    with pytest.raises(NoRoute):  # the whole look-up counts when it has ended
        await planned(router, (), HELD)
    assert directory.surveys == 2


async def test_a_repair_waits_for_the_whole_look_up_otherwise():
    half, rest = server(0, 3), server(3, 6)
    router, directory, _ = router_of(half)
    directory.early, directory.servers, directory.takes_s = [server(0, 2)], [half, rest], 3.0
    assert await planned(router, (), HELD, True) == [half, rest]
    assert directory.surveys == 1


async def test_a_membership_reads_the_directory_only_while_sessions_are_open():
    swarm, directory = membership_of(server(0, 6))
    async with swarm:
        await asyncio.sleep(HOUR_S)
        assert directory.surveys == 0
        await swarm.open(Blocks(0, 6), PLAN)
        directory.silent = True  # for a while
        await asyncio.sleep(10.5 * LIMITS.survey_age_s)
        assert directory.surveys == 11
    await asyncio.sleep(HOUR_S)
    assert directory.surveys == 11
    await swarm.sessions.close()  # they are the member's, and may run through other models
    assert not swarm.sessions.any_open
    await asyncio.sleep(HOUR_S)
    assert directory.surveys == 11


async def test_round_trips_of_an_opened_session_are_remembered():
    swarm, _ = membership_of(server(0, 6))
    swarm.sessions.latency_ms = 7.0
    (hop,) = (await swarm.open(Blocks(0, 6), PLAN)).route
    assert swarm.router.explained([replace(hop, latency_ms=None)]).home_ms == 3.5


async def test_the_latest_round_trips_are_remembered():
    servers = [server(0, 6), server(0, 6), server(0, 6)]
    router = Router(WANTED, Reads(*servers), router_of()[2], limits=RouterLimits(rtts_max=2))
    (hop,) = await router.plan(Blocks(0, 6))
    for ms in (1.0, 2.0, 3.0):
        router.remember([type(hop)(servers[int(ms) - 1], hop.blocks, latency_ms=ms)])
    trips = [router.explained([type(hop)(signed, hop.blocks)]).home_ms for signed in servers]
    assert trips == [2.5 / 2, 2.0 / 2, 3.0 / 2]  # the first one is taken to be as far as the others


async def test_a_hop_gets_the_newest_record_of_its_own_process():
    planned_with, identity = server(0, 6), Identity.generate()
    hop = Hop(planned_with, Blocks(0, 6), latency_ms=7.0)
    known = planned_with.announcement

    def announced(**changes):
        return replace(planned_with, announcement=known.model_copy(update=changes))

    newer = announced(issued=known.issued + 20.0)
    restarted = announced(issued=known.issued + 40.0, channel_key="ab" * 32)
    another = announced(issued=known.issued + 60.0, public_key=identity.public_key.hex())
    router, *_ = router_of(announced(issued=known.issued - 20.0))
    await router.surveys.read()
    assert router.renewed(hop) is hop
    moving = announced(issued=known.issued + 80.0, blocks=(2, 4))
    unlike = announced(issued=known.issued + 90.0, numeric_class="bfloat16")
    router, *_ = router_of(restarted, newer, another, moving, unlike)
    await router.surveys.read()
    assert router.renewed(hop) == replace(hop, signed=newer)
