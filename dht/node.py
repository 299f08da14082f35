"""One member of the swarm's DHT: hivemind's DHTNode in this event loop, on a p2pd that is replaced when it fails.

    async with open_node(NodeConfig(network="public", initial_peers=[...]), clock=time.time) as node:
        directory = Directory(node, identity=identity, network="public", clock=time.time)

Everything above p2pd is rebuilt with it: hivemind's node, the handlers, the way into the swarm, and what this node had
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
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.traverse import traverse_dht
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm.access import EVERYBODY, Access
from swarm.dht.format import BUCKET_SIZE, CALL_TIMEOUT_S, FIND_TIMEOUT_S, KEYS_MAX, REPLICAS, merge
from swarm.dht.protocol import STORES_MAX, SwarmProtocol
from swarm.dht.records import check_clock, key_id
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import Clock, Entry, RecordGate
from swarm.errors import ClockSkew, SwarmError, Unreachable, ungrouped
from swarm.net.p2p import POLL_S, Daemon, P2PConfig, split_multiaddr, supervise

JOIN_TIMEOUT_S = 10.0  # with p2pd's start, an unreachable swarm is reported within 15 s
POPULATE_TIMEOUT_S = 3.0  # for learning one's neighbours while joining
UP_TIMEOUT_S = 15.0  # what a call waits for while p2pd is being replaced
GET_TIMEOUT_S = 20.0
PUT_TIMEOUT_S = 20.0
MAINTAIN_S = 15.0  # how often neighbours are looked at, and initial peers called on that are none (any more)
GET_KEYS_MAX = 16  # keys in one search; more are looked up one search after the other
GET_BEAM = 2 * REPLICAS  # nodes that a search asks for one key
SEARCH_WORKERS = GET_BEAM  # so that a search with dead nodes in its way waits for them all at once
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
    dht: DHTNode
    protocol: SwarmProtocol


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

    async def get(self, keys: Sequence[str]) -> dict[str, tuple[bytes, ...]]:
        """Search the DHT. Returns the newest living records under each key, as stored. Raises Unreachable."""
        found: dict[str, tuple[bytes, ...]] = {}
        async with self._deadline("looking up records", GET_TIMEOUT_S):
            for first in range(0, len(keys), GET_KEYS_MAX):
                part = {key: DHTID.from_bytes(key_id(key)) for key in keys[first : first + GET_KEYS_MAX]}
                entries = await self._on_running(partial(self._search, keys=tuple(part.values())))
                found |= {key: tuple(entry.data for entry in entries[node].values()) for key, node in part.items()}
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
        by_key: dict[DHTID, list[int]] = {}
        for i, entry in enumerate(entries):
            by_key.setdefault(DHTID.from_bytes(entry.place.key), []).append(i)
        counts = [0] * len(entries)

        async def store_at(peer: PeerID, wanted: list[int]) -> None:
            accepted = await running.protocol.store(peer, [entries[i] for i in wanted])
            for i, ok in zip(wanted, accepted or (), strict=False):
                counts[i] += ok

        await self._find_company(running)
        near = await self._nearest(running, tuple(by_key))
        async with asyncio.TaskGroup() as group:
            for key, wanted in by_key.items():
                for peer in near[key]:
                    group.create_task(store_at(peer, wanted))
        return counts

    async def _nearest(self, running: _Running, keys: Sequence[DHTID]) -> dict[DHTID, tuple[PeerID, ...]]:
        """Find the nodes nearest to each key. It asks for the key's twin, so that no records travel."""
        twins = {DHTID(int(key) ^ 1): key for key in keys}
        nearest: dict[DHTID, tuple[PeerID, ...]] = {}
        queries = list(twins)
        for first in range(0, len(queries), GET_KEYS_MAX):
            part = await running.dht.find_nearest_nodes(
                queries[first : first + GET_KEYS_MAX], k_nearest=REPLICAS, beam_size=BUCKET_SIZE, exclude_self=True
            )
            nearest |= {twins[query]: tuple(peers.values()) for query, peers in part.items()}
        return nearest

    async def _search(self, running: _Running, keys: Sequence[DHTID]) -> dict[DHTID, dict[str, Entry]]:
        """Ask the nodes nearest to each key and merge what they hold: the newest record in each place wins.

        Raises Unreachable if nobody answers: that is not the same as nobody holding a record.
        """
        found: dict[DHTID, dict[str, Entry]] = {key: {} for key in keys}
        for key in keys:
            merge(found[key], self.storage.entries(key.to_bytes()))
        await self._find_company(running)
        if await self._ask_nearest(running, found) or not self._config.initial_peers:
            return found
        await self._find_company(running)
        if not await self._ask_nearest(running, found) and not any(found.values()):
            raise Unreachable("the swarm", self._config.initial_peers, FIND_TIMEOUT_S, "no node of the DHT answers")
        return found

    async def _find_company(self, running: _Running) -> None:
        """Call on the initial peers if we know nobody (any more): all may have been silent at the same moment."""
        if not running.protocol.routing_table.uid_to_peer_id:
            running.dht.blacklist.clear()
            await self._join(running, must=False)

    async def _ask_nearest(self, running: _Running, found: dict[DHTID, dict[str, Entry]]) -> int:
        """Do one search for the keys of `found`, and add to it. Returns how many answers came."""
        keys, answered = list(found), 0
        table = running.protocol.routing_table
        peers: dict[DHTID, PeerID] = {}
        for key in keys:
            peers |= dict(table.get_nearest_neighbors(key, BUCKET_SIZE, exclude=running.protocol.node_id))

        async def neighbours(node: DHTID, queries: Sequence[DHTID]) -> dict[DHTID, tuple[tuple[DHTID, ...], bool]]:
            nonlocal answered
            answers = await running.dht._call_find_with_blacklist(peers[node], list(queries)) or {}
            answered += bool(answers)
            for key, (entries, near) in answers.items():
                merge(found[key], entries)
                peers.update(near)
            return {key: (tuple(answers[key][1]) if key in answers else (), False) for key in queries}

        await traverse_dht(
            queries=keys,
            initial_nodes=list(peers),
            beam_size=GET_BEAM,
            num_workers=SEARCH_WORKERS,
            queries_per_call=KEYS_MAX,
            get_neighbors=neighbours,
            visited_nodes={key: {running.protocol.node_id} for key in keys},
            await_all_tasks=True,
        )
        return answered

    # --- life --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def attach(self, daemon: Daemon) -> AsyncIterator[None]:
        """Build the node on a p2pd. Raises Unreachable or ClockSkew if it cannot join while it is new."""
        protocol = await SwarmProtocol.build(
            daemon.p2p, gate=self.gate, storage=self.storage, clock=self._clock, client=self._config.client
        )
        dht = await DHTNode.create(
            p2p=daemon.p2p, node_id=protocol.node_id, client_mode=True, cache_nearest=0, num_workers=SEARCH_WORKERS
        )
        dht.protocol = protocol  # hivemind's own, made by create, answers nobody
        self._running = running = _Running(daemon, dht, protocol)
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
            dht.is_alive = False

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
        await self._learn(running)

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
            await running.daemon.connect(address, JOIN_TIMEOUT_S - CALL_TIMEOUT_S)
        except Unreachable as error:
            return error
        pong = await running.protocol.ping(peer)
        if pong is None:
            return Unreachable("a peer", (address,), CALL_TIMEOUT_S, "it is connected but does not answer")
        return pong.skew_s

    async def _learn(self, running: _Running) -> None:
        """Search for ourselves, which fills the routing table on both sides."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POPULATE_TIMEOUT_S):
                await running.dht.find_nearest_nodes([DHTID(int(running.protocol.node_id) ^ 1)], exclude_self=True)

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

        hivemind's search then ends with an assertion of its own. Raises Unreachable for that if p2pd lives.
        """
        while True:
            running = await self._usable()
            try:
                return await work(running)
            except SwarmError:
                raise
            except Exception as error:  # noqa: BLE001 - hivemind raises many kinds
                await asyncio.sleep(2 * POLL_S)  # by then a dead p2pd has been noticed
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
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()
