"""The parsers, each with what it may raise and with real inputs to begin from. Hypothesis and atheris share this list.

Nothing here touches the network: addresses are resolved only where they are numbers. Signatures cannot be guessed, so
what lies behind one is fed past it: `open_announcement(verified=True)`, records signed anew, frames sealed by the test.
"""

import asyncio
import atexit
import contextlib
import json
import shutil
import socket
import tempfile
import warnings
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from google.protobuf.message import DecodeError
from hivemind.dht.routing import RoutingTable
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from pydantic import TypeAdapter

from swarm.access import Access, NetworkKey
from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.dht import dialback, protocol
from swarm.dht.format import CALLS, believe, pack_dictionary, unpack_dictionary
from swarm.dht.light.store import LightStore
from swarm.dht.records import (
    canonical_json,
    check_address,
    key_id,
    open_announcement,
    packed_text,
    span_key,
    span_subkey,
)
from swarm.dht.search import SearchLimits
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import RecordGate, pack_value
from swarm.errors import (
    BadBlocks,
    BadConfiguration,
    ClockSkew,
    HandshakeFailed,
    InvalidMessage,
    NetworkError,
    RecordError,
    TooBusy,
    Unreachable,
    UnsupportedArchitecture,
    UnsupportedCheckpoint,
)
from swarm.identity import SIGNATURE_BYTES, Identity
from swarm.model.checkpoint import CONFIG_NAME, _read_config
from swarm.model.manifest import MANIFEST_NAME, Manifest, WeightIndex
from swarm.net.channel import Channel, ignore
from swarm.net.endpoint import Endpoint
from swarm.net.frames import FrameReader, Sealer
from swarm.net.greeting import HELLO_DOMAIN, PREFACE, Greeting
from swarm.net.noise import ChannelKey, ChannelSecrets, Handshake, prologue
from swarm.protocol import codec
from swarm.protocol import messages as wire
from swarm.protocol.tensors import TensorMeta, decode_tensors
from tests.dht.support import NETWORK, ROOT, signed

NOW = 1_800_000_000.0
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
SECRET = NetworkKey(b"k" * 32)
KEYS = b"1" * 32, b"2" * 32  # a channel's: the stranger's frames, ours
HASH = b"h" * 32
SESSION = "0123456789abcdef" * 2
FOLDER = Path(__file__).parents[2]

Opened = tuple[Any, Callable[[bytes], bytes]]


@dataclass(frozen=True, slots=True)
class Parser:
    """One parser. `read` takes what a stranger sent and raises nothing but `raises`.

    opened: where an input holds JSON, its value, and how to put other JSON in its place, signed or sealed as need be.
    """

    name: str
    read: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    opened: Callable[[bytes], Opened] | None = None

    def check(self, data: bytes) -> None:
        """Feed one input; whatever comes out of here is a finding."""
        with contextlib.suppress(*self.raises):
            self.read(data)


class _Loop(asyncio.SelectorEventLoop):
    """Resolves what is a number already, as the system does, and asks nobody."""

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


@cache
def _loop() -> _Loop:
    return _Loop()


def _run(job: Awaitable[Any]) -> Any:
    return _loop().run_until_complete(job)


# --- messages --------------------------------------------------------------------------------------------------------


def activations_of(message: wire.Message) -> Activations | None:
    """Activations as the message describes them, of bytes that count up."""

    def counted(name: str) -> torch.Tensor | None:
        meta = getattr(message, name, None)
        if meta is None:
            return None
        return torch.arange(meta.n_bytes).to(torch.uint8).view(getattr(torch, meta.dtype)).view(meta.shape)

    hidden = counted("hidden")
    return None if hidden is None else Activations(hidden, counted("positions"), counted("mask"))


def frame_of(message: wire.Message) -> bytes:
    return b"".join(codec.encode(message, activations_of(message)))


def _messages() -> tuple[wire.Message, ...]:
    hidden, positions = TensorMeta(dtype="bfloat16", shape=(2, 3, 8)), TensorMeta(dtype="int64", shape=(1, 3))
    mask = TensorMeta(dtype="uint8", shape=(2, 3))
    of = {"session": SESSION, "epoch": 3}
    columns = {"sessions": (SESSION, "0" * 32), "epochs": (3, 4), "steps": (1, 9)}
    hidden_of_two = TensorMeta(dtype="bfloat16", shape=(2, 1, 8))
    past = {"hidden": hidden, "positions": positions, "mask": mask}
    record = b64encode(signed(BOB, now=NOW)).decode()
    return (
        _hello(),
        wire.Ping(nonce=7),
        wire.Pong(nonce=7),
        wire.Open(
            **of, root=ROOT, numeric_class="float32", start=0, stop=4, positions_max=64, rollback_max=4,
            batch=2, positions_soon=60, previous=BOB.peer_id, next_record=record,
        ),
        wire.Opened(**of, window=8),
        wire.Reroute(**of, previous=BOB.peer_id, next_record=record, after_step=4),
        wire.Rerouted(**of, journal=True),
        wire.Replay(**of, step=4, hops=2),
        wire.Rebuild(**of, start=0, total=3, hops=1, **past),
        wire.Rebuilt(**of, stop=3),
        wire.Inquiry(**of),
        wire.Progress(**of, applied=3, length=4, under_way=1, jobs_done=5, quiet_ms=6),
        wire.Leaving(**of),
        wire.Step(**of, step=1, keep=0, rows=(1, 0), budget_ms=100, want=1, **past),
        wire.Output(**of, step=1, hidden=hidden),
        wire.Steps(**columns, keeps=(0, 4), budgets_ms=(100, 90), wants=(1, 0), hidden=hidden_of_two),
        wire.Outputs(**columns, hidden=hidden_of_two),
        wire.Refused(**of, step=4, code="no_room", why="full", retry_after_ms=250),
        wire.Close(session=SESSION),
    )  # fmt: skip


def _hello() -> wire.Hello:
    signature = ALICE.sign(HELLO_DOMAIN[True], HASH).hex()
    return wire.Hello(public_key=ALICE.public_key.hex(), signature=signature, software="0.1.0")


def _read_frame(data: bytes) -> object:
    return codec.decode(memoryview(bytearray(data)))


def _opened_frame(frame: bytes) -> Opened:
    start = 2 + int.from_bytes(frame[:2], "big")
    header, payload = frame[2:start], frame[start:]
    return json.loads(header), lambda text: (len(text) % (1 << 16)).to_bytes(2, "big") + text + payload


_METAS = TypeAdapter(tuple[TensorMeta | None, ...])


def _read_tensors(data: bytes) -> object:
    """Metas as a line of JSON, of what pydantic lets through; then the payload."""
    line, _, payload = data.partition(b"\n")
    try:
        metas = _METAS.validate_json(line)
    except ValueError:
        return None
    return decode_tensors(metas[:4], memoryview(bytearray(payload or b"\0")))


def _tensor_seeds() -> tuple[bytes, ...]:
    seeds = []
    for shape in ((4,), (2, 3, 8), (1 << 26, 1 << 26, 1 << 26)):
        for dtype in ("float32", "int64", "uint8"):
            meta = TensorMeta(dtype=dtype, shape=shape)
            seeds.append(_METAS.dump_json((meta, None, meta)) + b"\n" + bytes(min(2 * meta.n_bytes, 1000)))
    return tuple(seeds)


def _opened_line(data: bytes) -> Opened:
    line, _, payload = data.partition(b"\n")
    return json.loads(line), lambda text: text + b"\n" + payload


# --- channels --------------------------------------------------------------------------------------------------------


class _Carrier:
    """Takes what is written, and drops it."""

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
    await _receive(_shaken_channel(), sealer.seal([frame_of(_hello())]), sealer.seal([plaintext]))


def _sealed() -> bytes:
    sealer = Sealer(KEYS[0])
    return b"".join(sealer.seal([frame_of(message)]) for message in _messages() if message.kind != "pong")


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


# --- records ---------------------------------------------------------------------------------------------------------

RECORD = signed(ALICE, now=NOW, addresses=("192.0.2.7:4000", "[2001:db8::1]:4000"), rtts=(("0123456789abcdef", 1.5),))
KEY = key_id(span_key(NETWORK, ROOT, 0))
SUBKEY = packed_text(span_subkey(ALICE.public_key.hex(), (0, 4)))


def _gate(access: Access | None = None) -> RecordGate:
    return RecordGate(NETWORK, lambda: NOW, access or Access())


HELD = _gate().admit(KEY, SUBKEY, pack_value(RECORD), NOW + 60)


def _read_announcement(data: bytes) -> object:
    record = open_announcement(data, now=NOW, network=NETWORK, verified=True)
    return record.span, record.peer_id, record.unknown_fields, record.model_dump_json()


def _opened_record(record: bytes) -> Opened:
    payload = record[SIGNATURE_BYTES:]
    return json.loads(payload), _signed


def _signed(payload: bytes) -> bytes:
    return ALICE.sign(b"swarm announcement", payload) + payload


def _read_entry(value: bytes) -> object:
    gate = _gate()
    with contextlib.suppress(RecordError):
        gate.facts(value[3:], ours=True)  # past the signature
    return gate.admit(KEY, SUBKEY, value, NOW + 60)


def _opened_entry(value: bytes) -> Opened:
    fields, close = _opened_record(value[3:])
    return fields, lambda text: pack_value(close(text)[: (1 << 16) - 1])


def _read_private_entry(value: bytes) -> object:
    gate = _gate(Access(SECRET))
    key = key_id(span_key(gate.seal.scope, ROOT, 0))
    return gate.admit(key, packed_text(gate.seal.subkey(span_subkey(ALICE.public_key.hex(), (0, 4)))), value, NOW + 60)


def _private_entry() -> bytes:
    return pack_value(_gate(Access(SECRET)).seal.close(RECORD))


def _entries() -> bytes:
    return pack_dictionary([HELD])


def _read_dictionary(data: bytes) -> None:
    assert len(unpack_dictionary(data)) <= SearchLimits().found_max
    _run(believe(_gate(), KEY, data))


async def _read_address(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        check_address(text)
    except ValueError:
        return
    try:
        literal = await dialback.resolved(text)
    except OSError:
        return
    assert literal is not None
    dialback.is_global(literal)


# --- calls of the DHT ------------------------------------------------------------------------------------------------

STRANGER = PeerID.from_base58(ALICE.peer_id)
STRANGERS_ID = protocol.node_id_of(STRANGER).to_bytes()
US = PeerID.from_base58(BOB.peer_id)
CALL_ERRORS = (DecodeError, InvalidMessage, TooBusy)


class _Answering:
    """Another node, which answers every call with the same bytes."""

    def __init__(self, kind: Any, data: bytes) -> None:
        self._kind, self._data = kind, data

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: object, timeout: float) -> Any:
            del request, timeout
            return self._kind.FromString(self._data)

        return call


def _protocol(answering: _Answering | None = None) -> Any:
    """A node without a p2pd."""
    node = object.__new__(protocol.SwarmProtocol)
    node.p2p, node.node_id, node.wait_timeout = SimpleNamespace(peer_id=US), protocol.node_id_of(US), 1.0
    node.rpc_semaphore = asyncio.Semaphore()
    node.routing_table = RoutingTable(node.node_id, CALLS.bucket_size, 5)
    node.node_info = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
    node.get_stub = lambda peer: answering
    gate = _gate()
    storage = RecordStorage(gate.clock)
    storage.put(HELD)
    node.equip(gate, storage, gate.clock)
    return node


def _asked(method: str, kind: Any) -> Callable[[bytes], object]:
    """Let a stranger call one of our handlers."""

    async def call(data: bytes) -> object:
        node = _protocol(_Answering(dht_pb2.PingResponse, data))
        return await getattr(node, method)(kind.FromString(data), SimpleNamespace(remote_id=STRANGER))

    return lambda data: _run(call(data))


async def _find_answered(data: bytes) -> None:
    answers = await _protocol(_Answering(dht_pb2.FindResponse, data)).find(STRANGER, [KEY])
    for entries, near in (answers or {}).values():
        assert len(entries) <= SearchLimits().found_max
        assert len(near) <= CALLS.named_max


async def _others_answered(data: bytes) -> None:
    await _protocol(_Answering(dht_pb2.PingResponse, data)).ping(STRANGER)
    await _protocol(_Answering(dht_pb2.StoreResponse, data)).store(STRANGER, [HELD])


class _LightHost:
    """Answers once with a stranger's bytes; then nobody answers."""

    alive = True

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)

    async def connect(self, *_: object) -> bytes:
        return bytes(STRANGER.to_bytes())

    async def call(self, *_: object) -> bytes:
        if not self._answers:
            raise Unreachable("a node", (), 0.0)
        return self._answers.pop(0)


async def _light_find(data: bytes) -> None:
    store = LightStore(_LightHost(data), NETWORK, ["a peer"], lambda: NOW)
    for entries, near in (await store.find(STRANGER.to_bytes(), [KEY]) or {}).values():
        assert len(entries) <= SearchLimits().found_max
        assert len(near) <= CALLS.named_max


async def _light_ping(data: bytes) -> None:
    await LightStore(_LightHost(data), NETWORK, ["a peer"], lambda: NOW).join()


def _node_info() -> dht_pb2.NodeInfo:
    return dht_pb2.NodeInfo(node_id=STRANGERS_ID)


def _store_request() -> bytes:
    return dht_pb2.StoreRequest(
        keys=[KEY, KEY],
        subkeys=[SUBKEY, SUBKEY],
        values=[pack_value(RECORD), b"\xc5"],
        expiration_time=[NOW + 60, float("nan")],
        in_cache=[False, True],
        peer=_node_info(),
    ).SerializeToString()


def _find_response() -> bytes:
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=_entries(),
        expiration_time=NOW + 60,
        nearest_node_ids=[STRANGERS_ID, b"x"],
        nearest_peer_ids=[STRANGER.to_bytes(), b""],
    )
    return dht_pb2.FindResponse(results=[result], peer=_node_info()).SerializeToString()


# --- dial-back -------------------------------------------------------------------------------------------------------


class _Writer:
    """Takes what is written, and drops it."""

    def write(self, data: bytes) -> None:
        del data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def _reader(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def _dial_back_asked(data: bytes) -> None:
    async def dial(address: str, *_: bytes) -> None:
        raise Unreachable(address, (address,), 0.0)

    helper = dialback.Helper(SimpleNamespace(gate=_gate()), dial)
    info = SimpleNamespace(peer_id=STRANGER, addr="/ip4/127.0.0.1/tcp/1")
    await helper.handle(info, _reader(data), _Writer())


async def _dial_back_answered(data: bytes) -> None:
    async def open_stream(*_: str) -> tuple[asyncio.StreamReader, _Writer]:
        return _reader(data), _Writer()

    await dialback.ask_helper(SimpleNamespace(gate=_gate(), open_stream=open_stream), ALICE.peer_id, RECORD)


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _opened_request(data: bytes) -> Opened:
    fields, close = _opened_record(data[4:])
    return fields, lambda text: _prefixed(close(text))


# --- files -----------------------------------------------------------------------------------------------------------


def _as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def written(data: bytes) -> object:
        path = _folder() / name
        path.touch(0o600)
        path.write_bytes(data)
        return read(path)

    return written


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _read_model_config(path: Path) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers': about what it finds odd in a config
        return _read_config("a model", path)


def _opened_json(data: bytes) -> Opened:
    return json.loads(data), lambda text: text


def _demo(name: str) -> bytes:
    return (FOLDER / "swarm" / "demo" / "checkpoint" / name).read_bytes()


def _manifest() -> bytes:
    return canonical_json({"files": {"config.json": "0" * 64, "model.safetensors": "1" * 64}})


def _index() -> bytes:
    return canonical_json({"metadata": {"total_size": 1}, "weight_map": {"a.weight": "model-1.safetensors"}})


def _async(read: Callable[[bytes], Awaitable[object]]) -> Callable[[bytes], object]:
    return lambda data: _run(read(data))


def _all() -> Sequence[Parser]:
    frames = tuple(frame_of(message) for message in _messages())
    psk = SECRET.derive("handshake")
    first, private = _first_message(None), _first_message(psk)
    ping = dht_pb2.PingRequest(peer=_node_info(), validate=True).SerializeToString()
    pong = dht_pb2.PingResponse(peer=_node_info(), dht_time=NOW, available=True).SerializeToString()
    find = dht_pb2.FindRequest(keys=[KEY], peer=_node_info()).SerializeToString()
    stored = dht_pb2.StoreResponse(store_ok=[True], peer=_node_info()).SerializeToString()
    answer = _prefixed(dialback.Answer(answered=("192.0.2.7:4000",)).model_dump_json().encode())
    opened_answer = lambda data: (json.loads(data[4:]), _prefixed)  # noqa: E731
    peers = f"# members\n{ALICE.peer_id} # Alice\n\n{BOB.peer_id}\n".encode()
    unheard = (InvalidMessage, RecordError, asyncio.IncompleteReadError)
    checkpoint = (UnsupportedCheckpoint, UnsupportedArchitecture)
    return (
        Parser("frame", _read_frame, (InvalidMessage,), frames, _opened_frame),
        Parser("tensors", _read_tensors, (InvalidMessage,), _tensor_seeds(), _opened_line),
        Parser("greeting", _async(_greet), (), (PREFACE + first, PREFACE + private, b"swarm\2")),
        Parser("handshake", _read_handshake, (), (first, private, _second_message(None), _second_message(psk))),
        Parser("sealed-stream", _async(_stream), (), (_sealed(),)),
        Parser("hello", _first_frame, (NetworkError, InvalidMessage), frames[:2], _opened_frame),
        Parser("sealed-frame", _async(_later_frame), (), frames, _opened_frame),
        Parser("announcement", _read_announcement, (RecordError,), (RECORD,), _opened_record),
        Parser("entry", _read_entry, (RecordError,), (pack_value(RECORD),), _opened_entry),
        Parser("private-entry", _read_private_entry, (RecordError,), (_private_entry(),)),
        Parser("dictionary", _read_dictionary, (), (_entries(), b"\xdd\0\0\0\xff" * 9)),
        Parser(
            "address", _async(_read_address), (), (b"192.0.2.7:1", b"[2001:db8::1]:80", b"[fe80::1%e]:80", b"a.b:1")
        ),
        Parser("ping-request", _asked("rpc_ping", dht_pb2.PingRequest), CALL_ERRORS, (ping,)),
        Parser("store-request", _asked("rpc_store", dht_pb2.StoreRequest), CALL_ERRORS, (_store_request(),)),
        Parser("find-request", _asked("rpc_find", dht_pb2.FindRequest), CALL_ERRORS, (find,)),
        Parser("find-response", _async(_find_answered), (), (_find_response(),)),
        Parser("ping-or-store-response", _async(_others_answered), (), (pong, stored)),
        Parser("light-find-response", _async(_light_find), (Unreachable,), (_find_response(),)),
        Parser("light-ping-response", _async(_light_ping), (Unreachable, ClockSkew), (pong,)),
        Parser("dial-back-request", _async(_dial_back_asked), (), (_prefixed(RECORD),), _opened_request),
        Parser("dial-back-answer", _async(_dial_back_answered), unheard, (answer,), opened_answer),
        Parser("network-key", _as_file("key", NetworkKey.load), (BadConfiguration,), (b"0f" * 32 + b"\n",)),
        Parser("allow-peers", _as_file("peers", lambda path: Access.load(None, path)), (BadConfiguration,), (peers,)),
        Parser(
            "blocks", lambda data: Blocks.parse(data.decode(errors="replace"), 12), (BadBlocks,), (b"2:4", b" 0:12")
        ),
        Parser("index", lambda data: WeightIndex.parse("m", data), (UnsupportedCheckpoint,), (_index(),), _opened_json),
        Parser(
            "manifest",
            _as_file(MANIFEST_NAME, lambda path: Manifest.load(path.parent)),
            (UnsupportedCheckpoint,),
            (_manifest(),),
            _opened_json,
        ),
        Parser("config", _as_file(CONFIG_NAME, _read_model_config), checkpoint, (_demo("config.json"),), _opened_json),
    )


PARSERS = {parser.name: parser for parser in _all()}
