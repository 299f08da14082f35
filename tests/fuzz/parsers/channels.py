"""The parsers of a channel: its greeting, its handshake and its sealed frames."""

import asyncio
import warnings

from swarm.access import Access
from swarm.errors import HandshakeFailed, InvalidMessage, NetworkError
from swarm.net.channel import Channel, ignore
from swarm.net.endpoint import Endpoint
from swarm.net.frames import FrameReader, Sealer
from swarm.net.greeting import PREFACE, Greeting
from swarm.net.noise import ChannelKey, ChannelSecrets, Handshake, prologue
from swarm.net.transfer import MoveSecrets, Transfer
from tests.dht.support import NETWORK
from tests.fuzz.parsers.base import BOB, HASH, SECRET, Parser, awaited
from tests.fuzz.parsers.messages import frame_of, hello, messages, opened_frame

KEYS = b"1" * 32, b"2" * 32  # a channel's: the stranger's frames, ours


class _Carrier:
    """Takes bytes, and drops them."""

    def write(self, data: bytes | bytearray) -> None:
        del data

    def unsent_bytes(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


RESPONDER = ChannelKey(b"r" * 32)
INITIATOR = ChannelKey(b"i" * 32)


MOVING = MoveSecrets(*KEYS)
SECRETS = ChannelSecrets(send_key=KEYS[1], receive_key=KEYS[0], handshake_hash=HASH)


def _channel(*, private: bool = False) -> Channel:
    access = Access(SECRET if private else None)
    return Channel(_Carrier(), Endpoint(BOB, RESPONDER, NETWORK, access), ignore)


def _greeting() -> tuple[Greeting, FrameReader]:
    """A responder's greeting behind its handshake, with keys that are always the same."""
    frames = FrameReader("a stranger", 1024)
    greeting = Greeting(Endpoint(BOB, RESPONDER, NETWORK), None, frames)
    greeting.shaken(SECRETS)
    return greeting, frames


async def _receive(channel: Channel, *pieces: bytes) -> None:
    for piece in pieces:
        channel.receive(piece)
    while channel.is_paused and not channel.closed:
        await asyncio.sleep(0.0)
    assert channel.closed or channel.held()[0] <= sum(map(len, pieces))
    channel.close()


async def _greet(data: bytes) -> None:
    for private in (False, True):
        half = len(data) // 2
        await _receive(_channel(private=private), data[:half], data[half:])


def _shaken_channel() -> Channel:
    """A responder behind its handshake: one for each input would take most of the time."""
    channel = _channel()
    channel._greeting.shaken(SECRETS)
    return channel


async def _stream(data: bytes) -> None:
    half = len(data) // 2
    await _receive(_shaken_channel(), data)
    await _receive(_shaken_channel(), data[:half], data[half:])


def _first_frame(plaintext: bytes) -> None:
    greeting, frames = _greeting()
    frames.feed(Sealer(KEYS[0]).seal([plaintext]))
    greeting.advance()


async def _later_frame(plaintext: bytes) -> None:
    sealer = Sealer(KEYS[0])
    await _receive(_shaken_channel(), sealer.seal([frame_of(hello())]), sealer.seal([plaintext]))


def _move(data: bytes) -> None:
    """Take the first bytes of a connection to which a channel moves, and bytes of the one that it leaves."""
    half = len(data) // 2
    transfer = Transfer(MOVING, 7, first=False, peer="a stranger")
    taken = transfer.take_new(data[:half]) + transfer.take_new(data[half:]) + transfer.take_old(b"old")
    assert len(taken) <= len(data) + len(b"old")


def _sealed() -> bytes:
    sealer = Sealer(KEYS[0])
    return b"".join(sealer.seal([frame_of(message)]) for message in messages() if message.kind != "pong")


def _handshake(initiator: bool, psk: bytes | None) -> Handshake:
    key, remote, ephemeral = (INITIATOR, RESPONDER.public, b"e") if initiator else (RESPONDER, None, b"f")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an ephemeral key is given
        return Handshake(key, prologue(NETWORK), remote, psk=psk, ephemeral=32 * ephemeral)


def _first_message(psk: bytes | None) -> bytes:
    return _handshake(True, psk).write()


def _second_message(psk: bytes | None) -> bytes:
    responder = _handshake(False, psk)
    responder.read(_first_message(psk))
    return responder.write()


def _read_handshake(data: bytes) -> None:
    for psk in (None, SECRET.derive("handshake")):
        for initiator in (True, False):
            side = _handshake(initiator, psk)
            if initiator:
                side.write()
            try:
                side.read(data)
            except HandshakeFailed:
                continue


def _all() -> tuple[Parser, ...]:
    frames = tuple(frame_of(message) for message in messages())
    psk = SECRET.derive("handshake")
    first, private = _first_message(None), _first_message(psk)
    return (
        Parser("greeting", awaited(_greet), (), (PREFACE + first, PREFACE + private, b"swarm\2")),
        Parser("handshake", _read_handshake, (), (first, private, _second_message(None), _second_message(psk))),
        Parser("sealed-stream", awaited(_stream), (), (_sealed(),)),
        Parser("hello", _first_frame, (NetworkError, InvalidMessage), frames[:2], opened_frame),
        Parser("move", _move, (NetworkError,), tuple(MOVING.mark(at, first=True) + b"new" for at in (10, 12))),
        Parser("sealed-frame", awaited(_later_frame), (), frames, opened_frame),
    )


PARSERS = _all()
