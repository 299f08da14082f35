"""Faults other than crashes, on a virtual clock: stalls, busy hops, broken edges, full caches, departures."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from swarm.blocks import Blocks
from swarm.client.session.limits import ConnectLimits, SessionLimits
from swarm.client.session.plan import SessionPlan
from swarm.dht.directory import Directory
from swarm.errors import NoRoute, StepTimeout
from swarm.identity import Identity
from swarm.protocol import messages as wire
from swarm.protocol.inbox import InboxLimits
from swarm.server.limits import HandlerLimits, HostedLimits
from tests.simulation.going import LIMITS, Going, only_these, played, small_chunks
from tests.simulation.network import VirtualChannel
from tests.simulation.village import PLAN
from tests.simulation.world import N_BLOCKS, NETWORK, Host, Store

PROMPT = 64
IDLE_S = 120.0  # by then no channel is left


def channel_between(one: Host, other: Host) -> VirtualChannel:
    """The end at `one` of the connection of two hops."""
    (channel,) = [each for each in one.process.channels if each.other.process is other.process]
    return channel


def channel_to(going: Going, host: Host) -> VirtualChannel:
    """The client's end of its connection to a hop."""
    channels = going.village.client.process.channels
    (channel,) = [each for each in channels if each.other.process is host.process]
    return channel


def test_chunk_put_on_a_broken_route_is_sent_after_repair() -> None:
    """The fault comes between the answer to the only chunk in flight and the next chunk."""

    async def scenario(going: Going) -> None:
        await going.say()
        client, victim = going.village.client.process, going.hosts[1]

        def vanish(_channel: Any, message: Any, _activations: Any) -> bool:
            if isinstance(message, wire.Output):
                client.takes = None
                going.village.world.network.vanish(victim.process)
                channel_to(going, victim).end("the network is down")
            return False

        client.takes = vanish
        assert await going.say(24) < 5
        assert victim not in going.hosts

    one_step = HandlerLimits(session=HostedLimits(inbox=InboxLimits(window_steps=1)))
    played(scenario, limits=one_step, client=small_chunks(8))


# Hops that stall or take long


@pytest.mark.parametrize("index", [0, 1, 2])
def test_stalled_hop_is_replaced_within_seconds(index: int) -> None:
    async def scenario(going: Going) -> None:
        await going.say(3)
        before = [hop.process for hop in going.session.route]
        going.hosts[index].process.stop()
        assert await going.say() < 5
        after = [hop.process for hop in going.session.route]
        assert [i for i in range(3) if after[i] != before[i]] == [index]
        assert going.failures() == [before[index]]

    played(scenario)


def test_busy_hop_is_waited_for() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        executor = going.hosts[1].executor
        executor.hold()
        going.loop.call_later(4.0, executor.release)
        assert 4 < await going.say() < 5
        assert going.session.repairs == 0

    played(scenario)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_step_timeout_names_and_blames_the_hop_that_computes(index: int) -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        slow = going.session.route[index]
        going.hosts[index].executor.hold()
        with pytest.raises(StepTimeout, match="step_timeout_s") as late:
            await going.say()
        assert late.value.peer == slow.peer_id
        assert going.failures() == [slow.process]

    played(scenario, plan=replace(PLAN, step_timeout_s=4.0))


def slowed(going: Going, step_s: float) -> None:
    """Have each hop of the route take so long for a small step."""
    for host in going.hosts:
        host.executor.block_s = step_s / len(host.blocks)


@pytest.mark.parametrize(("step_s", "chunks"), [(1.0, 50), (5.0, 12)])  # then more are in flight than come in time
def test_prompt_whose_chunks_come_in_time_takes_longer_than_a_step_may(step_s: float, chunks: int) -> None:
    step_timeout_s = 20.0

    async def scenario(going: Going) -> None:
        await going.say()
        slowed(going, step_s)
        assert await going.say(chunks) > step_s * chunks > 2 * step_timeout_s
        assert going.failures() == []

    played(scenario, plan=replace(PLAN, step_timeout_s=step_timeout_s), client=small_chunks(1))


def test_chunks_of_a_prompt_ask_for_no_more_time_than_a_message_can_say() -> None:
    async def scenario(going: Going) -> None:
        await going.say(12)

    played(scenario, plan=replace(PLAN, step_timeout_s=24 * 3600.0), client=small_chunks(1))


def test_prompts_chunk_is_answered_within_a_steps_time() -> None:
    step_timeout_s, step_s = 20.0, 1.0

    async def scenario(going: Going) -> None:
        await going.say()
        slowed(going, step_s)
        slow, stuck_s = going.session.route[1], 2 * step_timeout_s
        going.loop.call_later(stuck_s, going.hosts[1].executor.hold)
        began = going.loop.time()
        with pytest.raises(StepTimeout, match="step_timeout_s") as late:
            await going.say(100)
        assert (
            stuck_s < going.loop.time() - began < stuck_s + step_timeout_s + 3 * step_s
        )  # what had passed it was answered
        assert late.value.peer == slow.peer_id
        assert going.failures() == [slow.process], "it held its chunk for longer than any other hop since the last one"

    played(scenario, plan=replace(PLAN, step_timeout_s=step_timeout_s), client=small_chunks(1))


def test_hop_that_computes_nothing_for_long_is_replaced() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        stuck, wedged_s = going.session.route[1], LIMITS.watch.wedged_s
        going.hosts[1].executor.hold()
        assert wedged_s < await going.say() < wedged_s + 5
        assert going.failures() == [stuck.process]

    played(scenario)


def test_next_session_avoids_a_hop_that_stalled() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        stalled = going.session.route[0].process
        going.hosts[0].process.stop()
        await going.say()
        began = going.loop.time()
        other = await going.village.open(PLAN)
        assert going.loop.time() - began < 2
        assert stalled not in {hop.process for hop in other.route}
        await other.close()

    played(scenario)


# Connections


def test_edge_that_swallows_messages_goes_through_the_client() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        route, avoidance = going.session.route, going.village.client.sessions.avoidance
        first, second, _ = going.hosts
        going.village.world.network.cut(first.name, second.name)
        for tokens in (1, 1, 5, 1):
            await going.say(tokens)
        assert [hop.process for hop in going.session.route] == [hop.process for hop in route]
        assert [avoidance.blocked(going.edge(index)) for index in (0, 1)] == [True, False]
        assert going.failures() == []

    played(scenario)


def test_edge_that_breaks_once_is_connected_again() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        first, second, _ = going.hosts
        broken = channel_between(first, second)
        broken.close()
        await going.say()
        assert channel_between(first, second) is not broken
        assert not going.village.client.sessions.avoidance.blocked(going.edge(0))
        assert going.failures() == []

    played(scenario)


@pytest.mark.parametrize("index", [0, 2])
def test_only_holder_is_connected_anew_if_its_connection_died(index: int) -> None:
    async def scenario(going: Going) -> None:
        only_these(going)
        await going.say()
        host, route = going.hosts[index], [hop.process for hop in going.session.route]
        dead = channel_to(going, host)
        for end in (dead, dead.other):
            end.receive = lambda _: None  # type: ignore[method-assign]
        await going.say()
        assert [hop.process for hop in going.session.route] == route
        assert channel_to(going, host) is not dead

    played(scenario)


def test_server_that_connects_slowly_gets_a_second_chance() -> None:
    least_s, _, most_s = LIMITS.connect.connect_s

    async def scenario(going: Going) -> None:
        only_these(going)
        await going.session.close()
        await asyncio.sleep(IDLE_S)
        dial_s = (1.0 + most_s) / 2
        for host in going.hosts:
            going.village.world.network.link("client", host.name).latency_s = dial_s / 4  # a dial takes four
        began = going.loop.time()
        session = await going.village.open(PLAN)
        assert least_s + dial_s < going.loop.time() - began < 3 * dial_s
        assert set(going.village.client.sessions.avoidance.failures.values()) == {1}
        await session.close()

    played(scenario)


def test_hops_that_do_not_connect_are_found_out_together() -> None:
    async def scenario(going: Going) -> None:
        await going.session.close()
        await asyncio.sleep(IDLE_S)
        first, _, last = going.session.route
        for host in (going.hosts[0], going.hosts[2]):
            going.village.world.network.vanish(host.process)
        began = going.loop.time()
        session = await going.village.open(PLAN)
        assert set(going.failures()) == {first.process, last.process}
        assert 2.0 < going.loop.time() - began < 3.0
        await session.close()

    played(scenario, client=SessionLimits(connect=ConnectLimits(connect_s=(2.0, 2.0, 2.5))))


def test_reused_channel_does_not_shorten_the_connect_timeout() -> None:
    async def scenario(going: Going) -> None:
        for _ in range(10):
            other = await going.village.open(PLAN)
            await other.close()
        last = going.session.route[-1]
        going.village.kill(last.peer_id)
        await going.say()
        assert going.failures() == [last.process]

    played(scenario, far_s=0.15)  # it takes four times as long to connect


def test_new_hop_that_stops_after_it_opened_costs_no_timeout() -> None:
    """All has come but its answer to the ping, by which its distance is measured."""

    async def scenario(going: Going) -> None:
        first, listed = going.session.route[0].peer_id, going.village.listed
        starts = [host for host in going.village.world.hosts if host.blocks.start == 0]
        (spare,) = [host for host in starts if host.identity.peer_id in listed - {first}]

        def send_and_stop(_: Any, message: Any, sent: Any) -> Any:
            if not isinstance(message, wire.Pong):
                yield message, sent
            if isinstance(message, wire.Opened):
                spare.process.stop()

        spare.process.sends = send_and_stop
        going.village.kill(first)
        assert await going.say() < LIMITS.connect.ping_s
        assert spare.process.state == "stopped"

    played(scenario)


def test_route_that_is_not_found_in_time_fails_no_hop() -> None:
    async def scenario(going: Going) -> None:
        async def wait_for_ever() -> None:
            await going.loop.create_future()

        going.village.planning = wait_for_ever
        with pytest.raises(NoRoute, match=f"0:{N_BLOCKS}.* in time"):
            await going.village.open(PLAN)
        assert going.failures() == []

    played(scenario)


# Steps in flight


def test_steps_in_flight_fill_the_window_and_no_more() -> None:
    async def scenario(going: Going) -> None:
        client, in_flight, most = going.village.client.process, set(), 0

        def count(_: Any, message: Any, sent: Any) -> Any:
            nonlocal most
            if isinstance(message, wire.Step):
                in_flight.add(message.step)
                most = max(most, len(in_flight))
            return [(message, sent)]

        def take(_: Any, message: Any, sent: Any) -> bool:
            if isinstance(message, wire.Output):
                in_flight.remove(message.step)
            return False

        client.sends, client.takes = count, take
        await going.say(50)
        assert most == InboxLimits().window_steps

    played(scenario, client=replace(small_chunks(1), chunks=replace(small_chunks(1).chunks, chunks_ahead=50)))


def test_steps_that_come_twice_or_out_of_order_change_nothing() -> None:
    async def scenario(going: Going) -> None:
        route, held, seen = going.session.route, [], set()

        def shuffle(_: Any, message: Any, sent: Any) -> Any:
            if isinstance(message, wire.Step) and message.step % 3 == 0 and message.step not in seen:
                seen.add(message.step)
                held.append((message, sent))
                return
            yield message, sent
            yield message, sent
            while held:
                yield held.pop()

        going.village.client.process.sends = shuffle
        await going.say(8)
        await going.say()
        assert seen == {3, 6, 9}
        assert [hop.process for hop in going.session.route] == [hop.process for hop in route]
        assert going.session.repairs == 0

    played(scenario, client=small_chunks(1))


def test_hop_may_die_during_a_long_prefill() -> None:
    async def scenario(going: Going) -> None:
        sent_steps, victim = 0, going.session.route[1]

        def kill_at_12(_: Any, message: Any, sent: Any) -> Any:
            nonlocal sent_steps
            if isinstance(message, wire.Step):
                sent_steps += 1
                if sent_steps == 12:
                    going.village.kill(victim.peer_id)
            return [(message, sent)]

        going.village.client.process.sends = kill_at_12
        await going.say(200)
        await going.say()
        assert sent_steps > 25
        assert going.failures() == [victim.process]

    played(scenario, client=small_chunks(8))


# Departures


def test_leaving_server_is_left_between_two_steps() -> None:
    async def scenario(going: Going) -> None:
        await going.say()
        leaver = going.session.route[1].process
        going.hosts[1].leave()
        await asyncio.sleep(2.0)
        assert leaver not in {hop.process for hop in going.session.route}
        assert await going.say() < 1
        assert going.failures() == []

    played(scenario)


def test_leaving_server_serves_on_if_no_other_holds_its_blocks() -> None:
    async def scenario(going: Going) -> None:
        only_these(going)
        route = going.session.route
        draining = asyncio.create_task(going.hosts[1].handler.drain(10.0))
        for _ in range(3):
            await going.say()
            await asyncio.sleep(1.0)
        assert not draining.done()
        assert [hop.process for hop in going.session.route] == [hop.process for hop in route]
        await draining

    played(scenario)


# Blocks that no server has


def test_session_waits_for_a_server_of_missing_blocks() -> None:
    away_s = 30.0

    async def scenario(going: Going) -> None:
        await going.say()
        only_these(going)
        host = going.hosts[1]
        going.village.kill(host.identity.peer_id, comes_back=False)
        going.loop.call_later(away_s, going.village.start, host.identity, host.blocks)
        assert away_s < await going.say() < away_s + 5

    played(scenario, plan=replace(PLAN, step_timeout_s=2 * away_s, wait_for_blocks_s=1.5 * away_s))


@pytest.mark.parametrize("began", [False, True])
def test_session_waits_although_others_serve_a_model_of_this_name(began: bool) -> None:
    plan: SessionPlan = replace(PLAN, step_timeout_s=200.0, wait_for_blocks_s=200.0)

    async def scenario(going: Going) -> None:
        village = going.village
        world, hosts = village.world, list(village.world.hosts)
        if not began:
            await going.session.close()
        for host in hosts:
            village.kill(host.identity.peer_id, comes_back=False)
        stranger = Identity(b"\x01" * 32)
        store = Store(world, village.client.process, world.gate(world.wall_clock))
        claim = (
            hosts[0]
            .announcement("online")
            .model_copy(update={"public_key": stranger.public_key.hex(), "root": "11" * 32})
        )
        await asyncio.sleep(100.0)  # the records of the dead have expired
        await Directory(store, identity=stranger, network=NETWORK, clock=world.wall_clock).announce(claim)
        for host in hosts:
            going.loop.call_later(30.0, village.start, host.identity, host.blocks)
        if not began:
            going = Going(village, await village.swarm.open(Blocks(0, N_BLOCKS), plan))
        await going.say()
        await going.session.close()

    played(scenario, plan=plan, client=SessionLimits())
