"""The three calls of hivemind's DHT (ping, store, find) with our rules of belief, storage and answers.

The wire format is hivemind's, so that other readers of it work; all of hivemind's own handlers are replaced, because
they trust all that arrives: see validator.py and storage.py. Also:

- A node's id is the hash of its peer id. Other ids are neither learnt from calls nor from answers, so a peer cannot
  choose an id next to a key for less than the price of grinding keys.
- Entries that a node sends for our cache are refused, and no entries are handed over to new nodes: owners refresh every
  20 s, and a stranger cannot make this node send its whole storage by inventing nodes.
- Records are verified in slices, with a turn for the event loop in between.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarm.dht import messages
from swarm.dht.asking import found_in, looks_of, request_of
from swarm.dht.format import CALLS, CallLimits, pack_dictionary
from swarm.dht.messages import FindRequest, FindResponse
from swarm.dht.neighbours import Neighbours
from swarm.dht.rates import RateLimit
from swarm.dht.records import packed_text
from swarm.dht.sampling import Ask, Found, Look, chosen, news, price
from swarm.dht.search import position
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import Clock, Entry, RecordGate, pack_value
from swarm.dht.whereabouts import Whereabouts
from swarm.errors import InvalidMessage, RecordError, TooBusy


@dataclass(frozen=True, slots=True)
class Pong:
    """A node that answered a ping. `skew_s`: our clock minus its clock."""

    node_id: DHTID | None
    skew_s: float


class SwarmProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's DHTProtocol with every handler and every call replaced. Made by `build`."""

    _rpc_handlers = None  # hivemind collects handlers once per class
    _stub_type = None
    _has_handlers: bool

    @classmethod
    async def build(
        cls,
        p2p: P2P,
        *,
        gate: RecordGate,
        storage: RecordStorage,
        clock: Clock,
        client: bool,
        limits: CallLimits = CALLS,
    ) -> "SwarmProtocol":
        """Make the protocol of one node; unless it is a client, it answers calls when this returns."""
        node_id = node_id_of(p2p.peer_id)
        sizes = limits.bucket_size, 5, limits.replicas  # 5: depth modulo, of a table that is replaced below
        calls = limits.timeout_s, limits.calls_max, 1  # 1: the size of hivemind's own cache, which nothing uses
        self = cast(SwarmProtocol, await cls.create(p2p, node_id, *sizes, *calls, True, DenyAll(), None))
        self.routing_table = Neighbours(node_id, limits.bucket_size, limits.waiting_max)
        self.equip(gate, storage, clock, limits)
        if not client:
            await self.promote()
        return self

    async def promote(self) -> None:
        """Answer calls from now on, and say so in our own: others learn this node."""
        self.client_mode = False
        self.node_info = dht_pb2.NodeInfo(node_id=self.node_id.to_bytes())
        if not self._has_handlers:
            self._has_handlers = True
            await self.add_p2p_handlers(self.p2p)

    def demote(self) -> None:
        """Be a client again. Calls fail from now on, those over open connections too, so others forget this node."""
        self.client_mode = True
        self.node_info = dht_pb2.NodeInfo()

    def equip(self, gate: RecordGate, storage: RecordStorage, clock: Clock, limits: CallLimits = CALLS) -> None:
        """Give it the parts that hivemind's own `create` does not know."""
        self.gate, self.records, self.clock, self.limits = gate, storage, clock, limits
        self.whereabouts: Whereabouts | None = None  # None: the network finds peers by itself
        self._handling = 0
        self._has_handlers: bool = False
        self._rates = RateLimit(limits.per_s, limits.burst)
        self._answered = RateLimit(limits.answered_per_s, limits.answered_burst)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return str(DHTProtocol._get_handle_name(namespace, method_name))

    # --- others call us ----------------------------------------------------------------------------------------------

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer with our id and clock.

        hivemind lets a caller ask to be called back. This node does not: callers that then keep silent would hold all
        places for calls. It says that it has reached the caller, because hivemind's own nodes give up otherwise. Nodes
        of this swarm learn in another way whether others reach them (`swarm.dht.dialback`).
        """
        async with self._admitted(context.remote_id, 1):
            self._meet(request.peer.node_id, context.remote_id)
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=self.clock(), available=True)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep the entries that hold; one that does not hold never affects another."""
        n = len(request.keys)
        same = n == len(request.subkeys) == len(request.values) == len(request.expiration_time)
        if n > self.limits.stores_max or not same:
            raise InvalidMessage("store request", "too many entries, or lists of different lengths")
        async with self._admitted(context.remote_id, max(1, n)):
            self._meet(request.peer.node_id, context.remote_id)
            response, at_once = dht_pb2.StoreResponse(peer=self.node_info), self.gate.limits.verify_slice
            for i in range(n):
                in_cache = i < len(request.in_cache) and request.in_cache[i]
                parts = request.keys[i], request.subkeys[i], request.values[i], request.expiration_time[i]
                response.store_ok.append(not in_cache and self._store_one(*parts))
                if i % at_once == at_once - 1:
                    await asyncio.sleep(0)
            return response

    async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
        """Answer with the records under the keys, or with a sample of them, and with the nodes nearest to them."""
        keys_max, keys = self.limits.keys_max, request.keys
        if len(keys) > keys_max or any(len(key) != DHTID.HASH_NBYTES for key in keys):
            raise InvalidMessage("find request", f"more than {keys_max} keys, or a key that is not a hash")
        looks = looks_of(request)
        async with self._admitted(context.remote_id, max(1, len(keys))):
            self._meet(request.peer.node_id, context.remote_id)
            response = FindResponse(peer=messages.NodeInfo(node_id=self.node_info.node_id))
            left, at_once = self.limits.answer_bytes_max, self.gate.limits.verify_slice
            held = [
                self.records.of_model(key) if look is not None and look.below else self.records.entries(key)
                for key, look in zip(keys, looks, strict=True)
            ]
            n_bytes = sum(price(entries, look) for entries, look in zip(held, looks, strict=True))
            _pay(self._answered, context.remote_id, min(n_bytes, left))
            for key, entries, look in zip(keys, held, looks, strict=True):
                result = self._find_one(key, entries, look, left, node_id_of(context.remote_id))
                left -= len(result.value) + len(result.packed)
                response.results.append(result)
                if look is not None and len(entries) > at_once:
                    await asyncio.sleep(0)
            return response

    @asynccontextmanager
    async def _admitted(self, peer: PeerID, cost: float) -> AsyncIterator[None]:
        _pay(self._rates, peer, cost)
        if self.client_mode:
            raise TooBusy("this node answers no calls; forget it")
        if self._handling >= self.limits.handled_max:
            raise TooBusy("this node is busy; try another")
        self._handling += 1
        try:
            yield
        finally:
            self._handling -= 1

    def _store_one(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> bool:
        try:
            return self.records.put(self.gate.admit(key, subkey, value, expiration))
        except RecordError:
            return False

    def _find_one(self, key: bytes, entries: Sequence[Entry], look: Look | None, bytes_max: int, exclude: DHTID) -> Any:  # noqa: ANN401 - a protobuf message
        result = messages.FindResult(type=dht_pb2.NOT_FOUND)
        if look is not None:
            result.held = len(entries)
            result.packed = chosen(entries, look._replace(size=min(look.size, bytes_max)))
        elif entries and len(value := pack_dictionary(entries)) <= bytes_max:
            result.type, result.value = dht_pb2.FOUND_DICTIONARY, value
            result.expiration_time = max(entry.facts.expires for entry in entries)
        table, place = self.routing_table, int.from_bytes(key)
        near = table.get_nearest_neighbors(DHTID.from_bytes(key), k=self.limits.named_max, exclude=exclude)
        if look is not None:
            named = news([(int(node_id), int(node_id) ^ place) for node_id, _ in near], look)
            result.nearest_peer_ids.extend(near[i][1].to_bytes() for i in named)
            return result
        for node_id, peer in near:
            result.nearest_node_ids.append(node_id.to_bytes())
            result.nearest_peer_ids.append(peer.to_bytes())
        return result

    def _meet(self, node_id: bytes, peer: PeerID, *, answered: bool = False) -> None:
        """Learn of a node that called us or answered; a client sends no id and is not learnt."""
        if not node_id or peer == self.p2p.peer_id:
            return
        known = node_id_of(peer)
        if bytes(node_id) == known.to_bytes():
            if self.whereabouts is not None and self.routing_table.get(peer_id=peer) is None:
                self.whereabouts.met()
            add = self.routing_table.add_answering if answered else self.routing_table.add_or_update_node
            add(known, peer)

    def _forget(self, peer: PeerID) -> None:
        node_id = self.routing_table.get(peer_id=peer)
        if node_id is not None:
            del self.routing_table[node_id]

    # --- we call others ----------------------------------------------------------------------------------------------

    async def ping(self, peer: PeerID) -> Pong | None:
        """Return the answering node's id and clock, or None."""
        asked = self.clock()
        response = await self._call(peer, "rpc_ping", dht_pb2.PingRequest(peer=self.node_info))
        if response is None or not math.isfinite(response.dht_time):
            return None
        skew_s = (asked + self.clock()) / 2 - response.dht_time
        return Pong(node_id_of(peer) if response.peer.node_id else None, skew_s)

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """hivemind's form of `ping`."""
        pong = await self.ping(peer)
        return pong.node_id if pong is not None else None

    async def store(self, peer: PeerID, entries: Sequence[Entry]) -> tuple[bool, ...] | None:
        """Ask a node to keep entries (at most `stores_max`). Returns which it accepted, or None without an answer."""
        request = dht_pb2.StoreRequest(
            keys=[entry.place.key for entry in entries],
            subkeys=[packed_text(entry.place.subkey) for entry in entries],
            values=[pack_value(entry.data) for entry in entries],
            expiration_time=[entry.facts.expires for entry in entries],
            in_cache=[False] * len(entries),
            peer=self.node_info,
        )
        response = await self._call(peer, "rpc_store", request)
        if response is None or len(response.store_ok) != len(entries):
            return None
        return tuple(response.store_ok)

    async def call_store(self, *_: object, **__: object) -> None:
        """hivemind's form of `store`; nothing of ours uses it, and it would send records of others."""
        raise NotImplementedError("use SwarmProtocol.store")

    async def find(self, peer: PeerID, asks: Sequence[Ask]) -> list[Found] | None:
        """Ask a node about keys (at most `keys_max`). Returns records that hold; None without a usable answer."""
        request = request_of(asks, self.node_info.node_id)
        response = await self._call(peer, "rpc_find", request, self.limits.find_timeout_s)
        if response is None or len(response.results) != len(asks):
            return None
        asked = (request.ByteSize() + response.peer.ByteSize()) // len(asks)
        results = zip(asks, response.results, strict=True)
        found = [await found_in(self.gate, key, result, asked) for (key, _), result in results]
        if self.whereabouts is not None:
            self.whereabouts.heard(peer.to_bytes(), (other for each in found for other in each.near))
        return found

    async def call_find(self, *_: object, **__: object) -> None:
        """hivemind's form of `find`."""
        raise NotImplementedError("use SwarmProtocol.find")

    async def _call(
        self,
        peer: PeerID,
        method: str,
        request: Any,  # noqa: ANN401 - protobuf messages
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Make one call and note whether the peer is alive. Returns None after any failure."""
        timeout_s = self.limits.timeout_s if timeout_s is None else timeout_s
        began = asyncio.get_running_loop().time()
        if self.whereabouts is not None and not await self.whereabouts.connect(peer.to_bytes(), timeout_s):
            self._forget(peer)
            return None
        timeout_s = max(timeout_s / 2, timeout_s - (asyncio.get_running_loop().time() - began))
        try:
            async with self.rpc_semaphore:
                response = await getattr(self.get_stub(peer), method)(request, timeout=timeout_s)
        except Exception:  # noqa: BLE001 - the peer or p2pd failed
            self._forget(peer)
            return None
        self._meet(response.peer.node_id, peer, answered=True)
        return response


def _pay(rates: RateLimit, peer: PeerID, cost: float) -> None:
    """Take the cost of a request from a peer's tokens. Raises TooBusy."""
    if not rates.take(peer.to_bytes().hex(), asyncio.get_running_loop().time(), cost):
        raise TooBusy("too many requests; slow down")


class DenyAll(RecordValidatorBase):  # type: ignore[misc]
    """For hivemind's own store and get, which nothing of ours uses: they take nothing and believe nothing."""

    def validate(self, record: DHTRecord) -> bool:
        """Refuse."""
        return False


def nodes_of(protocol: SwarmProtocol) -> list[bytes]:
    """Return the peer ids of a node's routing table."""
    return [peer.to_bytes() for peer in protocol.routing_table.peers()]


def node_id_of(peer: PeerID) -> DHTID:
    """Return the DHT id that belongs to a peer id."""
    return DHTID(position(peer.to_bytes()))
