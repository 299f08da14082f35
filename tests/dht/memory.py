"""Production nodes over a network in memory: everything but p2pd. Every message is encoded and decoded."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr

from swarm.dht.node import NodeConfig, SwarmNode
from swarm.dht.storage import RecordStorage, StorageLimits
from swarm.dht.validator import Clock
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.net.p2p import Daemon, P2PConfig, split_multiaddr
from tests.dht.support import LOOPBACK, NETWORK

HERE = Multiaddr("/ip4/127.0.0.1/tcp/1")
Handler = Callable[[Any, P2PContext], Awaitable[Any]]


@dataclass
class MemoryNetwork:
    """Peers that reach each other by peer id. silent: those that take calls and never answer.

    links: who is connected to whom, where calls need a connection; None: any two are connected. dials: of those.
    """

    peers: dict[PeerID, "MemoryP2P"] = field(default_factory=dict)
    silent: set[PeerID] = field(default_factory=set)
    links: set[frozenset[PeerID]] | None = None
    dials: int = 0
    calls: int = 0
    served: Counter[PeerID] = field(default_factory=Counter)  # calls that each peer took
    moved: Counter[PeerID] = field(default_factory=Counter)  # bytes of each peer's own calls, both ways

    def join(self, identity: Identity) -> "MemoryP2P":
        p2p = MemoryP2P(self, PeerID.from_base58(identity.peer_id))
        self.peers[p2p.peer_id] = p2p
        return p2p

    @asynccontextmanager
    async def node(
        self,
        *peers: str,
        identity: Identity | None = None,
        client: bool = False,
        proven: bool = True,
        clock: Clock = time.time,
        seed: int = 0,
        limits: StorageLimits = StorageLimits(),  # noqa: B008 - frozen
    ) -> AsyncIterator[SwarmNode]:
        p2p = self.join(identity or Identity.generate())
        config = NodeConfig(NETWORK, P2PConfig(None, None if client else LOOPBACK), peers, proven=proven)
        node = SwarmNode(config, clock, random.Random(seed))
        node.storage = RecordStorage(clock, limits)
        async with node.attach(cast(Daemon, MemoryDaemon(p2p))):
            yield node
        del self.peers[p2p.peer_id]


@dataclass
class MemoryP2P:
    """What the DHT's protocol needs of hivemind's P2P."""

    network: MemoryNetwork
    peer_id: PeerID
    handlers: dict[str, tuple[Handler, Any]] = field(default_factory=dict)
    streams: dict[str, Any] = field(default_factory=dict)

    async def add_protobuf_handler(self, name: str, handler: Handler, request_type: Any, **_: Any) -> None:
        self.handlers[name] = handler, request_type

    async def add_binary_stream_handler(self, name: str, handler: Any) -> None:
        self.streams[name] = handler

    def reaches(self, peer: PeerID) -> bool:
        links = self.network.links
        return peer in self.network.peers and (links is None or frozenset({peer, self.peer_id}) in links)

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, answer_type: Any) -> Any:
        self.network.calls += 1
        await asyncio.sleep(0)
        if peer in self.network.silent:
            await asyncio.sleep(3600)
        if not self.reaches(peer) or name not in self.network.peers[peer].handlers:
            raise ConnectionError("no such peer")
        self.network.served[peer] += 1
        handler, request_type = self.network.peers[peer].handlers[name]
        asked = request.SerializeToString()
        answer = await handler(request_type.FromString(asked), P2PContext(name, peer, self.peer_id))
        answered = answer.SerializeToString()
        self.network.moved[self.peer_id] += len(asked) + len(answered)
        return answer_type.FromString(answered)


class Everyone(frozenset[bytes]):
    """Peers to which any other is connected, so that a call alone shows whether it is there."""

    def __contains__(self, peer: object) -> bool:
        return True


class MemoryWriter:
    """The writing half of a stream in memory. It is its own transport."""

    def __init__(self, other: asyncio.StreamReader) -> None:
        self.other, self.transport = other, self

    def write(self, data: bytes) -> None:
        self.other.feed_data(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self.other.feed_eof()

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    def abort(self) -> None:
        self.other.feed_eof()


@dataclass(frozen=True)
class MemoryDaemon:
    """What a node needs of its p2pd."""

    p2p: MemoryP2P
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    port = 1

    @property
    def peer_id(self) -> str:
        return str(self.p2p.peer_id.to_base58())

    async def addresses(self) -> tuple[str, ...]:
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}",)

    async def connected(self) -> frozenset[bytes]:
        there = frozenset(peer.to_bytes() for peer in self.p2p.network.peers if self.p2p.reaches(peer))
        return there if self.p2p.network.links is not None else Everyone(there)

    async def addresses_of(self, peer: bytes) -> tuple[bytes, ...]:
        assert self.p2p.reaches(PeerID(peer)) or peer == self.p2p.peer_id.to_bytes()
        return (HERE.to_bytes(),)

    async def open_stream(self, peer: bytes, name: str, timeout_s: float) -> Any:
        other = PeerID(peer)
        if not self.p2p.reaches(other) or name not in self.p2p.network.peers[other].streams:
            raise Unreachable("a peer", (), timeout_s)
        asked, answered = asyncio.StreamReader(), asyncio.StreamReader()
        serve = self.p2p.network.peers[other].streams[name]
        serving = asyncio.create_task(serve(StreamInfo(self.p2p.peer_id, HERE, name), asked, MemoryWriter(answered)))
        self.serving.add(serving)
        serving.add_done_callback(self.serving.discard)
        return HERE.to_bytes(), answered, MemoryWriter(asked)

    async def connect_at(self, peer: bytes, addresses: Any, timeout_s: float) -> None:
        network = self.p2p.network
        assert network.links is not None
        assert HERE.to_bytes() in addresses
        if PeerID(peer) not in network.peers:
            raise Unreachable("a peer", (), timeout_s)
        network.dials += 1
        network.links.add(frozenset({PeerID(peer), self.p2p.peer_id}))

    async def peers(self) -> dict[str, str]:
        others = [str(peer.to_base58()) for peer in self.p2p.network.peers if peer != self.p2p.peer_id]
        return dict.fromkeys(others, "/ip4/127.0.0.1/tcp/1")

    async def connect(self, address: str, timeout_s: float) -> None:
        peer, _ = split_multiaddr(address)
        if peer not in self.p2p.network.peers:
            raise Unreachable("a peer", (address,), timeout_s)
        if self.p2p.network.links is not None:
            self.p2p.network.links.add(frozenset({peer, self.p2p.peer_id}))
