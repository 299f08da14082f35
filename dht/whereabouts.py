"""Where peers are: libp2p's Kademlia as far as the swarm needs it, answered by this node instead of by p2pd.

The DHT names nodes by peer id, and p2pd dials addresses. They come from the nodes that named the peer: these are asked
for them with libp2p's own message (FIND_NODE), before the peer is called.

p2pd could answer it, too. But then it also takes provider records from any stranger and keeps them for two days, and it
has no option against that. So p2pd runs as a client of its Kademlia, and the one question that the swarm needs is
answered here. There is nothing to be stored:

    FIND_NODE   the peer itself, if this node knows where it is; and the nodes nearest to the key that it knows
    PING        the same
    all else    the stream ends

A stream brings one question: p2pd's client opens another one for its next. Message format:
https://github.com/libp2p/specs/tree/master/kad-dht.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm.dht.messages import FIND_NODE, PING, KadMessage, KadPeer, varint
from swarm.dht.rates import RateLimit
from swarm.errors import InvalidMessage, SwarmError
from swarm.limits import limit
from swarm.net.p2p import Daemon, first_host, literal_addresses
from swarm.net.reach import makes_sense

PROTOCOL = "/ipfs/kad/1.0.0"

_log = structlog.get_logger("swarm.dht")


@dataclass(frozen=True, slots=True)
class WhereaboutsLimits:
    """How much a node tells about where others are, and how long it waits for others to tell."""

    request_bytes_max: int = limit(256, "bytes", "of a question; a longer one ends the stream")
    answer_bytes_max: int = limit(64 << 10, "bytes", "of an answer; a longer one is rejected")
    named_max: int = limit(8, "peers", "in one answer")
    addresses_max: int = limit(8, "addresses", "of one peer; the rest is left out, or ignored")
    address_bytes_max: int = limit(128, "bytes", "of one address; a longer one is left out")
    streams_max: int = limit(256, "streams", "opened by others at one time; then the oldest one ends")
    streams_per_peer: int = limit(48, "streams", "the same, of one peer; more are closed")
    question_s: float = limit(2.0, "s", "for a question to come, and again for its answer to be taken")
    per_s: float = limit(20.0, "1/s", "questions of one peer; more end their streams")
    burst: float = limit(200.0, "questions", "of one peer at once")
    connected_s: float = limit(1.0, "s", "p2pd is asked whom it is connected to, at most so often, before calls")
    shown_s: float = limit(10.0, "s", "the same, before answers to others, unless a node is new")
    fresh_s: float = limit(60.0, "s", "a connected peer's addresses are told before p2pd is asked for them again")
    known_s: float = limit(900.0, "s", "a peer's addresses are told after its connection has ended")
    known_max: int = limit(1024, "peers", "whose addresses are remembered; the oldest go first")
    namers_max: int = limit(4, "nodes", "that named a peer are remembered, and asked; the latest ones")
    named_peers_max: int = limit(16384, "peers", "of which is remembered who named them; the oldest go first")
    searches_max: int = limit(32, "peers", "looked for at one time; more wait")


class Whereabouts:
    """Tells other peers where nodes are, and finds out where peers are that this node is about to call."""

    def __init__(
        self,
        daemon: Daemon,
        nodes: Callable[[], Iterable[bytes]],
        limits: WhereaboutsLimits = WhereaboutsLimits(),
    ) -> None:
        """nodes: the peer ids of the DHT nodes that this one knows."""
        self._daemon, self._nodes, self._limits = daemon, nodes, limits
        self._namers: OrderedDict[bytes, list[bytes]] = OrderedDict()  # by peer
        # By peer: when p2pd said so, and the addresses.
        self._addresses: OrderedDict[bytes, tuple[float, tuple[bytes, ...]]] = OrderedDict()
        self._looking: dict[bytes, asyncio.Task[bool]] = {}  # by peer
        self._turns = asyncio.Semaphore(limits.searches_max)
        self._connected = _Shared(daemon.connected)
        self._rates = RateLimit(limits.per_s, limits.burst)
        self._streams: dict[asyncio.Task[None], bytes] = {}  # of others, the oldest first; with the peer

    async def close(self) -> None:
        """End all streams and searches."""
        tasks = [*self._streams, *self._looking.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def met(self) -> None:
        """Have p2pd list its peers again: a new node has called or answered."""
        self._connected.forget()

    # --- before this node calls a peer -------------------------------------------------------------------------------

    def heard(self, namer: bytes, peers: Iterable[bytes]) -> None:
        """Remember the node that named these peers, and so knows where they are."""
        for peer in peers:
            namers = self._namers.setdefault(peer, [])
            if namer not in namers:
                namers.append(namer)
                del namers[: -self._limits.namers_max]
            self._namers.move_to_end(peer)
        while len(self._namers) > self._limits.named_peers_max:
            self._namers.popitem(last=False)

    async def connect(self, peer: bytes, within_s: float) -> bool:
        """Have p2pd connect to a peer where its namers say that it is.

        Returns False where none of its namers knows a way that works. A peer without namers is left to p2pd.
        """
        if peer not in self._namers:
            return True
        if (looking := self._looking.get(peer)) is None:
            looking = self._looking[peer] = asyncio.create_task(self._find(peer, within_s))
            looking.add_done_callback(lambda _: self._looking.pop(peer, None))
        await asyncio.wait({looking})
        return not looking.cancelled() and looking.result()

    async def _find(self, peer: bytes, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s), self._turns:
                if peer in await self._connected.value(self._limits.connected_s):
                    return True
                namers = self._namers.get(peer, [])
                answers = await asyncio.gather(*(self._ask(namer, peer, within_s / 2) for namer in namers))
                addresses = dict.fromkeys(address for answer in answers for address in answer)
                if addresses:
                    await self._daemon.connect_at(peer, list(addresses), within_s)
                return bool(addresses)
        except (SwarmError, TimeoutError, OSError) as error:
            _log.debug("a peer was not found through its namers", why=str(error)[:200])
            return False
        finally:
            self._namers.pop(peer, None)  # a peer that is named again is looked for again

    async def _ask(self, namer: bytes, peer: bytes, within_s: float) -> list[bytes]:
        """Ask a node for a peer's addresses; none from one that fails.

        A node on the Internet leads no other into its own network: the private addresses that it names are left out.
        """
        writer = None
        try:
            async with asyncio.timeout(within_s):
                at, reader, writer = await self._daemon.open_stream(namer, PROTOCOL, within_s)
                await _write(writer, KadMessage(type=FIND_NODE, key=peer))
                answer = await _read(reader, self._limits.answer_bytes_max)
                told = next((each.addrs for each in answer.closerPeers if each.id == peer), ())
                host = first_host(at)
                public = not host or makes_sense(host, public=True)
                usable = [bytes(each) for each in told[: self._limits.addresses_max]]
                usable = [each for each in usable if len(each) <= self._limits.address_bytes_max]
                return await literal_addresses(usable, lambda host: makes_sense(host, public))
        except (SwarmError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            _log.debug("a namer does not say where a peer is", why=repr(error)[:200])
            return []
        finally:
            if writer is not None:
                writer.transport.abort()

    # --- others ask --------------------------------------------------------------------------------------------------

    async def serve(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the question of one stream. No behaviour of the peer raises."""
        asker, task = info.peer_id.to_bytes(), asyncio.current_task()
        assert task is not None
        if sum(peer == asker for peer in self._streams.values()) >= self._limits.streams_per_peer:
            writer.transport.abort()
            return
        if len(self._streams) >= self._limits.streams_max:
            next(iter(self._streams)).cancel()
        self._streams[task] = asker
        try:
            async with asyncio.timeout(self._limits.question_s):
                question = await _read(reader, self._limits.request_bytes_max)
            if self._rates.take(asker.hex(), asyncio.get_running_loop().time()):
                answer = await self.answer(question, asker)
                async with asyncio.timeout(self._limits.question_s):
                    await _write(writer, answer)
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, SwarmError) as error:
            _log.debug("a question of libp2p's Kademlia is not answered", why=repr(error)[:200])
        finally:
            del self._streams[task]
            writer.transport.abort()  # what has not been read by now is not waited for

    async def answer(self, question: KadMessage, asker: bytes) -> KadMessage:
        """Return the answer to a question. Raises InvalidMessage for one that is not answered here; Unreachable."""
        if question.type == PING:
            return question
        if question.type != FIND_NODE:
            raise InvalidMessage(
                "question to libp2p's Kademlia", f"type {question.type}: this node keeps nothing there"
            )
        key, own = bytes(question.key), self._daemon.p2p.peer_id.to_bytes()
        connected = await self._connected.value(self._limits.shown_s)
        there = (connected | self._addresses.keys()) - {asker, key}
        others = nearest(key, there.intersection(self._nodes()), self._limits.named_max - 1)
        wanted = [key] if key == own or (key in connected | self._addresses.keys() and key != asker) else []
        peers = [*wanted, *others]
        answer = KadMessage(type=FIND_NODE, key=key)
        for peer, addresses in zip(peers, await asyncio.gather(*map(self._addresses_of, peers)), strict=True):
            if addresses:
                answer.closerPeers.append(KadPeer(id=peer, addrs=addresses))
        return answer

    async def _addresses_of(self, peer: bytes) -> Sequence[bytes]:
        """Return the addresses that a peer has told p2pd: while they are connected, else those told before."""
        loop, limits = asyncio.get_running_loop(), self._limits
        since, addresses = self._addresses.get(peer, (-limits.known_s, ()))
        there = peer in await self._connected.value(limits.shown_s) or peer == self._daemon.p2p.peer_id.to_bytes()
        if there and loop.time() - since >= limits.fresh_s:
            told = await self._daemon.addresses_of(peer)
            if fitting := tuple(each for each in told if len(each) <= limits.address_bytes_max)[: limits.addresses_max]:
                since, addresses = loop.time(), fitting
                self._addresses[peer] = since, addresses
                self._addresses.move_to_end(peer)
                while len(self._addresses) > limits.known_max:
                    self._addresses.popitem(last=False)
        if loop.time() - since < limits.known_s:
            return addresses
        self._addresses.pop(peer, None)
        return ()


class _Shared:
    """p2pd's present peers. Those who want to know at one time share one question."""

    def __init__(self, ask: Callable[[], Awaitable[frozenset[bytes]]]) -> None:
        self._ask = ask
        self._since, self._value = -math.inf, frozenset[bytes]()
        self._asking, self._is_stale = asyncio.Lock(), False  # stale: forgotten while p2pd was being asked

    async def value(self, fresh_s: float) -> frozenset[bytes]:
        """Return them, as of at most so long ago. Raises Unreachable."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._since >= fresh_s:
            async with self._asking:
                if loop.time() - self._since >= fresh_s:
                    self._is_stale = False
                    self._value = await self._ask()
                    self._since = -math.inf if self._is_stale else loop.time()
        return self._value

    def forget(self) -> None:
        """Ask again before the next answer."""
        self._since, self._is_stale = -math.inf, True


def nearest(key: bytes, peers: Iterable[bytes], count: int) -> list[bytes]:
    """Return the peers that are nearest to a key by libp2p's distance: XOR of SHA-256 digests."""
    place = _place(key)
    return sorted(peers, key=lambda peer: _place(peer) ^ place)[:count]


def _place(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(key).digest())


async def _read(reader: asyncio.StreamReader, bytes_max: int) -> KadMessage:
    """Read one message behind its length. Raises InvalidMessage, IncompleteReadError, OSError."""
    size = 0
    for shift in range(0, 28, 7):
        (byte,) = await reader.readexactly(1)
        size |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    else:
        raise InvalidMessage("message of libp2p's Kademlia", "its length has no end")
    if size > bytes_max:
        raise InvalidMessage("message of libp2p's Kademlia", f"it has {size} bytes")
    try:
        return KadMessage.FromString(await reader.readexactly(size))
    except DecodeError:
        raise InvalidMessage("message of libp2p's Kademlia", "it is malformed") from None


async def _write(writer: asyncio.StreamWriter, message: KadMessage) -> None:
    data = message.SerializeToString()
    writer.write(varint(len(data)) + data)
    await writer.drain()
