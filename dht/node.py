"""One member of the swarm's DHT: hivemind's protocol in this event loop, on a p2pd that is replaced when it fails.

    async with open_node(NodeConfig(network="public", initial_peers=[...]), clock=time.time) as node:
        directory = Directory(node, identity=identity, network="public", clock=time.time)

A replaced p2pd takes all above it along: the handlers, the connections into the swarm (`swarm.dht.member`), and the
records that this node had announced itself. The records that it keeps for others stay.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import structlog
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm.access import EVERYBODY, Access
from swarm.dht.format import CALLS
from swarm.dht.member import Member, MemberLimits
from swarm.dht.protocol import SwarmProtocol, nodes_of
from swarm.dht.records import key_id
from swarm.dht.sampling import Ask, Found, Sample
from swarm.dht.search import Searcher
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import Clock, Entry, OnEntries, RecordGate
from swarm.dht.whereabouts import PROTOCOL as WHEREABOUTS
from swarm.dht.whereabouts import Whereabouts
from swarm.errors import SwarmError, Unreachable
from swarm.groups import ungrouped
from swarm.limits import limit
from swarm.net.p2p import Daemon, P2PConfig, split_multiaddr, supervise

StreamHandler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

Result = TypeVar("Result")
_log = structlog.get_logger("swarm.dht")


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """How long a node's own requests may take, and how much it announces."""

    get_timeout_s: float = limit(20.0, "s", "a look-up that takes longer raises Unreachable")
    put_timeout_s: float = limit(20.0, "s", "storing that takes longer raises Unreachable")
    up_timeout_s: float = limit(20.0, "s", "streams and questions wait so long for a p2pd that is being replaced")
    own_max: int = limit(256, "entries", "of our own that are stored again when p2pd was replaced; more are not")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How a node joins. `p2p.listen` None makes it a client: it looks up and stores, and answers no calls.

    proven: others can call it. One that is not is a client until it is promoted; the first of a swarm needs no proof.
    met: nodes to call on as on initial peers, none of which has to answer.
    """

    network: str
    p2p: P2PConfig
    initial_peers: tuple[str, ...] = ()
    access: Access = EVERYBODY
    proven: bool = True
    limits: NodeLimits = NodeLimits()
    member_limits: MemberLimits = field(default_factory=MemberLimits)
    met: tuple[str, ...] = ()

    @property
    def client(self) -> bool:
        """Whether the node only uses the DHT."""
        return self.p2p.listen is None

    @property
    def serves(self) -> bool:
        """Whether others may call it."""
        return not self.client and (self.proven or not self.initial_peers)


class SwarmNode:
    """A node of the DHT; a RecordStore. Made by `open_node`."""

    def __init__(self, config: NodeConfig, clock: Clock, random_source: random.Random) -> None:
        self.gate = RecordGate(config.network, clock, config.access)
        self.storage = RecordStorage(clock)
        self.restarts = -1  # of p2pd; 0 once the first one runs
        self.addresses: tuple[str, ...] = ()
        self.peer_id = ""
        self.port = 0  # that p2pd listens on; 0 for a client
        self._config, self._clock, self._random = config, clock, random_source
        self.member: Member | None = None  # of the present p2pd
        self._up = asyncio.Event()
        self._own: dict[tuple[bytes, str], Entry] = {}
        self._streams: dict[str, StreamHandler] = {}

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Store our own entries on the nodes nearest to their keys. Returns how many other nodes hold each.

        Raises Unreachable when p2pd does not come back in time.
        """
        entries = tuple(entries)
        self._remember(entries)
        async with _deadline(self._config, "storing records", self._config.limits.put_timeout_s):
            counts: list[int] = []
            for first in range(0, len(entries), CALLS.stores_max):
                part = entries[first : first + CALLS.stores_max]
                counts += await self._on_member(partial(Member.put, entries=part))
            return tuple(counts)

    async def get(
        self, keys: Sequence[str], on_entries: OnEntries | None = None, sample: Sample | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Search the DHT. Returns the newest living records under each key, as stored. Raises Unreachable.

        sample: read no more than this, and from the keys below full ones, too.
        """
        found: dict[str, tuple[bytes, ...]] = {}
        async with _deadline(self._config, "looking up records", self._config.limits.get_timeout_s):
            if sample is not None:
                return await self._on_member(
                    partial(Member.sample, keys=tuple(keys), sample=sample, on_entries=on_entries)
                )
            step = self._config.member_limits.search_keys_max
            for first in range(0, len(keys), step):
                part = {key: key_id(key) for key in keys[first : first + step]}
                searched = await self._on_member(
                    partial(Member.search, keys=tuple(part.values()), on_entries=on_entries)
                )
                found |= {key: tuple(e.data for e in searched[place].ordered()) for key, place in part.items()}
        return found

    def renew(self, why: str) -> None:
        """Begin anew on another p2pd: all connections of the present one have died. Calls wait for it."""
        if self.member is not None:
            self._up.clear()
            self.member.ended = True
            self.member.daemon.give_up(why)

    async def handle_stream(self, name: str, handler: StreamHandler) -> None:
        """Serve a raw libp2p stream protocol, on every p2pd to come as well."""
        self._streams[name] = handler
        if (member := self.member) is None or member.ended:
            return
        try:
            await member.daemon.p2p.add_binary_stream_handler(name, handler)
        except Exception:
            if not member.lost:
                raise
            _log.debug("the next p2pd serves the stream", name=name)

    async def open_stream(self, peer_id: str, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to a peer. Raises Unreachable, also when p2pd does not come back in time."""

        async def opened(member: Member) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            peer = PeerID.from_base58(peer_id).to_bytes()
            if not await member.whereabouts.connect(peer, CALLS.timeout_s):
                raise Unreachable("a peer", (peer_id,), CALLS.timeout_s, "no node that named it knows a way to it")
            _, reader, writer = await member.daemon.open_stream(peer, name, CALLS.timeout_s)
            return reader, writer

        async with _deadline(self._config, "opening a stream", self._config.limits.up_timeout_s + CALLS.timeout_s):
            return await self._on_member(opened)

    async def meet(self, addresses: Sequence[str]) -> None:
        """Call on more nodes, now and whenever they are lost; they replace those met before. Raises SwarmError.

        None of them has to answer.
        """
        for address in addresses:
            split_multiaddr(address)
        self._config = replace(self._config, met=tuple(addresses))  # for a p2pd to come, too
        await self._on_member(partial(Member.meet, addresses=addresses))

    async def up(self) -> Member:
        """Wait until the node has joined, for the first time or on a new p2pd. Returns the present member."""
        await self._up.wait()
        assert self.member is not None
        return self.member

    async def back(self) -> bool:
        """Wait for a p2pd that is being replaced. Returns whether it came back in time."""
        try:
            async with asyncio.timeout(self._config.limits.up_timeout_s):
                await self.up()
        except TimeoutError:
            return False
        return True

    async def promote(self) -> None:
        """Others can call this node: answer them from now on, and let them learn it."""
        self._config = replace(self._config, proven=True)
        if (member := self.member) is not None:
            try:
                await self._settle(member)
            except Exception as error:  # noqa: BLE001 - hivemind raises many kinds; the next p2pd's member serves
                _log.warning("this node does not answer calls yet", why=repr(error)[:200])

    def demote(self) -> None:
        """Others cannot call this node any more: be a client, which they forget."""
        self._config = replace(self._config, proven=False)
        if self.member is not None and not self.serves:
            self.member.protocol.demote()

    @property
    def serves(self) -> bool:
        """Whether this node answers calls."""
        return self._config.serves

    def neighbours(self) -> tuple[str, ...]:
        """Return the peer ids of the DHT nodes that this one knows, in random order."""
        if self.member is None:
            return ()
        peers = [str(peer.to_base58()) for peer in self.member.protocol.routing_table.peers()]
        self._random.shuffle(peers)
        return tuple(peers)

    async def hosts(self) -> dict[str, str]:
        """Return the literal address of each connected peer, by its peer id; nothing while p2pd is away."""
        try:
            return await self.member.daemon.hosts() if self.member is not None else {}
        except Unreachable:
            return {}

    @property
    def p2pd_pid(self) -> int | None:
        """The process id of the present p2pd."""
        return self.member.daemon.pid if self.member is not None else None

    @asynccontextmanager
    async def attach(self, daemon: Daemon) -> AsyncIterator[None]:
        """Build the node on a p2pd. Raises Unreachable or ClockSkew if it cannot join while it is new."""
        self.member = member = await self._build(daemon)
        try:
            if not self._config.client:
                await daemon.p2p.add_binary_stream_handler(WHEREABOUTS, member.whereabouts.serve)
            for name, handler in tuple(self._streams.items()):
                await daemon.p2p.add_binary_stream_handler(name, handler)
            await member.join(must=self.restarts < 0)
            await self._settle(member)
            self.addresses, self.peer_id, self.port = await daemon.addresses(), daemon.peer_id, daemon.port
            self.restarts += 1
            if not member.ended:
                self._up.set()
            again = list(self._own.values())[: CALLS.stores_max] if self.restarts else []
            async with _background(member.maintain(again)):
                yield
        finally:
            self._up.clear()
            self.member = None
            await member.close()

    async def _build(self, daemon: Daemon) -> Member:
        protocol = await SwarmProtocol.build(
            daemon.p2p, gate=self.gate, storage=self.storage, clock=self._clock, client=not self.serves
        )

        async def find(peer: bytes, asks: Sequence[Ask]) -> list[Found] | None:
            return await protocol.find(PeerID(peer), asks) if peer != daemon.p2p.peer_id.to_bytes() else None

        searcher, config = Searcher(find, self._random), self._config
        poll_s = config.p2p.limits.poll_s
        limits, whereabouts = config.member_limits, Whereabouts(daemon, partial(nodes_of, protocol))
        protocol.whereabouts = whereabouts
        return Member(
            daemon, protocol, searcher, config.initial_peers, self.storage, poll_s, whereabouts, limits, met=config.met
        )

    async def _settle(self, member: Member) -> None:
        """Let a member serve if this node was promoted while its p2pd was new."""
        if self.serves and member.protocol.client_mode:
            await member.protocol.promote()
            await member.learn(1)

    def _remember(self, entries: Sequence[Entry]) -> None:
        """Keep our own entries: as a node that stores them, and for the time after p2pd was replaced."""
        now = self._clock()
        self._own = {place: entry for place, entry in self._own.items() if entry.facts.expires > now}
        for entry in entries:
            if len(self._own) < self._config.limits.own_max:
                self._own[entry.place.key, entry.place.subkey] = entry
            if not self._config.client:
                self.storage.put(entry)

    async def _on_member(self, work: Callable[[Member], Awaitable[Result]]) -> Result:
        """Do `work` on the node, and once more if p2pd dies meanwhile; under the caller's deadline.

        Raises Unreachable for that if p2pd lives.
        """
        while True:
            member = await self.up()
            try:
                return await work(member)
            except Exception as error:
                if isinstance(error, SwarmError) and not member.lost:
                    raise
                if not member.ended:
                    await asyncio.sleep(2 * self._config.p2p.limits.poll_s)  # by then a dead p2pd has been noticed
                if not member.ended:
                    raise Unreachable("the swarm", self._config.initial_peers, 0.0, repr(error)[:200]) from None
                _log.debug("once more on the next p2pd", error=repr(error)[:200])


@asynccontextmanager
async def _deadline(config: NodeConfig, doing: str, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unreachable(f"the swarm ({doing})", config.initial_peers, timeout_s) from None


@asynccontextmanager
async def open_node(
    config: NodeConfig, *, clock: Clock, random_source: random.Random | None = None
) -> AsyncIterator[SwarmNode]:
    """Run a node while the block runs.

    Raises Unreachable when no initial peer answers (within 15 s), ClockSkew, AddressInUse, P2PFailed. Should p2pd fail
    for good later on, the block is cancelled and P2PFailed raised.
    """
    for address in config.initial_peers:
        split_multiaddr(address)  # a malformed one is the user's mistake: say so before anything starts
    node = SwarmNode(config, clock, random_source or random.Random())  # noqa: S311 - spreads load, keeps no secret
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            life = group.create_task(supervise(config.p2p, node.attach))
            waiting = group.create_task(node.up())
            await asyncio.wait({life, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                waiting.cancel()
            await waiting
            try:
                yield node
            finally:
                life.cancel()


@asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            yield
            task.cancel()
