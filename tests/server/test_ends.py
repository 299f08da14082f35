"""Sessions, channels and servers that end."""

import asyncio
import contextlib

from swarm.errors import ChannelClosed
from swarm.protocol.messages import Close, Failed, Refused
from tests.server.sites import (
    FIRST,
    SECOND,
    Loaded,
    Peer,
    Site,
    activations,
    open_for,
    opened,
    opened_ring,
    serving,
    step,
    until,
)


async def test_a_closed_session_leaves_nothing(first: Site, second: Site, owner: Peer):
    request = await opened_ring(owner, first, second)
    (await owner.to(first)).send(*step(request, 1, activations(2, 5)))
    await owner.output()
    assert (first.server.pool.used, second.server.pool.used) == (10, 10)
    for site in (first, second):
        (await owner.to(site)).send(Close(session=request.session))
        await owner.settled(site)
        assert site.idle


async def test_sessions_end_with_their_owners_channel(first: Site, second: Site, owner: Peer, stranger: Peer):
    kept = await opened(stranger, first)
    request = await opened_ring(owner, first, second)
    (await owner.to(first)).send(*step(request, 1, activations(2, 5)))
    await owner.output()
    owner.leave()
    await until(lambda: second.idle and list(first.server.handler.sessions) == [kept.session])
    assert first.server.pool.used == 0


async def test_steps_under_way_at_the_sessions_end_leave_nothing(first: Site, owner: Peer):
    for _ in range(5):
        request = await opened(owner, first)
        channel = await owner.to(first)
        for number in range(1, 5):
            channel.send(*step(request, number, activations(1, 4), keep=4 * (number - 1)))
        channel.send(Close(session=request.session))
        await until(lambda: first.idle and first.server.handler.steps_under_way == 0)


async def test_the_next_hops_end_is_told_and_the_past_stays(loaded: Loaded, first: Site, owner: Peer):
    async with serving(loaded, SECOND) as second:
        request = await opened(owner, first, next_record=second.record())
    failed = await owner.next()
    assert isinstance(failed, Failed)
    assert (failed.session, failed.blame) == (request.session, "next")
    assert not first.idle  # a repair can go on from here
    (await owner.to(first)).send(Close(session=request.session))
    await until(lambda: first.idle)


async def test_a_server_that_stops_tells_the_owners_and_leaves_nothing(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST) as site:
        request = await opened(owner, site)
    failed = await owner.next()
    assert isinstance(failed, Failed)
    assert (failed.session, failed.blame) == (request.session, "self")
    assert site.idle


async def test_after_hostile_peers_have_gone_every_account_is_at_zero(loaded, owner):
    """Hoarders, replayers, pushers, malformed frames and readers of nothing at once; an honest owner in the middle."""
    async with serving(loaded, FIRST) as site:
        request = await opened(owner, site)
        carriers = []
        for number, peer in enumerate(Peer() for _ in range(12)):
            with contextlib.suppress(ChannelClosed):
                carriers.append(carrier := await peer.carrier_to(site))
                channel = carrier.channel
                mine = [open_for(site) for _ in range(10)]
                for each in mine:
                    channel.send(each)
                    channel.send(*step(each, 1, activations(1, 16), want=16))
                    channel.send(*step(each, 1, activations(1, 16), want=16))
                    channel.send(*step(request, 1, activations(1, 4)))
                if number % 3 == 0:
                    carrier.write((1 << 20).to_bytes(4, "big") + bytes(1000))
                if number % 3 == 1:
                    carrier.write(bytes(64))
                if number % 3 == 2:
                    carrier.pause_reading()
        (await owner.to(site)).send(*step(request, 1, activations(1, 4)))
        while isinstance(answer := await owner.next(), Refused | Failed):
            assert getattr(answer, "code", "") in {"busy", "no_room"}, answer
            await asyncio.sleep(answer.retry_after_ms / 1000)
            (await owner.to(site)).send(*step(request, 1, activations(1, 4)))
        for carrier in carriers:
            carrier.abort()
        (await owner.to(site)).send(Close(session=request.session))
        await owner.settled(site)
        owner.leave()
        handler, listener = site.server.handler, site.server.listener
        await until(lambda: site.idle and not listener.admission.channels and handler.steps_under_way == 0)
        memory = site.server.memory
        assert not any(pool.held for pool in (memory.cache, memory.inputs, memory.outputs, memory.journals))
        assert not listener.admission.proven
        assert not listener.admission.unproven
        assert listener.flow.buffers.total == 0
        handler.accounts.sweep(asyncio.get_running_loop().time() + 3600)
        assert not handler.accounts.peers
