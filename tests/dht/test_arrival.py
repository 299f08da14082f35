"""Which initial peers a node waits for while it joins."""

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any, cast

import pytest

from swarm.dht.arrival import Arrival, ArrivalLimits, Greeting, in_time, patience_s
from swarm.dht.light.store import LightStore
from swarm.dht.messages import PingResponse
from swarm.errors import Unreachable
from swarm.identity import Identity
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK

LIVING, SILENT = "living", "silent"
LIMITS = ArrivalLimits(late_s=0.25)
DEAD = Unreachable("a peer", (), 7.0)


@pytest.mark.parametrize(
    ("greetings", "after_s", "more_s"),
    [
        ([], 0.1, math.inf),
        ([DEAD], 0.1, math.inf),
        ([0.0], 0.1, 0.25),
        ([DEAD, 0.0], 2.0, 2.0),
        ([40.0], 0.1, math.inf),  # our clock is wrong, or that peer's: another one tells
        ([40.0, -1.0], 0.1, 0.25),
    ],
)
def test_others_are_waited_for_until_one_has_answered(greetings: list[Greeting], after_s: float, more_s: float) -> None:
    assert patience_s(greetings, after_s, LIMITS) == more_s


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("answers", "came", "waited_s"),
    [
        ({1.0: 0.0, 1.9: 1.0, 7.0: 2.0}, [0.0, 1.0], 2.0),  # the third is late
        ({1.0: 40.0, 3.0: 41.0, 7.0: 42.0}, [40.0, 41.0, 42.0], 7.0),
        ({7.0: DEAD}, [DEAD], 7.0),
        ({}, [], 0.0),
    ],
)
async def test_a_late_peer_is_left_and_its_call_goes_on(
    answers: dict[float, Greeting], came: list[Greeting], waited_s: float
) -> None:
    calls = [asyncio.create_task(asyncio.sleep(after_s, answer)) for after_s, answer in answers.items()]
    began = asyncio.get_running_loop().time()
    assert await in_time(calls, LIMITS) == came
    assert asyncio.get_running_loop().time() - began == pytest.approx(waited_s)
    assert await asyncio.gather(*calls) == list(answers.values())


@pytest.mark.virtual_clock
async def test_calls_that_are_late_end_with_their_owner() -> None:
    ended = asyncio.Event()

    async def late() -> Greeting:
        try:
            return await asyncio.sleep(3600, 0.0)
        finally:
            ended.set()

    arrival = Arrival(LIMITS)
    assert await arrival.greetings([late(), asyncio.sleep(1.0, 2.0)]) == [2.0]
    assert not ended.is_set()
    await arrival.close()
    assert ended.is_set()


@pytest.mark.virtual_clock
async def test_a_dead_initial_peer_delays_joining_by_a_moment_and_may_come_back() -> None:
    network = MemoryNetwork()
    async with network.node(identity=Identity(b"a" * 32)) as living, network.node(identity=Identity(b"b" * 32)) as dead:
        silent = next(peer for peer in network.peers if peer.to_base58() == dead.peer_id)
        network.silent.add(silent)
        began = asyncio.get_running_loop().time()
        async with network.node(*dead.addresses, *living.addresses, client=True) as client:
            assert asyncio.get_running_loop().time() - began == pytest.approx(LIMITS.late_s)
            assert client.neighbours() == (living.peer_id,)
            network.silent.clear()
            await asyncio.sleep(4)  # the first ping of two has failed by then
            assert set(client.neighbours()) == {living.peer_id, dead.peer_id}


@dataclass(frozen=True)
class LightNetwork:
    """What a light reader needs of its host. A silent peer takes connections and never answers."""

    async def connect(self, multiaddr: str, timeout_s: float) -> bytes:
        return multiaddr.encode()

    async def call(self, peer: bytes, method: str, data: bytes, timeout_s: float, via: bytes | None) -> bytes:
        if peer == SILENT.encode():
            await asyncio.sleep(timeout_s)
            raise Unreachable("a node", (), timeout_s)
        return bytes(PingResponse(dht_time=time.time()).SerializeToString())


@pytest.mark.virtual_clock
async def test_a_silent_initial_peer_delays_a_light_reader_by_a_moment() -> None:
    store = LightStore(cast(Any, LightNetwork()), NETWORK, (SILENT, LIVING), time.time)
    began = asyncio.get_running_loop().time()
    await store.join()
    assert asyncio.get_running_loop().time() - began == pytest.approx(LIMITS.late_s)
    await store.close()


async def test_calls_that_are_ended_are_told_as_an_error_and_not_as_a_cancellation() -> None:
    """A cancellation would end the caller's task, which is a whole server's, in silence."""
    arrival = Arrival(LIMITS)

    async def never() -> Greeting:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    waiting = asyncio.create_task(arrival.greetings([never(), never()]))
    await asyncio.sleep(0)
    await arrival.close()
    with pytest.raises(ConnectionError, match="closed"):
        await waiting
