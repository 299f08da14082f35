"""The parsers of the DHT's calls and their answers, and of dial-backs."""

import asyncio
import contextlib
import json
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.dht import dialback, messages, probe, protocol
from swarm.dht.asking import request_of
from swarm.dht.format import CALLS
from swarm.dht.helper import Helper
from swarm.dht.light.store import LightStore
from swarm.dht.neighbours import Neighbours
from swarm.dht.sampling import Found, Look, packed
from swarm.dht.search import SearchLimits
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import pack_value
from swarm.errors import ClockSkew, HandshakeFailed, InvalidMessage, RecordError, TooBusy, Unreachable
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from tests.dht.support import NETWORK
from tests.fuzz.parsers.base import ALICE, BOB, NOW, Opened, Parser, awaited, run
from tests.fuzz.parsers.records import HELD, KEY, RECORD, SUBKEY, gate_of, opened_record, packed_entries

STRANGER = PeerID.from_base58(ALICE.peer_id)
STRANGERS_ID = protocol.node_id_of(STRANGER).to_bytes()
US = PeerID.from_base58(BOB.peer_id)
LOOK = Look(b"salt", parts=5, size=4096, named=8, seen=b"abc")
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
    node.routing_table = Neighbours(node.node_id, CALLS.bucket_size, CALLS.waiting_max)
    node.node_info = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
    node.get_stub = lambda peer: answering
    gate = gate_of()
    storage = RecordStorage(gate.clock)
    storage.put(HELD)
    node.client_mode = False
    node.equip(gate, storage, gate.clock)
    return node


def _asked(method: str, kind: Any) -> Callable[[bytes], object]:
    """Let a stranger call one of our handlers."""

    async def call(data: bytes) -> object:
        node = _protocol(_Answering(dht_pb2.PingResponse, data))
        return await getattr(node, method)(kind.FromString(data), SimpleNamespace(remote_id=STRANGER))

    return lambda data: run(call(data))


async def _find_answered(data: bytes) -> None:
    _within_bounds(await _protocol(_Answering(messages.FindResponse, data)).find(STRANGER, [(KEY, LOOK)]))


def _within_bounds(answers: list[Found] | None) -> None:
    for found in answers or ():
        assert len(found.entries) <= SearchLimits().found_max
        assert len(found.near) <= CALLS.named_max


async def _others_answered(data: bytes) -> None:
    await _protocol(_Answering(dht_pb2.PingResponse, data)).ping(STRANGER)
    await _protocol(_Answering(dht_pb2.StoreResponse, data)).store(STRANGER, [HELD])


class _LightHost:
    """Answers once with a stranger's bytes, and later calls not at all."""

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
    _within_bounds(await store.find(STRANGER.to_bytes(), [(KEY, LOOK)]))


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
        value=packed_entries(),
        expiration_time=NOW + 60,
        nearest_node_ids=[STRANGERS_ID, b"x"],
        nearest_peer_ids=[STRANGER.to_bytes(), b""],
    )
    return dht_pb2.FindResponse(results=[result], peer=_node_info()).SerializeToString()


# Dial-backs


class _Writer:
    """Takes bytes, and drops them."""

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


INFO = SimpleNamespace(peer_id=STRANGER, addr="/ip4/127.0.0.1/tcp/1")


def _helper() -> Helper:
    """A helper that reaches nothing: no port answers in time."""

    async def dial(address: object, *_: object) -> Any:
        raise Unreachable(str(address), (), 0.0)

    node, me = SimpleNamespace(gate=gate_of()), Endpoint(BOB, ChannelKey(), NETWORK)
    return Helper(node, me, dial, limits=dialback.DialBackLimits(port_timeout_s=0.0))


async def _dial_back_asked(data: bytes) -> None:
    await _helper().handle(INFO, _reader(data), _Writer())


async def _dial_back_asked_formerly(data: bytes) -> None:
    await _helper().handle_former(INFO, _reader(data), _Writer())


async def _dial_back_answered(data: bytes) -> None:
    async def open_stream(*_: str) -> tuple[asyncio.StreamReader, _Writer]:
        return _reader(data), _Writer()

    await dialback.ask_helper(
        SimpleNamespace(gate=gate_of(), open_stream=open_stream), ALICE.peer_id, dialback.Request()
    )


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _opened_request(data: bytes) -> Opened:
    """The record within the request."""
    fields, close = opened_record(b64decode(json.loads(data[4:])["record"]))
    return fields, lambda text: _request(close(text))


def _request(record: bytes) -> bytes:
    fields = {"record": b64encode(record).decode(), "data_port": 4000, "p2p_port": 4001, "p2p_host": "192.0.2.7"}
    return _prefixed(json.dumps(fields).encode())


def _opened_ports(data: bytes) -> Opened:
    """The request of a node without a record."""
    return json.loads(data[4:]), _prefixed


def _opened_former(data: bytes) -> Opened:
    fields, close = opened_record(data[4:])
    return fields, lambda text: _prefixed(close(text))


# Whose libp2p port is tried

STATIC = b"s" * 32


def _libp2p_identity(data: bytes) -> None:
    assert probe.peer_in(data, STATIC) in {None, ALICE.peer_id}


def _libp2p_noise(data: bytes) -> None:
    with contextlib.suppress(HandshakeFailed):  # of any message, because each handshake has a key of its own
        probe.FirstHalf("it").read(data)


def _libp2p_payload() -> bytes:
    """As an unsigned domain has it: Identity.sign would hash its own in."""
    signature = Ed25519PrivateKey.from_private_bytes(b"a" * 32).sign(b"noise-libp2p-static-key:" + STATIC)
    return b"\x0a\x24\x08\x01\x12\x20" + ALICE.public_key + b"\x12\x40" + signature


def _all() -> tuple[Parser, ...]:
    ping = dht_pb2.PingRequest(peer=_node_info(), validate=True).SerializeToString()
    pong = dht_pb2.PingResponse(peer=_node_info(), dht_time=NOW, available=True).SerializeToString()
    find = dht_pb2.FindRequest(keys=[KEY], peer=_node_info()).SerializeToString()
    sample = request_of([(KEY, LOOK), (KEY, Look(b"salt", size=1536, whole=True))], STRANGERS_ID).SerializeToString()
    sampled = messages.FindResponse(results=[messages.FindResult(held=7, packed=packed([HELD]))]).SerializeToString()
    stored = dht_pb2.StoreResponse(store_ok=[True], peer=_node_info()).SerializeToString()
    offer = dialback.Offer(public_key="ab" * 32, channel_key="cd" * 32, addresses=("192.0.2.7:4000",))
    found = dialback.Answer(answered=("192.0.2.7:4000",), through=("ab" * 32,), seen="192.0.2.7", anchor=offer)
    answer = _prefixed(found.model_dump_json().encode())
    ports = _prefixed(dialback.Request(p2p_port=4001, p2p_host="192.0.2.7").model_dump_json().encode())
    opened_answer = lambda data: (json.loads(data[4:]), _prefixed)  # noqa: E731
    unheard = (InvalidMessage, RecordError, asyncio.IncompleteReadError)
    return (
        Parser("ping-request", _asked("rpc_ping", dht_pb2.PingRequest), CALL_ERRORS, (ping,)),
        Parser("store-request", _asked("rpc_store", dht_pb2.StoreRequest), CALL_ERRORS, (_store_request(),)),
        Parser("find-request", _asked("rpc_find", messages.FindRequest), CALL_ERRORS, (find, sample)),
        Parser("find-response", awaited(_find_answered), (), (_find_response(), sampled)),
        Parser("ping-or-store-response", awaited(_others_answered), (), (pong, stored)),
        Parser("light-find-response", awaited(_light_find), (Unreachable,), (_find_response(), sampled)),
        Parser("light-ping-response", awaited(_light_ping), (Unreachable, ClockSkew), (pong,)),
        Parser("dial-back-request", awaited(_dial_back_asked), (), (_request(RECORD),), _opened_request),
        Parser("dial-back-ports", awaited(_dial_back_asked), (), (ports,), _opened_ports),
        Parser("dial-back-former", awaited(_dial_back_asked_formerly), (), (_prefixed(RECORD),), _opened_former),
        Parser("libp2p-identity", _libp2p_identity, (), (_libp2p_payload(),)),
        Parser("libp2p-noise", _libp2p_noise, (), (bytes(range(202)),)),
        Parser("dial-back-answer", awaited(_dial_back_answered), unheard, (answer,), opened_answer),
    )


PARSERS = _all()
