"""What a router plans with: whom it does without, and how old a reading of the directory may be."""

import asyncio
from types import SimpleNamespace

import pytest
from swarm.client.session.live import SessionPlan

from swarm.blocks import Blocks
from swarm.client.planning.router import NOW_S, Router, Wanted
from swarm.client.session.avoidance import Avoidance
from swarm.dht.directory import Survey
from swarm.errors import NoRoute, RootMismatch, Unreachable
from tests.client.test_route import server

WANTED = Wanted("00" * 32, "model", 6, "float32")
PLAN = SessionPlan("00" * 32, positions_max=8, rollback_max=0, step_timeout_s=1.0, wait_for_blocks_s=0.0)


class Reading:
    """A directory whose answers are given, and counted."""

    def __init__(self, *servers):
        self.servers, self.surveys, self.others, self.silent = servers, 0, (), False
        self.early, self.over = (), asyncio.Event()
        self.over.set()

    async def survey(self, root, n_blocks, heard):
        self.surveys += 1
        heard([SimpleNamespace(data=each.data, signed=each) for each in self.early])
        await self.over.wait()
        if self.silent:
            raise Unreachable("the swarm", (), 1.0)
        return Survey(tuple(self.servers), ())

    def updated(self, survey, root, n_blocks, heard):
        return Survey((*survey.servers, *(entry.signed for entry in heard)), ())

    async def models(self, name):
        if self.others is None:
            raise Unreachable("the swarm", (), 1.0)
        return self.others


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


async def opened(plan, blocks, planner):
    """In place of `Sessions.open`."""
    return SimpleNamespace(route=await planner(blocks, (), None, True))


def router_of(*servers):
    directory, clock = Reading(*servers), Clock()
    sessions = SimpleNamespace(avoidance=Avoidance(clock, clock), any_open=False, open=opened)
    return Router(WANTED, directory, sessions), directory, sessions.avoidance, clock


async def planned(router, *arguments):
    return [hop.signed for hop in await router.plan(Blocks(0, 6), *arguments)]


async def test_of_those_that_failed_the_one_whose_failure_is_longest_ago_is_taken():
    first, second, third = (server(0, 6, tps=rate) for rate in (100.0, 10.0, 1.0))
    router, _, avoidance, clock = router_of(first, second, third)
    (process_of_first,) = [hop.process for hop in await router.plan(Blocks(0, 6))]
    processes = [process_of_first]
    for _ in range(2):
        (hop,) = await router.plan(Blocks(0, 6), processes)
        processes.append(hop.process)
    assert await planned(router) == [first]
    for process in (processes[1], processes[2], processes[0]):  # each of them, a moment apart
        avoidance.failed(process)
        clock.now += 1.0
    assert await planned(router) == [second]
    assert await planned(router, [processes[1]]) == [third]


async def test_a_repair_reads_the_directory_only_when_it_is_told_to():
    old, new = server(0, 6, tps=1.0), server(0, 6, tps=100.0)
    router, directory, _, _ = router_of(old)
    assert await planned(router) == [old]
    directory.servers = [old, new]
    router._looked_up = (router._looked_up[0] - 3600.0, router._looked_up[1])
    assert await planned(router, (), "float32") == [old]
    await asyncio.sleep(0.01)  # meanwhile it is read for the next one
    assert directory.surveys == 2
    assert await planned(router, (), "float32") == [new]


async def test_a_repair_does_not_wait_for_the_directory_while_the_client_is_cut_off():
    router, directory, avoidance, clock = router_of(server(0, 3))
    with pytest.raises(NoRoute):
        await planned(router)
    router._looked_up = (router._looked_up[0] - NOW_S, router._looked_up[1])
    directory.over.clear()
    for process in ("a", "b"):
        avoidance.lost(process, clock.now + 1.0)
    async with asyncio.timeout(5):
        with pytest.raises(NoRoute):
            await planned(router, (), "float32", True)
    directory.over.set()
    await asyncio.sleep(0.01)
    assert directory.surveys == 2, "it is read nevertheless, for the next try"


async def test_what_was_just_read_is_fresh():
    router, directory, _, _ = router_of(server(0, 3))
    for fresh in (False, True, True):
        with pytest.raises(NoRoute):
            await planned(router, (), None, fresh)
    assert directory.surveys == 1
    router._looked_up = (router._looked_up[0] - NOW_S, router._looked_up[1])
    with pytest.raises(NoRoute):
        await planned(router, (), None, True)
    assert directory.surveys == 2


async def test_whoever_serves_another_model_of_this_name_is_named_when_no_session_opens():
    router, directory, _, _ = router_of()
    directory.others = [SimpleNamespace(root="11" * 32)]
    with pytest.raises(RootMismatch):
        await router.open(Blocks(0, 6), PLAN)


async def test_nobody_is_said_to_serve_a_model_where_it_cannot_be_found_out_who_serves_one_of_this_name():
    router, directory, _, _ = router_of()
    directory.others = None
    with pytest.raises(NoRoute, match="nobody serves them"):
        await router.open(Blocks(0, 6), PLAN)


async def test_what_was_read_before_does_while_the_directory_cannot_be_read():
    one = server(0, 6)
    router, directory, _, _ = router_of(one)
    directory.silent = True
    with pytest.raises(Unreachable):
        await planned(router)
    directory.silent = False
    assert await planned(router) == [one]
    directory.silent = True
    router._looked_up = (router._looked_up[0] - 3600.0, router._looked_up[1])
    assert await planned(router) == [one]
    assert await planned(router, (), "float32", True) == [one]
    with pytest.raises(NoRoute, match="cannot be read"):
        await planned(router, (), "bfloat16", True)


async def test_a_repair_takes_what_a_look_up_has_brought_before_its_last_node_answers():
    half, rest = server(0, 3), server(3, 6)
    router, directory, _, _ = router_of(half)
    with pytest.raises(NoRoute):
        await planned(router)
    router._looked_up = (router._looked_up[0] - NOW_S, router._looked_up[1])
    directory.early = [rest]
    directory.over.clear()  # a node that does not answer for long
    async with asyncio.timeout(5):
        assert await planned(router, (), "float32", True) == [half, rest]
    assert not router._looking.done()
    directory.servers = [half, rest]
    directory.over.set()
    assert (await router._looking).servers == (half, rest)


async def test_a_repair_for_which_that_does_not_suffice_waits_for_the_whole_look_up():
    half, rest = server(0, 3), server(3, 6)
    router, directory, _, _ = router_of(half)
    directory.early, directory.servers = [server(0, 2)], [half, rest]
    directory.over.clear()
    asyncio.get_running_loop().call_later(0.3, directory.over.set)
    assert await planned(router, (), "float32", True) == [half, rest]
    assert directory.surveys == 1
