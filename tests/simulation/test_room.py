"""Servers that are full, played on a virtual clock: everybody waits, nobody for ever, and nobody who does is blamed."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from swarm.blocks import Blocks
from swarm.client.planning.preferences import Preferences
from swarm.client.session.limits import ChunkLimits
from swarm.client.session.plan import SessionPlan
from swarm.errors import NoRoute, Refused, StepTimeout
from swarm.protocol import messages as wire
from swarm.server.refusals import Declined
from tests.simulation.going import Going, crowd_out, only_these, played, small_chunks
from tests.simulation.village import PLAN
from tests.simulation.world import N_BLOCKS
from tests.support.often import rest_is_long

PROMPT = 64
NEW_TOKENS = 40


def fill(going: Going, tokens: int) -> None:
    """Give every server so small a cache."""
    for host in going.village.world.hosts:
        host.pool.capacity = tokens


async def another(going: Going, plan: SessionPlan = PLAN) -> Going:
    """Open one more session of the same client."""
    return Going(going.village, await going.village.swarm.open(Blocks(0, N_BLOCKS), plan))


async def all_well(tasks: list[Coroutine[Any, Any, float]]) -> float:
    """Carry out all at once. Returns how long the slowest took, in seconds."""
    return max(await asyncio.gather(*tasks))


@pytest.mark.parametrize("foreseen", rest_is_long([True, False], [False]))
def test_sessions_that_need_more_cache_than_exists_all_end_well(*, foreseen: bool) -> None:
    """Those that take their room piece by piece each wait for what others hold, until one gives its own back."""
    plan = replace(PLAN, positions_soon=PROMPT + ChunkLimits().positions_to_come if foreseen else 0)

    async def scenario(going: Going) -> None:
        only_these(going)
        fill(going, 5 * PROMPT)

        async def use() -> float:
            began = going.loop.time()
            mine = await another(going, plan)
            await mine.say(PROMPT)
            for _ in range(NEW_TOKENS):
                await mine.say()
            await mine.session.close()
            return going.loop.time() - began

        await all_well([use() for _ in range(8)])
        assert going.failures() == []
        await asyncio.sleep(1.0)
        assert all(host.pool.used == 0 for host in going.village.world.hosts)

    played(scenario, client=small_chunks(8))


def test_session_waiting_for_room_holds_none_and_names_full_hop() -> None:
    async def scenario(going: Going) -> None:
        await going.say(PROMPT)
        taken = {host.name: host.pool.used for host in going.village.world.hosts}
        for host in going.hosts[:-1]:
            host.pool.capacity = 10_000
        full = [host for host in going.village.world.hosts if host.blocks.stop == N_BLOCKS]
        for host in full:
            host.pool.capacity = PROMPT + 30
            lease = host.pool.lease("somebody else")
            lease.resize(lease.room)
        began = going.loop.time()
        opening = asyncio.create_task(another(going, replace(PLAN, positions_soon=PROMPT, step_timeout_s=20.0)))
        open_there = []
        for _ in range(100):
            await asyncio.sleep(0.1)
            others = [host for host in going.village.world.hosts if host not in full]
            open_there.append(sum(len(host.handler.sessions) for host in others))
        assert not opening.done()
        assert sorted(open_there)[50] == len(going.hosts) - 1  # that of `going` alone, while the other one waits
        with pytest.raises(Refused, match="likely not to fit"):
            await opening
        assert 19.0 < going.loop.time() - began < 20.5
        await asyncio.sleep(1.0)
        held = {host.name: host.pool.used for host in going.village.world.hosts if host not in full}
        assert held == {name: taken[name] for name in held}

    played(scenario)


@pytest.mark.long
def test_openings_beyond_the_rate_queue_and_none_fails() -> None:
    async def scenario(going: Going) -> None:
        waits: list[float] = []
        until = going.loop.time() + 40.0

        async def use() -> float:
            while going.loop.time() < until:
                began = going.loop.time()
                mine = await another(going)
                waits.append(going.loop.time() - began)
                await mine.say(4)
                await mine.session.close()
            return 0.0

        await all_well([use() for _ in range(24)])
        assert len(waits) > 40 * 6  # and a burst of 64: servers let a peer open 8 a second
        assert max(waits) < 12.0  # 24 in line take 3 s, and as long again where two hops do not agree
        reached = [channel.other.process for channel in going.village.client.process.channels]
        assert len(reached) == len(set(reached))  # a hop that refuses is not connected anew
        assert going.failures() == []

    played(scenario)


@pytest.mark.parametrize("code", ["no_room", "busy"])
def test_while_a_step_waits_for_room_only_it_is_retransmitted(code: Any) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        only_these(going)
        host, until, came = going.hosts[1], going.loop.time() + 4.5, []

        def refuse(_: Any, step: Any, sent: Any) -> bool:
            if not isinstance(step, wire.Step):
                return False
            came.append(step.step)
            if going.loop.time() >= until or step.step != 4:
                return False
            session = host.handler.sessions[step.session]
            session.owner.send(Declined(code, "full", 1.0).answer(step))
            return True

        host.process.takes = refuse
        await going.say(8 * 12)
        assert going.failures() == []
        waited = came[came.index(4) : len(came) - came[::-1].index(4)]  # until it came for the last time
        assert waited.count(4) >= 4
        behind = [step for step in waited if step != 4]
        assert len(set(behind)) == len(behind)  # what was under way behind it came once

    played(scenario, client=small_chunks(8))


@pytest.mark.long
def test_session_finds_the_only_server_that_can_hold_it() -> None:
    async def scenario(going: Going) -> None:
        going.village.router.preferences = Preferences()
        last = going.hosts[-1]
        holders = [host for host in going.village.world.hosts if host.blocks == last.blocks]
        assert len(holders) > 3
        roomy = next(host for host in holders if host is not last)
        for host in holders:
            host.pool.capacity = PROMPT // 2 if host is not roomy else 2 * PROMPT
        await going.say(PROMPT)
        assert going.hosts[-1] is roomy
        roomy.pool.capacity = PROMPT
        with pytest.raises((Refused, NoRoute), match="do not fit"):
            await going.say()

    played(scenario)


def test_hop_too_busy_for_a_reroute_keeps_its_past() -> None:
    """A server lets a peer reroute no more often than it lets it open: when many sessions lose a hop, that is soon."""

    async def scenario(going: Going) -> None:
        await going.say(PROMPT)
        first, _, last = going.hosts
        (session,) = first.handler.sessions.values()
        tenure, until = session.tenure, going.loop.time() + 3.0

        def refuse(channel: Any, message: Any, sent: Any) -> bool:
            is_refused = isinstance(message, wire.Reroute) and going.loop.time() < until
            if is_refused:
                channel.send(Declined("busy", "more than 8 openings a second", 0.1).answer(message))
            return is_refused

        first.process.takes = refuse
        going.village.kill(last.identity.peer_id)
        assert 2.5 < await going.say() < 6.0
        assert list(first.handler.sessions.values()) == [session]
        assert session.tenure is tenure
        assert len(going.failures()) == 1  # the one that was killed

    played(scenario)


def test_session_without_hops_names_the_blocks_it_waits_for() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        for host in going.village.world.hosts:
            host.pool.capacity = PROMPT + 30
            lease = host.pool.lease("somebody else")
            lease.resize(lease.room)

        async def wait_for_ever() -> None:
            if not going.session.route:
                await going.loop.create_future()

        going.village.planning = wait_for_ever
        with pytest.raises(StepTimeout) as late:
            await going.say(PROMPT)
        assert (late.value.peer, late.value.span) == ("any server", f"0:{N_BLOCKS}")

    played(scenario)


@pytest.mark.parametrize("ever", [False, True])
def test_session_moves_to_where_there_is_room(ever: bool) -> None:
    """A session that never fits moves at once; one that may fit asks once more before."""

    async def scenario(going: Going) -> None:
        await going.say()
        host, full = going.hosts[1], going.session.route[1].process
        if ever:
            crowd_out([host], 2 * PROMPT)
        else:
            host.pool.capacity = host.pool.used
        assert await going.say(PROMPT) < 5
        assert full not in {hop.process for hop in going.session.route}
        assert going.failures() == []

    played(scenario)


@pytest.mark.parametrize("index", [0, 2])
def test_hop_may_die_while_a_step_waits_for_room(index: int) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        victim = going.session.route[index]
        leases = crowd_out([host for host in going.village.world.hosts if host.blocks.stop == N_BLOCKS], 2 * PROMPT)

        def turn() -> None:
            going.village.kill(victim.peer_id)
            for lease in leases:
                lease.resize(0)

        going.loop.call_later(0.5, turn)  # a step that finds no room comes again after a second
        assert 0.5 < await going.say(PROMPT) < 10
        assert going.failures() == [victim.process]

    played(scenario)
