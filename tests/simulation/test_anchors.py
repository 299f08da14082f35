"""Servers behind routers, and the anchors that lead to them: these die and return, and not one token differs."""

import asyncio

import pytest

from swarm.net.channel import ignore
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from tests.simulation.__main__ import replay
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Trace
from tests.simulation.run import Outcome, anchored_weather_of, simulate
from tests.simulation.village import HORIZON_S, finished
from tests.simulation.world import N_BLOCKS, ROOT, Client, Weather, World
from tests.support.often import rest_is_long

SEEDS, PART, OFTEN = 99, 1, (0,)  # seeds of the sweep, of one test, and the tests of `make test`
SEED = 2  # in which the router of the client keeps ports
SLOW, FAST = 6.0, 60.0  # departures a minute


def anchored(seed: int, rate: float) -> Outcome:
    return simulate(seed, rate, anchored_weather_of(seed, rate))


@pytest.mark.slow("three whole swarms")
@pytest.mark.parametrize("first", rest_is_long(range(0, SEEDS, PART), OFTEN))
def test_no_token_differs_and_nothing_hangs_though_anchors_die(first: int) -> None:
    outcomes = [anchored(seed, SLOW if seed % 4 else FAST) for seed in range(first, first + PART)]
    bad = [outcome for outcome in outcomes if not outcome.good]
    assert not bad, "\n".join(f"{o.error or o.faults or o.wrong}: {replay(o)}" for o in bad)


@pytest.mark.long
def test_a_seed_with_anchors_replays_byte_for_byte() -> None:
    """And the sweep has what it is for: channels are relayed, and anchors die."""
    first, again = anchored(7, SLOW), anchored(7, SLOW)
    assert first.digest == again.digest
    assert first.relayed
    assert first.anchor_deaths


def test_a_dead_anchor_ends_its_relayed_channels_and_no_other() -> None:
    """And within ten seconds no record names it, and each hidden server is moored elsewhere."""
    loop = VirtualLoop(HORIZON_S)

    async def play() -> None:
        world = World(loop, SEED, Weather(servers=40, anchors=3, hidden=0.6, cones=0.5), Trace(loop))
        world.populate()
        client = Client(world, SEED)
        dialer = Dialer(client.process.me, ignore, world.dial_from(client.process))
        await asyncio.sleep(30.0)
        channels = {}
        for signed in await client.directory.servers(ROOT, N_BLOCKS):
            record = signed.announcement
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            channel = await dialer.connect(remote, record.ways)
            channels[channel] = channel.carrier
        assert {carrier.way for carrier in channels.values()} == {"direct", "punched", "relayed"}
        relay = next(carrier.host for carrier in channels.values() if carrier.way == "relayed")
        through = {channel for channel, its in channels.items() if (its.way, its.host) == ("relayed", relay)}
        assert world.harbour is not None
        world.network.kill(world.harbour.anchors[f"{relay}:1"].process)
        await asyncio.sleep(10.0)
        assert {channel for channel in channels if channel.closed} == through
        records = [signed.announcement for signed in await client.directory.servers(ROOT, N_BLOCKS)]
        assert len(records) == len(channels)
        assert {len(record.anchors) for record in records if not record.addresses} == {2}
        await dialer.close()

    finished(loop, play())
