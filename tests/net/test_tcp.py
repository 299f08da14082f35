"""Channels over real sockets."""

import asyncio
import socket

import pytest

from swarm.errors import AddressInUse, HandshakeFailed, Unreachable
from swarm.identity import Identity
from swarm.net.carriers import tcp
from swarm.net.carriers.tcp import Listener, dial
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.noise import ChannelKey
from swarm.protocol.messages import Close


def somebody():
    return Endpoint(Identity.generate(), ChannelKey(), "public")


def remote(me):
    return Remote(me.identity.peer_id, me.key.public)


@pytest.fixture
async def listener():
    messages = []
    listener = Listener(somebody(), "127.0.0.1", 0)
    listener.messages = messages
    await listener.start(lambda channel, message, _: messages.append((channel.peer, message)))
    yield listener
    await listener.close()


def address(listener):
    return f"{listener.address[0]}:{listener.address[1]}"


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_message_crosses_a_socket(listener):
    me = somebody()
    channel = await dial(address(listener), remote(listener._me), me, lambda *_: None)
    channel.send(Close(session="ab" * 16))
    await until(lambda: listener.messages)
    assert listener.messages == [(me.identity.peer_id, Close(session="ab" * 16))]
    channel.close()
    await until(lambda: not listener._channels)


async def test_the_wrong_key_is_a_failed_handshake(listener):
    with pytest.raises(HandshakeFailed):
        await dial(address(listener), remote(somebody()), somebody(), lambda *_: None)
    await until(lambda: not listener._channels)
    assert not listener._shaking


async def test_a_closed_port_is_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable):
        await dial(f"127.0.0.1:{port}", remote(somebody()), somebody(), lambda *_: None)


async def test_a_peer_that_never_answers_is_unreachable(monkeypatch):
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable):
        await dial(f"127.0.0.1:{silent.getsockname()[1]}", remote(somebody()), somebody(), lambda *_: None)


async def test_whoever_says_nothing_is_disconnected(listener, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection(*listener.address)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    assert not listener._shaking


async def test_a_port_in_use_is_named(listener):
    with pytest.raises(AddressInUse, match=str(listener.address[1])):
        Listener(somebody(), *listener.address)


async def test_a_paused_listener_keeps_its_address_and_hears_nobody_until_it_starts_again(listener):
    before = await dial(address(listener), remote(listener._me), somebody(), lambda *_: None)
    listener.pause()
    await until(lambda: before.closed)
    with pytest.raises((HandshakeFailed, Unreachable)):
        await dial(address(listener), remote(listener._me), somebody(), lambda *_: None)
    heard = []
    await listener.start(lambda channel, message, _: heard.append(message))
    after = await dial(address(listener), remote(listener._me), somebody(), lambda *_: None)
    after.send(Close(session="ab" * 16))
    await until(lambda: heard)
    assert listener.messages == []
