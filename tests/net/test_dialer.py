"""Shared channels: when they are opened, and when they end."""

import asyncio
import gc
from dataclasses import dataclass

import pytest

from swarm.errors import HandshakeFailed, Unreachable
from swarm.net.address import parse
from swarm.net.carriers.tcp import dial
from swarm.net.channel import ignore
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from swarm.net.limits import DialerLimits
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from tests.net.support import endpoint, remote, until


@dataclass
class Place:
    """A listener, as a dialer reaches it."""

    remote: Remote
    listener: Listener

    @property
    def addresses(self):
        return [self.listener.address]


async def listening():
    me = endpoint()
    listener = Listener(me, "127.0.0.1", 0)
    await listener.start(ignore)
    return Place(remote(me), listener)


@pytest.fixture
async def place():
    place = await listening()
    yield place
    await place.listener.close()


@pytest.fixture
async def dialer():
    dialer = Dialer(endpoint(), ignore)
    yield dialer
    await dialer.close()


def drops_every_packet(channel):
    """From now on, as a path that has died."""
    channel.send = channel.receive = lambda *_: None


async def test_users_of_a_peer_share_one_channel(place, dialer):
    first, second = await asyncio.gather(*(dialer.connect(place.remote, place.addresses) for _ in range(2)))
    assert first is second
    assert dialer.has(place.remote)


async def test_an_ended_channels_last_bytes_are_remembered(place, dialer):
    assert dialer.heard_at == float("-inf")
    channel = await dialer.connect(place.remote, place.addresses)
    before = dialer.heard_at
    await asyncio.sleep(0.01)
    await channel.ping()
    heard_at = dialer.heard_at
    assert heard_at > before
    channel.close()
    await asyncio.sleep(0.01)
    assert dialer.heard_at == heard_at


async def test_addresses_are_tried_in_their_order(place):
    tried = []

    async def dial_some(address, *arguments):
        tried.append(str(address))
        if address.port == 1:
            raise Unreachable("a peer", (str(address),), 0.0, "refused")
        return await dial(address, *arguments)

    dialer = Dialer(endpoint(), ignore, dial_some, limits=DialerLimits(addresses_max=2))
    bad = [parse("192.0.2.1:1"), parse("192.0.2.2:1")]
    assert not (await dialer.connect(place.remote, [bad[0], *place.addresses])).closed
    assert tried == ["192.0.2.1:1", str(place.listener.address)]
    with pytest.raises(Unreachable, match="refused"):
        await dialer.connect(remote(endpoint()), [*bad, *place.addresses])
    await dialer.close()


async def test_an_unused_channel_ends(place):
    dialer = Dialer(endpoint(), ignore, limits=DialerLimits(idle_s=0.05))
    channel = await dialer.connect(place.remote, place.addresses)
    await asyncio.sleep(0.1)
    assert not channel.closed, "it is used"
    dialer.release(channel)
    async with asyncio.timeout(30):
        await asyncio.shield(channel.ended)
    assert not dialer.has(place.remote)


async def test_a_channel_that_is_reused_in_time_does_not_end(place):
    dialer, channel = Dialer(endpoint(), ignore, limits=DialerLimits(idle_s=1.0)), None
    for _ in range(30):
        again = await dialer.connect(place.remote, place.addresses)
        assert channel in {None, again}
        channel = again
        dialer.release(channel)
        await asyncio.sleep(0.05)
    assert not channel.closed
    await dialer.close()


async def test_a_channel_that_seems_dead_is_replaced(place, dialer):
    dead = await dialer.connect(place.remote, place.addresses)
    drops_every_packet(dead)
    dialer.doubt(dead)
    new = await dialer.connect(place.remote, place.addresses)
    assert new is not dead
    assert await dialer.connect(place.remote, place.addresses) is new
    assert not dead.closed, "it is used"
    dead.close()
    await asyncio.sleep(0)
    assert await dialer.connect(place.remote, place.addresses) is new


@pytest.mark.parametrize("unused", ["before", "after"])
async def test_a_channel_that_has_given_way_ends_once_unused(place, dialer, unused):
    """The other side takes only a few of ours, and one that is doubted again and again must not use them up."""
    dead = await dialer.connect(place.remote, place.addresses)
    drops_every_packet(dead)
    dialer.doubt(dead)
    if unused == "before":
        dialer.release(dead)
        assert not dead.closed, "it may live yet"
    new = await dialer.connect(place.remote, place.addresses)
    if unused == "after":
        dialer.release(dead)
    assert (dead.closed, new.closed) == (True, False)
    dialer.release(new)
    assert not new.closed, "the next user will get it"


@pytest.mark.parametrize("fails", [True, False], ids=["no new one", "none for long"])
async def test_a_doubted_channel_that_answers_first_is_kept(place, fails):
    async def dial_once(*arguments):
        if dialled:
            await asyncio.sleep(0 if fails else 60)
            raise Unreachable("a peer", (), 0.0, "full")
        dialled.append(await dial(*arguments))
        return dialled[0]

    dialled = []
    dialer = Dialer(endpoint(), ignore, dial_once)
    channel = await dialer.connect(place.remote, place.addresses)
    dialer.doubt(channel)
    async with asyncio.timeout(30):
        assert await dialer.connect(place.remote, place.addresses) is channel
        assert await dialer.connect(place.remote, place.addresses) is channel
    dialer.doubt(channel)
    channel.close()
    with pytest.raises(Unreachable if fails else TimeoutError):
        async with asyncio.timeout(0.05):
            await dialer.connect(place.remote, place.addresses)
    await dialer.close()


async def test_a_channel_whose_user_gave_up_early_ends(place):
    dialer = Dialer(endpoint(), ignore, limits=DialerLimits(idle_s=0.05))
    asking = asyncio.create_task(dialer.connect(place.remote, place.addresses))
    await asyncio.sleep(0)
    asking.cancel()
    await until(lambda: place.listener.admission.channels)
    await until(lambda: not place.listener.admission.channels)
    await until(lambda: not dialer.has(place.remote))


async def test_a_failure_without_users_is_not_reported_by_the_loop(dialer):
    reported, absent = [], Remote("a peer", ChannelKey().public)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    asking = asyncio.create_task(dialer.connect(absent, [parse("127.0.0.1:1")]))
    await asyncio.sleep(0)
    asking.cancel()
    await until(lambda: not dialer.has(absent))
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_a_peer_without_addresses_is_unreachable(dialer):
    with pytest.raises(Unreachable, match="no address"):
        await dialer.connect(Remote("a peer", ChannelKey().public), [])


async def test_an_announced_key_that_is_no_point_fails_the_handshake(place, dialer):
    with pytest.raises(HandshakeFailed, match="no usable point"):
        await dialer.connect(Remote(place.remote.peer, bytes(32)), place.addresses)


async def test_a_full_table_ends_an_unused_channel_only():
    """Else a client that has a server dial many peers, and leaves them, keeps others from theirs for a minute."""
    dialer, places = Dialer(endpoint(), ignore, limits=DialerLimits(peers_max=2)), [await listening() for _ in range(4)]
    used, idle = [await dialer.connect(place.remote, place.addresses) for place in places[:2]]
    dialer.release(idle)
    third = await dialer.connect(places[2].remote, places[2].addresses)
    assert (used.closed, idle.closed, third.closed) == (False, True, False)
    with pytest.raises(Unreachable, match="already connected to 2 peers"):
        await dialer.connect(places[3].remote, places[3].addresses)
    await dialer.close()
    for place in places:
        await place.listener.close()


async def test_addresses_that_never_answer_keep_nobody_from_connecting(place):
    """A client may have a server dial whatever a record names."""
    silent = parse("127.0.0.1:1")

    async def dials(address, remote, me, on_message):
        if address == silent:
            await asyncio.get_running_loop().create_future()
        return await dial(address, remote, me, on_message)

    dialer = Dialer(endpoint(), ignore, dials, limits=DialerLimits(peers_max=4, opening_max=3))
    strangers = [Remote(f"stranger {number}", ChannelKey().public) for number in range(4)]
    waiting = [asyncio.create_task(dialer.connect(stranger, [silent])) for stranger in strangers]
    await asyncio.sleep(0)
    assert not (await dialer.connect(place.remote, place.addresses)).closed
    for oldest in waiting[:2]:
        with pytest.raises(Unreachable, match="newer attempts"):
            await oldest
    assert not any(task.done() for task in waiting[2:])
    await dialer.close()
    for task in waiting[2:]:
        with pytest.raises(Unreachable):
            await task
