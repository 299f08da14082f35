"""The first step of a session travels behind the Opens, ahead of their answers."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.activations import Activations
from swarm.client.planning.preferences import Preferences
from swarm.client.session.limits import ChunkLimits
from swarm.client.session.session import First
from swarm.errors import PromptTooLong
from swarm.protocol import messages as wire
from swarm.protocol.tensors import meta_of
from swarm.server.parked import Parked, ParkedLimits
from tests.simulation.going import Going, crowd_out, only_these, played, small_chunks
from tests.simulation.model import HIDDEN_SIZE, embed
from tests.simulation.village import PLAN, Village
from tests.simulation.world import Host

TRIP_S = 0.2
ANY = Preferences()


def even(going: Going, latency_s: float) -> None:
    """Give all ways between the client and this route's hops the same length."""
    network, names = going.village.world.network, ["client", *(host.name for host in going.hosts)]
    for a in names:
        for b in names:
            network.link(a, b).latency_s, network.link(a, b).jitter_s = latency_s, 0.0


def counted(host: Host) -> list[int]:
    """Return the numbers of the steps that a server gets from now on."""
    numbers: list[int] = []

    def takes(_: Any, message: Any, sent: Any) -> bool:
        if isinstance(message, wire.Step):
            numbers.append(message.step)
        return False

    host.process.takes = takes
    return numbers


async def left(going: Going) -> Village:
    """Use the route once and end the session, so that its connections are open; later routes are the same."""
    await going.say()
    only_these(going)
    await going.session.close()
    await asyncio.sleep(1.0)
    return going.village


def test_it_takes_a_round_trip_less() -> None:
    async def scenario(going: Going) -> None:
        even(going, TRIP_S / 2)
        village = await left(going)
        began = going.loop.time()
        plain = Going(village, await village.open(PLAN))
        await plain.say(5)
        plain_s = going.loop.time() - began
        await plain.session.close()
        ahead, ahead_s = await Going.ahead(village, 5)
        assert TRIP_S * 0.9 < plain_s - ahead_s < TRIP_S * 1.1
        await ahead.say()
        assert ahead.session.repairs == 0

    played(scenario)


def test_a_long_prompt_goes_on_behind_its_first_chunk() -> None:
    async def scenario(going: Going) -> None:
        even(going, TRIP_S / 2)
        hosts, village = going.hosts, await left(going)
        numbers = counted(hosts[0])
        ahead, ahead_s = await Going.ahead(village, 50)
        assert numbers == [1, 2, 3, 4, 5, 6, 7]
        assert ahead_s < 2 * TRIP_S * len(hosts)  # as many are in flight as the hops have windows
        assert ahead.session.repairs == 0

    played(scenario, client=small_chunks(8))


def test_no_more_chunks_are_in_flight_than_keep_the_hops_busy() -> None:
    """Behind all chunks of a long prompt the steps of other sessions would wait at a slow first hop."""

    async def scenario(going: Going) -> None:
        even(going, TRIP_S / 2)
        first, *_, last = going.hosts
        numbers, in_flight = counted(first), []

        def sends(_: Any, message: Any, sent: Any) -> list[Any]:
            if isinstance(message, wire.Output):
                in_flight.append(len(numbers) - len(in_flight))
            return [(message, sent)]

        last.process.sends = sends
        await going.say(40)
        assert len(in_flight) == 40
        assert max(in_flight) == len(going.hosts) + ChunkLimits().chunks_ahead

    played(scenario, client=small_chunks(1))


def test_a_prompt_that_is_too_long_does_not_travel_ahead() -> None:
    """The session takes a shorter one afterwards, and its output is that one's."""

    async def scenario(going: Going) -> None:
        hosts, village = going.hosts, await left(going)
        numbers = counted(hosts[0])
        too_long = First(Activations(embed([range(9)])), 1)
        async with asyncio.timeout(10.0):
            shorter = Going(village, await village.open(replace(PLAN, positions_max=8), too_long))
            with pytest.raises(PromptTooLong):
                await shorter.session.step(too_long.activations, want=1)
            await asyncio.sleep(1.0)
            assert not numbers, "the first hop was sent a prompt that its session has no room for"
            await shorter.say(5)
        assert numbers == [1]

    played(scenario)


def test_step_that_is_faster_than_the_open_waits_for_it() -> None:
    async def scenario(going: Going) -> None:
        hosts, village = going.hosts, await left(going)
        even(going, 0.01)
        village.world.network.link("client", hosts[1].name).latency_s = 0.5
        numbers = counted(hosts[1])
        ahead, _ = await Going.ahead(village, 5)
        assert numbers == [1]
        assert ahead.session.repairs == 0
        assert ahead.failures() == []

    played(scenario)


def test_output_waits_for_the_connection_to_the_next_hop() -> None:
    async def scenario(going: Going) -> None:
        hosts, village = going.hosts, await left(going)
        even(going, 0.01)
        village.world.network.link(hosts[0].name, hosts[1].name).latency_s = 0.5
        for channel in list(hosts[0].process.channels):
            if channel.other.process is hosts[1].process:
                channel.hang_up("idle")
        await asyncio.sleep(1.0)
        numbers = [counted(host) for host in hosts]
        ahead, _ = await Going.ahead(village, 5)
        assert numbers == [[1]] * len(hosts)
        assert ahead.session.repairs == 0

    played(scenario)


def test_open_that_is_refused_sends_the_step_elsewhere() -> None:
    """The last hop has no room. Nobody is blamed, and no step of the refused route counts."""

    async def scenario(going: Going) -> None:
        await going.say()
        hosts = going.hosts
        await going.session.close()
        await asyncio.sleep(1.0)
        leases = crowd_out(hosts[-1:], spare=0)
        ahead, _ = await Going.ahead(going.village, 5)
        assert hosts[-1] not in ahead.hosts
        await ahead.say()
        assert ahead.failures() == []
        assert len(leases) == 1
        await asyncio.sleep(ParkedLimits().wait_s)
        assert not any(len(host.handler.registry.parked) for host in hosts)

    played(scenario)


def test_hop_that_dies_with_the_step_is_replaced() -> None:
    async def scenario(going: Going) -> None:
        hosts, village = going.hosts, await left(going)
        village.router.preferences = ANY
        network = village.world.network

        def takes(_: Any, message: Any, sent: Any) -> bool:
            if isinstance(message, wire.Step):
                going.loop.call_soon(network.kill, hosts[1].process)
            return isinstance(message, wire.Step)

        hosts[1].process.takes = takes
        ahead, _ = await Going.ahead(village, 5)
        await ahead.say()
        assert hosts[1] not in ahead.hosts

    played(scenario)


def test_step_without_an_open_waits_for_a_moment_within_bounds() -> None:
    async def scenario(going: Going) -> None:
        refused: list[tuple[str, int]] = []
        token_bytes = 4 * HIDDEN_SIZE
        parked = Parked(ParkedLimits(wait_s=2.0, bytes_max=8 * token_bytes, peer_share=2))

        def park(peer: str, session: int, step: int = 1, tokens: int = 1, place: Parked = parked) -> bool:
            """Return whether a step waits."""
            given, before = Activations(torch.zeros(1, tokens, HIDDEN_SIZE)), len(refused)
            names = {"session": f"{session:032x}", "epoch": 1, "step": step, "keep": 0, "budget_ms": 1, "want": 1}
            channel = SimpleNamespace(
                peer=peer, send=lambda failed, *_, **__: refused.append((failed.session, failed.step))
            )
            place.park(channel, wire.Step(**names, hidden=meta_of(given.hidden)), given)
            return len(refused) == before

        assert not park("a", 1, step=2)  # only the first one travels behind an Open
        assert park("a", 1, tokens=3)
        assert not park("b", 1)  # a session has one
        assert not park("a", 2, tokens=2)  # more than a peer's part
        assert park("b", 2, tokens=4)
        assert not park("c", 3, tokens=2)  # more than all
        assert park("c", 3)
        assert parked.take(f"{2:032x}").channel.peer == "b"
        assert parked.take(f"{2:032x}") is None
        refused.clear()
        await asyncio.sleep(2.1)
        assert sorted(refused) == [(f"{1:032x}", 1), (f"{3:032x}", 1)]
        assert park("a", 1, tokens=4)
        parked.close()
        await asyncio.sleep(2.1)
        assert len(refused) == 2
        few = Parked(ParkedLimits(steps_max=1))
        assert park("a", 1, place=few)
        assert not park("b", 2, place=few)
        few.close()

    played(scenario)
