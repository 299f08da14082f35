"""Long pasts, played on a virtual clock: they are rebuilt whatever their length, and nobody is blamed for waiting."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest

from swarm.blocks import Blocks
from swarm.client.planning.route import process_of
from swarm.client.session.limits import ChunkLimits, ConnectLimits, SessionLimits
from swarm.protocol.messages import Rebuild, Rebuilt, Refused, Step
from swarm.protocol.replay import ReplayLimits
from swarm.server.limits import AccountLimits, HandlerLimits, HostedLimits, MemoryLimits
from tests.simulation.going import Going, silent
from tests.simulation.going import played as played_with
from tests.simulation.model import HIDDEN_SIZE
from tests.simulation.village import PLAN
from tests.simulation.world import N_BLOCKS, Host
from tests.support.often import rest_is_long

CHUNK_TOKENS = 8
MIB = CHUNK_TOKENS * HIDDEN_SIZE * 4  # what stands for a MiB here
LONG = 100 * CHUNK_TOKENS
WINDOW, INPUTS = 8, 16  # of these


REPLAY = ReplayLimits(window_bytes=WINDOW * MIB, chunk_bytes=MIB)
CLIENT = SessionLimits(chunks=ChunkLimits(chunk_bytes=MIB), replay=REPLAY)
SESSION = HostedLimits(replay_unread_bytes_max=WINDOW * MIB, replay=REPLAY)
MEMORY = MemoryLimits(input_bytes_max=INPUTS * MIB, window_bytes_max=INPUTS * MIB)
played = partial(played_with, limits=HandlerLimits(session=SESSION), memory_limits=MEMORY, client=CLIENT)


def lose(going: Going, *places: int) -> list[str]:
    """Hops die, and others take over. Returns the processes that are gone."""
    gone = [going.session.route[place] for place in places]
    for hop in gone:
        going.village.kill(hop.peer_id)
    return [hop.process for hop in gone]


def spares(going: Going) -> list[Host]:
    """The listed servers that are not in the route."""
    used = {hop.peer_id for hop in going.session.route}
    return [host for host in going.village.world.hosts if host.identity.peer_id in going.village.listed - used]


DEATHS = {"behind a journal": (1,), "the first": (0,), "neighbours": (1, 2), "neighbours, and the first": (0, 1)}


@pytest.mark.parametrize("relayed", rest_is_long([False, True], [True]))
@pytest.mark.parametrize("places", DEATHS.values(), ids=DEATHS)
def test_a_past_that_no_pool_holds_is_rebuilt(places: tuple[int, ...], relayed: bool) -> None:
    async def scenario(going: Going) -> None:
        await going.say(LONG)
        servers = [process_of(host.announcement("online")) for host in going.village.world.hosts]
        for edge in permutations(servers, 2) if relayed else ():
            going.village.client.sessions.avoidance.block(edge)
        gone = lose(going, *places)
        assert await going.say() < 30
        assert set(going.failures()) <= set(gone)
        assert going.session.repairs == 1
        assert await going.say() < 2
        assert not any(host.memory.windows.used for host in going.village.world.hosts)

    played(scenario)


def test_hops_before_a_slow_one_hold_one_window_unblamed() -> None:
    async def scenario(going: Going) -> None:
        await going.say(16 * CHUNK_TOKENS)
        for host in spares(going):
            if host.blocks.stop == N_BLOCKS:
                host.executor.block_s = 0.5  # a piece takes longer than it takes to find who is stuck
        last = len(going.session.route) - 1
        gone = lose(going, last - 1, last)
        saying = asyncio.create_task(going.say())
        held = 0
        while not saying.done():
            await asyncio.sleep(0.2)
            for host in going.village.world.hosts:
                held = max([held, *(session.history.window.n_bytes for session in host.handler.sessions.values())])
        assert await saying > 16 * 3.0
        assert set(going.failures()) == set(gone)
        assert going.session.repairs == 1
        assert held == WINDOW * MIB

    rebuild_s = 30.0  # for a window, of which there are three
    played(scenario, client=replace(CLIENT, connect=ConnectLimits(rebuild_s=rebuild_s)))


def test_hop_that_confirms_no_past_is_left() -> None:
    async def scenario(going: Going) -> None:
        await going.say(LONG)
        (liar,) = [host for host in spares(going) if host.blocks == going.hosts[1].blocks]
        liar.process.sends = silent(Rebuilt)
        gone = [*lose(going, 1), process_of(liar.announcement("online"))]
        assert await going.say() < 15
        assert set(going.failures()) == set(gone)

    played(scenario)


def test_past_that_comes_too_fast_is_held_back() -> None:
    async def scenario(going: Going) -> None:
        await going.say(LONG)
        refused: list[Any] = []

        def watch(_: Any, message: Any, sent: Any) -> Any:
            if isinstance(message, Refused):
                refused.append(message)
            return [(message, sent)]

        for host in spares(going):
            host.handler.accounts.limits = AccountLimits(bytes_burst=4 * MIB, bytes_per_s=20 * MIB)
            host.executor.block_s = 1e-4
            host.process.sends = watch
        gone = lose(going, 1)
        assert 4.5 < await going.say() < 8
        assert set(going.failures()) == set(gone)
        assert refused == []

    played(scenario)


@pytest.mark.long
def test_many_long_pasts_to_one_hop_are_rebuilt_by_turns() -> None:
    """Together they would have each other's pieces refused, and begin again and again."""

    async def scenario(going: Going) -> None:
        village, every, blocks = going.village, [going], set(going.session.route[1].blocks)
        while len(every) < 16:
            every.append(Going(village, await village.swarm.open(Blocks(0, N_BLOCKS), PLAN)))
        for each in every:
            await each.say(30 * CHUNK_TOKENS)
        for host in spares(going):
            if not blocks.isdisjoint(host.blocks):
                village.kill(host.identity.peer_id, comes_back=False)
        lose(going, 1)
        assert max(await asyncio.gather(*(each.say() for each in every))) < 35
        (hop,) = {each.session.route[1].peer_id for each in every}
        assert village.host(hop).handler.jobs_done < 16 * 35  # of which 31 are needed
        for each in every[1:]:
            await each.session.close()

    played(scenario)


def test_past_of_which_half_came_is_replayed_anew() -> None:
    """The source of the past dies while a replacement further on is rebuilding from it."""

    async def scenario(going: Going) -> None:
        await going.say(100)
        _, source, last = going.session.route
        pieces = 0

        def send_three(_: Any, message: Any, sent: Any) -> Any:
            nonlocal pieces
            pieces += isinstance(message, Rebuild)
            if pieces == 3:
                going.loop.call_soon(going.village.kill, source.peer_id)
            return [(message, sent)] if pieces <= 3 else []

        going.hosts[1].process.sends = send_three
        going.village.kill(last.peer_id)
        assert await going.say() < 3
        assert pieces >= 3
        assert set(going.failures()) == {source.process, last.process}
        await going.say(3)

    played(scenario)


@pytest.mark.parametrize("journal", [True, False])
def test_hop_without_kept_outputs_takes_its_journal_or_computes_again(journal: bool) -> None:
    async def scenario(going: Going) -> None:
        for host in going.village.world.hosts if not journal else ():
            host.memory.journals.capacity = 0
        await going.say(9)
        before, last = going.hosts[1], going.hosts[2]
        (session,) = before.handler.sessions.values()
        tenure = session.tenure

        def swallow(_: Any, message: Any, sent: Any) -> bool:
            if isinstance(message, Step):
                going.loop.call_soon(going.village.kill, last.identity.peer_id)
            return isinstance(message, Step)

        last.process.takes = swallow
        assert await going.say() < 2
        assert list(before.handler.sessions.values()) == [session]
        assert (session.tenure is tenure) == journal

    played_with(scenario, memory_limits=MemoryLimits(output_bytes_max=0))
