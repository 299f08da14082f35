"""Shared channels: who opens them, and when they end."""

import asyncio
import gc

import pytest

from swarm.errors import HandshakeFailed, Unreachable
from swarm.identity import Identity
from swarm.net import dialer as dialer_module
from swarm.net.carriers.tcp import Listener, dial
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.noise import ChannelKey


def somebody():
    return Endpoint(Identity.generate(), ChannelKey(), "public")


@pytest.fixture
async def listener():
    listener = Listener(somebody(), "127.0.0.1", 0)
    await listener.start(lambda *_: None)
    yield listener
    await listener.close()


@pytest.fixture
async def dialer():
    dialer = Dialer(somebody(), lambda *_: None)
    yield dialer
    await dialer.close()


def remote(listener):
    return Remote(listener._me.identity.peer_id, listener._me.key.public)


def address(listener):
    return f"{listener.address[0]}:{listener.address[1]}"


async def test_all_who_need_a_peer_share_one_channel(listener, dialer):
    first, second = await asyncio.gather(*(dialer.connect(remote(listener), [address(listener)]) for _ in range(2)))
    assert first is second


async def test_when_anybody_was_heard_is_remembered_when_the_channel_has_ended(listener, dialer):
    assert dialer.heard_at == float("-inf")
    channel = await dialer.connect(remote(listener), [address(listener)])
    before = dialer.heard_at
    await asyncio.sleep(0.01)
    await channel.ping()
    heard_at = dialer.heard_at
    assert heard_at > before
    channel.close()
    await asyncio.sleep(0.01)
    assert dialer.heard_at == heard_at


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [
        (None, False),
        (ConnectionResetError(), False),
        (BrokenPipeError(), False),
        (TimeoutError(), True),
        (OSError(), True),
    ],
)
async def test_an_end_that_the_peer_sent_is_told_from_one_of_the_network(listener, dialer, error, unreachable):
    channel = await dialer.connect(remote(listener), [address(listener)])
    channel._carrier.connection_lost(error)
    assert channel.closed
    assert channel.unreachable == unreachable
    channel._carrier.abort()


async def test_a_channel_that_nobody_uses_ends(listener, dialer, monkeypatch):
    monkeypatch.setattr(dialer_module, "IDLE_S", 0.05)
    channel = await dialer.connect(remote(listener), [address(listener)])
    await asyncio.sleep(0.1)
    assert not channel.closed, "somebody uses it"
    dialer.release(channel)
    async with asyncio.timeout(5):
        await asyncio.shield(channel.ended)


async def test_a_channel_that_is_used_now_and_again_does_not_end(listener, dialer, monkeypatch):
    monkeypatch.setattr(dialer_module, "IDLE_S", 1.0)
    channel = None
    for _ in range(30):
        again = await dialer.connect(remote(listener), [address(listener)])
        assert channel in {None, again}
        channel = again
        dialer.release(channel)
        await asyncio.sleep(0.05)
    assert not channel.closed
    assert len(dialer._idle) == 1
    channel.close()
    await asyncio.sleep(0)
    assert not dialer._idle


async def test_a_channel_that_seems_dead_gives_way_to_a_new_one(listener, dialer):
    dead = await dialer.connect(remote(listener), [address(listener)])
    dead._carrier.write = dead.receive = lambda *_: None
    dialer.doubt(dead)
    new = await dialer.connect(remote(listener), [address(listener)])
    assert new is not dead
    assert await dialer.connect(remote(listener), [address(listener)]) is new
    assert not dead.closed, "somebody uses it"
    dead.close()
    await asyncio.sleep(0)
    assert await dialer.connect(remote(listener), [address(listener)]) is new
    assert not dialer._doubted


@pytest.mark.parametrize("unused", ["before", "after"])
async def test_a_channel_that_has_given_way_ends_when_nobody_uses_it(listener, dialer, unused):
    """The other side takes but a few from us, and one that is doubted again and again must not use them up."""
    dead = await dialer.connect(remote(listener), [address(listener)])
    dead._carrier.write = dead.receive = lambda *_: None
    dialer.doubt(dead)
    if unused == "before":
        dialer.release(dead)
        assert not dead.closed, "it may live yet"
    new = await dialer.connect(remote(listener), [address(listener)])
    if unused == "after":
        dialer.release(dead)
    assert (dead.closed, new.closed) == (True, False)
    dialer.release(new)
    assert not new.closed, "the next one will be given it"


@pytest.mark.parametrize("fails", [True, False], ids=["no new one", "none for long"])
async def test_a_channel_that_only_seemed_dead_is_taken_before_there_is_a_new_one(listener, fails):
    async def dial_once(*arguments):
        if dialled:
            await asyncio.sleep(0 if fails else 60)
            raise Unreachable("somebody", (), 0.0, "full")
        dialled.append(await dial(*arguments))
        return dialled[0]

    dialled = []
    dialer = Dialer(somebody(), lambda *_: None, dial_once)
    channel = await dialer.connect(remote(listener), [address(listener)])
    dialer.doubt(channel)
    async with asyncio.timeout(5):
        assert await dialer.connect(remote(listener), [address(listener)]) is channel
        assert await dialer.connect(remote(listener), [address(listener)]) is channel
    assert not dialer._doubted
    dialer.doubt(channel)
    channel.close()
    with pytest.raises(Unreachable if fails else TimeoutError):
        async with asyncio.timeout(0.05):
            await dialer.connect(remote(listener), [address(listener)])
    await dialer.close()


async def test_a_channel_whose_user_has_gone_before_it_was_open_ends(listener, dialer, monkeypatch):
    monkeypatch.setattr(dialer_module, "IDLE_S", 0.05)
    asking = asyncio.create_task(dialer.connect(remote(listener), [address(listener)]))
    await asyncio.sleep(0)
    asking.cancel()
    async with asyncio.timeout(5):
        while not listener._channels:
            await asyncio.sleep(0.005)
        while listener._channels:
            await asyncio.sleep(0.005)
    assert not dialer._users
    assert not dialer._dials


async def test_a_failure_that_nobody_waits_for_is_not_reported_by_the_loop(dialer):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    asking = asyncio.create_task(dialer.connect(Remote("nobody", ChannelKey().public), ["127.0.0.1:1"]))
    await asyncio.sleep(0)
    asking.cancel()
    async with asyncio.timeout(5):
        while dialer._dials:
            await asyncio.sleep(0.005)
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_no_address_is_unreachable(dialer):
    with pytest.raises(Unreachable, match="no address"):
        await dialer.connect(Remote("nobody", ChannelKey().public), [])


async def test_an_announced_key_that_is_no_point_of_the_curve_fails_the_handshake(listener, dialer):
    with pytest.raises(HandshakeFailed, match="no usable point"):
        await dialer.connect(Remote(listener._me.identity.peer_id, bytes(32)), [address(listener)])


async def test_a_full_table_ends_what_nobody_uses_and_nothing_else(listener, dialer, monkeypatch):
    """Else whoever has others dial many peers, and leaves them, keeps everybody else from theirs for a minute."""
    monkeypatch.setattr(dialer_module, "PEERS_MAX", 2)
    others = [Listener(somebody(), "127.0.0.1", 0) for _ in range(3)]
    for other in others:
        await other.start(lambda *_: None)
    try:
        used, idle = [await dialer.connect(remote(other), [address(other)]) for other in (listener, others[0])]
        dialer.release(idle)
        third = await dialer.connect(remote(others[1]), [address(others[1])])
        assert (used.closed, idle.closed, third.closed) == (False, True, False)
        with pytest.raises(Unreachable, match="already connected to 2 peers"):
            await dialer.connect(remote(others[2]), [address(others[2])])
    finally:
        for other in others:
            await other.close()
