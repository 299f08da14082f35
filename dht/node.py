"""One member of the swarm's DHT: hivemind's protocol in this event loop, on a p2pd that is replaced when it fails.

    async with open_node(NodeConfig(network="public", initial_peers=[...]), clock=time.time) as node:
        directory = Directory(node, identity=identity, network="public", clock=time.time)

Everything above p2pd is rebuilt with it: the handlers, the way into the swarm, and what this node had
announced itself. What it keeps for others stays.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm.access import EVERYBODY, Access
from swarm.dht.format import CALL_TIMEOUT_S, FIND_TIMEOUT_S
from swarm.dht.protocol import STORES_MAX, SwarmProtocol
from swarm.dht.records import check_clock, key_id
from swarm.dht.search import Found, Searcher, keepers
from swarm.dht.search import Result as Searched
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import Clock, Entry, Heard, RecordGate
from swarm.errors import ClockSkew, SwarmError, Unreachable, ungrouped
from swarm.net.p2p import Daemon, P2PConfig, split_multiaddr, supervise

JOIN_TIMEOUT_S = 13.0  # with p2pd's start, an unreachable swarm is reported within 15 s
POPULATE_TIMEOUT_S = 3.0  # for learning one's neighbours while joining
UP_TIMEOUT_S = 15.0  # what a call waits for while p2pd is being replaced
GET_TIMEOUT_S = 20.0
PUT_TIMEOUT_S = 20.0
MAINTAIN_S = 15.0  # how often neighbours are looked at, and initial peers called on that are none (any more)
GET_KEYS_MAX = 16  # keys in one search; more are looked up one search after the other
PLACES_AT_FIRST, PLACES_LATER = 3, 1  # random places at which a node looks how near others are
INITIAL_PEERS_MAX = 32
OWN_MAX = 256  # of our own entries, which are stored again when p2pd was replaced

StreamHandler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

Result = TypeVar("Result")
_log = structlog.get_logger("swarm.dht")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How a node joins. `p2p.listen` None makes it a client: it looks up and stores, and answers nobody."""

    network: str
    p2p: P2PConfig
    initial_peers: tuple[str, ...] = ()
    access: Access = EVERYBODY

    @property
    def client(self) -> bool:
        """Whether the node only uses the DHT."""
        return self.p2p.listen is None


@dataclass(frozen=True, slots=True)
class _Running:
    """What lives on one p2pd."""

    daemon: Daemon
    protocol: SwarmProtocol
    searcher: Searcher

    def known(self) -> list[bytes]:
        """Return the nodes that we know."""
        return [peer.to_bytes() for peer in self.protocol.routing_table.uid_to_peer_id.values()]


class SwarmNode:
    """A node of the DHT; a RecordStore. Made by `open_node`."""

    def __init__(self, config: NodeConfig, clock: Clock, random_source: random.Random) -> None:
        self.gate = RecordGate(config.network, clock, config.access)
        self.storage = RecordStorage(clock)
        self.restarts = -1  # of p2pd; 0 once the first one runs
        self.addresses: tuple[str, ...] = ()
        self.peer_id = ""
        self._config, self._clock, self._random = config, clock, random_source
        self._running: _Running | None = None
        self._up = asyncio.Event()
        self._own: dict[tuple[bytes, str], Entry] = {}
        self._streams: dict[str, StreamHandler] = {}

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Store our own entries on the nodes nearest to their keys. Returns how many other nodes hold each.

        Raises Unreachable when p2pd does not come back in time.
        """
        entries = tuple(entries)
        self._remember(entries)
        async with self._deadline("storing records", PUT_TIMEOUT_S):
            counts: list[int] = []
            for first in range(0, len(entries), STORES_MAX):
                part = entries[first : first + STORES_MAX]
                counts += await self._on_running(partial(self._put_part, entries=part))
            return tuple(counts)

    async def get(self, keys: Sequence[str], heard: Heard | None = None) -> dict[str, tuple[bytes, ...]]:
        """Search the DHT. Returns the newest living records under each key, as stored. Raises Unreachable."""
        found: dict[str, tuple[bytes, ...]] = {}
        async with self._deadline("looking up records", GET_TIMEOUT_S):
            for first in range(0, len(keys), GET_KEYS_MAX):
                part = {key: key_id(key) for key in keys[first : first + GET_KEYS_MAX]}
                searched = await self._on_running(partial(self._search, keys=tuple(part.values()), heard=heard))
                found |= {key: tuple(e.data for e in searched[place].ordered()) for key, place in part.items()}
        return found

    async def handle_stream(self, name: str, handler: StreamHandler) -> None:
        """Serve a raw libp2p stream protocol, on every p2pd to come as well."""
        self._streams[name] = handler
        if self._running is not None:
            await self._running.daemon.p2p.add_binary_stream_handler(name, handler)

    async def open_stream(self, peer_id: str, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to a peer. Raises Unreachable."""
        running = await self._usable()
        return await running.daemon.open_stream(peer_id, name, CALL_TIMEOUT_S)

    def neighbours(self) -> tuple[str, ...]:
        """Return the peer ids of the DHT nodes that this one knows, in random order."""
        if self._running is None:
            return ()
        peers = [str(peer.to_base58()) for peer in self._running.protocol.routing_table.uid_to_peer_id.values()]
        self._random.shuffle(peers)
        return tuple(peers)

    @property
    def p2pd_pid(self) -> int | None:
        """The process id of the present p2pd."""
        return self._running.daemon.pid if self._running is not None else None

    # --- storing and searching ---------------------------------------------------------------------------------------

    def _remember(self, entries: Sequence[Entry]) -> None:
        """Keep what is ours: for ourselves as a node, and for the time after p2pd was replaced."""
        now = self._clock()
        self._own = {place: entry for place, entry in self._own.items() if entry.facts.expires > now}
        for entry in entries:
            if len(self._own) < OWN_MAX:
                self._own[entry.place.key, entry.place.subkey] = entry
            if not self._config.client:
                self.storage.put(entry)

    async def _put_part(self, running: _Running, entries: Sequence[Entry]) -> list[int]:
        by_key: dict[bytes, list[int]] = {}
        for i, entry in enumerate(entries):
            by_key.setdefault(entry.place.key, []).append(i)
        counts = [0] * len(entries)

        async def store_at(peer: bytes, wanted: list[int]) -> None:
            accepted = await running.protocol.store(PeerID(peer), [entries[i] for i in wanted])
            for i, ok in zip(wanted, accepted or (), strict=False):
                counts[i] += ok

        await self._find_company(running)
        wanted_at: dict[bytes, list[int]] = {}
        for key, peers in (await self._nearest(running, tuple(by_key))).items():
            for peer in peers:
                wanted_at.setdefault(peer, []).extend(by_key[key])
        async with asyncio.TaskGroup() as group:
            for peer, wanted in wanted_at.items():
                group.create_task(store_at(peer, wanted))
        return counts

    async def _nearest(self, running: _Running, keys: Sequence[bytes]) -> dict[bytes, tuple[bytes, ...]]:
        """Find the nodes that are to keep each key's records. It asks for the key's twin: no records travel."""
        twins = {_twin(key): key for key in keys}
        radius = running.searcher.surroundings.radius
        nearest: dict[bytes, tuple[bytes, ...]] = {}
        for first in range(0, len(twins), GET_KEYS_MAX):
            part = await self._searched(running, list(twins)[first : first + GET_KEYS_MAX])
            nearest |= {twins[twin]: keepers(result, twin, radius) for twin, result in part.items()}
        return nearest

    async def _search(
        self, running: _Running, keys: Sequence[bytes], heard: Heard | None = None
    ) -> dict[bytes, Searched]:
        """Ask the nodes around each key and merge what they hold with what we hold ourselves.

        Raises Unreachable if nobody answers: that is not the same as nobody holding a record.
        """
        await self._find_company(running)
        found = await self._searched(running, keys, heard)
        lonely = bool(self._config.initial_peers) and not any(result.nodes for result in found.values())
        if lonely:
            await self._find_company(running)
            found = await self._searched(running, keys, heard)
            lonely = not any(result.nodes for result in found.values())
        for key, result in found.items():
            result.add(self.storage.entries(key))
        if lonely and not any(result.entries for result in found.values()):
            raise Unreachable("the swarm", self._config.initial_peers, FIND_TIMEOUT_S, "no node of the DHT answers")
        return found

    async def _find_company(self, running: _Running) -> None:
        """Call on the initial peers if we know nobody (any more): all may have been silent at the same moment."""
        if not running.known():
            await self._join(running, must=False)

    async def _searched(
        self, running: _Running, keys: Sequence[bytes], heard: Heard | None = None
    ) -> dict[bytes, Searched]:
        known = running.known()
        found = await running.searcher.search(keys, known, heard=heard or (lambda entries: None))
        if known and not any(result.nodes for result in found.values()):
            await asyncio.sleep(2 * self._config.p2p.limits.poll_s)
            if self._running is not running:
                raise ConnectionError("p2pd ended during a search")
        return found

    # --- life --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def attach(self, daemon: Daemon) -> AsyncIterator[None]:
        """Build the node on a p2pd. Raises Unreachable or ClockSkew if it cannot join while it is new."""
        protocol = await SwarmProtocol.build(
            daemon.p2p, gate=self.gate, storage=self.storage, clock=self._clock, client=self._config.client
        )

        async def find(peer: bytes, keys: Sequence[bytes]) -> dict[bytes, Found] | None:
            return await protocol.find(PeerID(peer), keys) if peer != daemon.p2p.peer_id.to_bytes() else None

        searcher = Searcher(find, self._random)
        self._running = running = _Running(daemon, protocol, searcher)
        try:
            for name, handler in self._streams.items():
                await daemon.p2p.add_binary_stream_handler(name, handler)
            await self._join(running, must=self.restarts < 0)
            self.addresses, self.peer_id = await daemon.addresses(), daemon.peer_id
            self.restarts += 1
            self._up.set()
            async with _background(self._maintain(running, republish=self.restarts > 0)):
                yield
        finally:
            self._up.clear()
            self._running = None
            await searcher.close()

    async def _join(self, running: _Running, must: bool) -> None:
        """Connect to the initial peers, check the clock, learn the neighbourhood."""
        known = self._config.initial_peers[:INITIAL_PEERS_MAX]
        if not known:
            return
        tries = await self._call_on(running, known)
        skews = [skew for skew in tries if isinstance(skew, float)]
        if not skews:
            if must:
                reasons = {str(failure.why) for failure in tries if isinstance(failure, Unreachable)}
                raise Unreachable("the swarm", known, JOIN_TIMEOUT_S, "; ".join(sorted(reasons))[:300])
            _log.warning("no initial peer answers", initial_peers=known)
            return
        try:
            check_clock(skews)
        except ClockSkew as skew:
            if must:
                raise
            _log.warning("the clock is wrong", why=str(skew))  # a running node goes on: its sessions do not need it
        await self._learn(running, PLACES_AT_FIRST)

    async def _rejoin(self, running: _Running) -> None:
        """Call on the initial peers that are no neighbours: one that was away would else know nobody for good."""
        peer_ids = running.protocol.routing_table.peer_id_to_uid
        known = self._config.initial_peers[:INITIAL_PEERS_MAX]
        own = running.daemon.p2p.peer_id
        lost = [address for address in known if (peer := split_multiaddr(address)[0]) not in peer_ids and peer != own]
        if any(isinstance(answer, float) for answer in await self._call_on(running, lost)):
            _log.info("an initial peer is back")

    async def _call_on(self, running: _Running, addresses: Sequence[str]) -> "list[float | Unreachable]":
        return await asyncio.gather(*(self._join_at(running, address) for address in addresses))

    async def _join_at(self, running: _Running, address: str) -> float | Unreachable:
        """Return our clock's skew (seconds) against one initial peer, or why it cannot be reached."""
        peer, _ = split_multiaddr(address)
        try:
            await running.daemon.connect(address, JOIN_TIMEOUT_S - 2 * CALL_TIMEOUT_S)
        except Unreachable as error:
            return error
        pong = await running.protocol.ping(peer) or await running.protocol.ping(
            peer
        )  # it may be busy: many start together
        if pong is None:
            return Unreachable("a peer", (address,), 2 * CALL_TIMEOUT_S, "it is connected but does not answer")
        return pong.skew_s

    async def _learn(self, running: _Running, places: int = PLACES_LATER) -> None:
        """Search for ourselves, which fills the routing table on both sides, and at random places."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POPULATE_TIMEOUT_S):
                await running.searcher.explore(running.known(), places, _twin(running.protocol.node_id.to_bytes()))

    async def _maintain(self, running: _Running, republish: bool) -> None:
        if republish and self._own:
            await self._put_part(running, list(self._own.values())[:STORES_MAX])
        while True:
            await asyncio.sleep(MAINTAIN_S)
            while running.protocol.unanswered:
                await running.protocol.ping(running.protocol.unanswered.popleft())
            try:
                if not running.protocol.routing_table.uid_to_peer_id:
                    await self._join(running, must=False)
                else:
                    await self._rejoin(running)
                    await self._learn(running)
            except SwarmError as error:
                _log.warning("cannot rejoin the swarm", why=str(error))

    async def _on_running(self, work: Callable[[_Running], Awaitable[Result]]) -> Result:
        """Do `work` on the node, and once more if p2pd dies meanwhile; under the caller's deadline.

        Raises Unreachable for that if p2pd lives.
        """
        while True:
            running = await self._usable()
            try:
                return await work(running)
            except SwarmError:
                raise
            except Exception as error:  # noqa: BLE001 - hivemind raises many kinds
                await asyncio.sleep(2 * self._config.p2p.limits.poll_s)  # by then a dead p2pd has been noticed
                if self._running is running:
                    raise Unreachable("the swarm", self._config.initial_peers, 0.0, repr(error)[:200]) from None
                _log.debug("once more on the next p2pd", error=repr(error)[:200])

    async def _usable(self) -> _Running:
        """Return the running node, after its replacement if need be."""
        await self._up.wait()
        assert self._running is not None
        return self._running

    @asynccontextmanager
    async def _deadline(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise Unreachable(f"the swarm ({what})", self._config.initial_peers, timeout_s) from None


def _twin(key: bytes) -> bytes:
    """Return a key beside this one, under which nothing is stored: the same nodes are near."""
    return key[:-1] + bytes([key[-1] ^ 1])


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
            waiting = group.create_task(node._up.wait())
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
