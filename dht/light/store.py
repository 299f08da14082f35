"""A RecordStore that only reads: Kademlia's search over a light host, and the gate in front of what is found.

Rules are those of `swarm.dht.protocol`: at most 4 keys in a call, node ids are hashes of peer ids, records are admitted
one by one, and an answer with several forged ones is not read to its end. Nodes ask no more of one peer than the peer
gives to one asker.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from google.protobuf.message import DecodeError

from swarm.access import EVERYBODY, Access
from swarm.dht.format import (
    BURST,
    CALL_TIMEOUT_S,
    KEYS_MAX,
    NEIGHBOURS_MAX,
    RATE,
    REPLICAS,
    believe,
    merge,
)
from swarm.dht.light.messages import FOUND_DICTIONARY, FindRequest, FindResponse, PingRequest, PingResponse
from swarm.dht.limits import RateLimit, TooBusy
from swarm.dht.records import check_clock, key_id
from swarm.dht.validator import Clock, Entry, RecordGate
from swarm.errors import SwarmError, Unreachable

if TYPE_CHECKING:
    from swarm.dht.light.host import LightHost  # py-libp2p: only where it runs

CONNECT_TIMEOUT_S = 7.0
GET_TIMEOUT_S = 20.0
BEAM = 2 * REPLICAS  # nodes that are asked for one key
VERIFY_SLICE = 8  # records checked without a pause: about 2 ms; a web server shares this loop
NODES_MAX = 1024  # remembered between searches
INITIAL_PEERS_MAX = 32
PACE = 0.9  # of what a node grants to one asker
PACE_S = 0.1  # how often a call that waits for its turn looks again

_log = structlog.get_logger("swarm.light")


@asynccontextmanager
async def open_light(
    network: str, initial_peers: Sequence[str], clock: Clock, access: Access = EVERYBODY
) -> "AsyncIterator[LightStore]":
    """Join as a reader while the block runs. Raises Unreachable, ClockSkew, BadConfiguration."""
    from swarm.dht.light.host import open_host  # noqa: PLC0415 - see above

    async with open_host() as host:
        store = LightStore(host, network, initial_peers, clock, access)
        await store.join()
        yield store


@dataclass(slots=True)
class _Search:
    """One search: what it has found, whom it may ask and whom it has asked, per key."""

    keys: dict[bytes, str]  # key id -> key
    found: dict[bytes, dict[str, Entry]] = field(default_factory=dict)
    asked: dict[bytes, set[bytes]] = field(default_factory=dict)
    known: dict[bytes, bytes | None] = field(default_factory=dict)  # peer -> who named it
    failed: set[bytes] = field(default_factory=set)
    answers: int = 0


class LightStore:
    """Reads the DHT. Lives in the asyncio loop."""

    def __init__(
        self, host: "LightHost", network: str, initial_peers: Sequence[str], clock: Clock, access: Access = EVERYBODY
    ) -> None:
        self.gate = RecordGate(network, clock, access)
        self._host, self._clock = host, clock
        self._initial = tuple(initial_peers)[:INITIAL_PEERS_MAX]
        self._nodes: dict[bytes, bytes | None] = {}
        self._rates = RateLimit(RATE * PACE, BURST * PACE)
        self._verifying = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the host below still runs; if not, open another store."""
        return self._host.alive

    async def join(self) -> None:
        """Connect to the initial peers and compare clocks. Raises Unreachable, ClockSkew, BadConfiguration."""
        answers = await asyncio.gather(*map(self._greet, self._initial))
        skews = [answer for answer in answers if isinstance(answer, float)]
        if not skews:
            reasons = sorted({str(answer.why) for answer in answers if isinstance(answer, Unreachable)})
            raise Unreachable("the swarm", self._initial, CONNECT_TIMEOUT_S, "; ".join(reasons)[:300])
        check_clock(skews)

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Refuse: a reader announces nothing."""
        raise NotImplementedError("a light store only reads")

    async def get(self, keys: Sequence[str]) -> dict[str, tuple[bytes, ...]]:
        """Search the DHT. Returns the newest living records under each key. Raises Unreachable."""
        search = _Search({key_id(key): key for key in keys}, known=dict(self._nodes))
        search.found = {key: {} for key in search.keys}
        search.asked = {key: set() for key in search.keys}
        if not search.known:
            await self.join()
            search.known = dict(self._nodes)
        try:
            async with asyncio.timeout(GET_TIMEOUT_S):
                while questions := self._questions(search):
                    await asyncio.gather(*(self._ask(search, peer, asked) for peer, asked in questions))
        except TimeoutError:
            raise Unreachable("the swarm (looking up records)", self._initial, GET_TIMEOUT_S) from None
        self._remember(search)
        if keys and not search.answers:
            raise Unreachable("the swarm (looking up records)", self._initial, 0.0, "no node answers")
        return {key: tuple(e.data for e in search.found[node].values()) for node, key in search.keys.items()}

    # --- the search --------------------------------------------------------------------------------------------------

    def _questions(self, search: _Search) -> list[tuple[bytes, list[bytes]]]:
        """Say whom to ask for what next: every key's nearest nodes that were not asked for it yet."""
        ids = {peer: _position(peer) for peer in search.known if peer not in search.failed}
        wanted: dict[bytes, list[bytes]] = {}
        for key in search.keys:
            place = int.from_bytes(key)
            nearest = sorted(ids, key=lambda peer: ids[peer] ^ place)[:BEAM]
            for peer in nearest:
                if peer not in search.asked[key]:
                    search.asked[key].add(peer)
                    wanted.setdefault(peer, []).append(key)
        return [
            (peer, keys[first : first + KEYS_MAX])
            for peer, keys in wanted.items()
            for first in range(0, len(keys), KEYS_MAX)
        ]

    async def _ask(self, search: _Search, peer: bytes, keys: list[bytes]) -> None:
        if peer in search.failed:
            return
        try:
            data = FindRequest(keys=keys).SerializeToString()
            answer = await self._call(peer, "find", data, FindResponse, len(keys), search.known[peer])
        except SwarmError as error:
            search.failed.add(peer)
            _log.debug("a node does not answer", why=str(error)[:200])
            return
        search.answers += 1
        for key, result in zip(keys, answer.results, strict=False):
            if result.type == FOUND_DICTIONARY:
                merge(search.found[key], await self._believed(key, result.value))
            for near in list(result.nearest_peer_ids)[:NEIGHBOURS_MAX]:
                if len(near) <= 64 and len(search.known) < NODES_MAX:
                    search.known.setdefault(bytes(near), peer)

    async def _believed(self, key: bytes, value: bytes) -> list[Entry]:
        async with self._verifying:  # many answers at once must not each take a slice of one turn of the loop
            return await believe(self.gate, key, value, VERIFY_SLICE)

    def _remember(self, search: _Search) -> None:
        """Keep who answered, and who was only named while there is room; the next search begins there."""
        if not search.answers:
            self._nodes = {}  # begin again with the initial peers
            return
        asked = set().union(*search.asked.values()) - search.failed
        self._nodes = {peer: via for peer, via in search.known.items() if peer in asked}

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _greet(self, multiaddr: str) -> "float | Unreachable":
        """Return our clock's skew (seconds) against one initial peer, or why it cannot be reached."""
        try:
            peer = await self._host.connect(multiaddr, CONNECT_TIMEOUT_S)
            asked = self._clock()
            pong = await self._call(peer, "ping", PingRequest().SerializeToString(), PingResponse, 1, None)
        except Unreachable as error:
            return error
        if not math.isfinite(pong.dht_time):
            return Unreachable("a peer", (multiaddr,), 0.0, "its clock is no number")
        self._nodes[peer] = None
        return (asked + self._clock()) / 2 - float(pong.dht_time)

    async def _call(
        self,
        peer: bytes,
        method: str,
        data: bytes,
        kind: Any,  # noqa: ANN401 - a protobuf class
        cost: int,
        via: bytes | None,
    ) -> Any:  # noqa: ANN401 - a message of that class
        """Call a node when it is our turn. Raises Unreachable."""
        await self._turn(peer, cost)
        raw = await self._host.call(peer, f"DHTProtocol.rpc_{method}", data, CALL_TIMEOUT_S, via)
        try:
            return kind.FromString(raw)
        except DecodeError:
            raise Unreachable("a node", (), 0.0, "its answer is malformed") from None

    async def _turn(self, peer: bytes, cost: int) -> None:
        while True:
            try:
                return self._rates.take(peer.hex(), asyncio.get_running_loop().time(), cost)
            except TooBusy:
                await asyncio.sleep(PACE_S)


def _position(peer: bytes) -> int:
    """Return a node's place in the key space: others could choose an id, and cannot choose a hash."""
    return int.from_bytes(hashlib.sha1(peer, usedforsecurity=False).digest())
