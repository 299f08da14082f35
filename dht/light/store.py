"""A RecordStore that only reads: the search of `swarm.dht.search` over a light host.

Rules are those of `swarm.dht.protocol`: at most 4 keys in a call, node ids are hashes of peer ids, records are admitted
one by one, and an answer with several forged ones is not read to its end. Nodes ask no more of one peer than the peer
gives to one asker.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from google.protobuf.message import DecodeError

from swarm.access import EVERYBODY, Access
from swarm.dht.arrival import Arrival, Greeting
from swarm.dht.asking import found_in, request_of
from swarm.dht.fetch import Reading
from swarm.dht.format import CALLS, peers_named
from swarm.dht.light.limits import ReaderLimits
from swarm.dht.messages import FindResponse, PingRequest, PingResponse
from swarm.dht.rates import RateLimit
from swarm.dht.records import check_clock, key_id
from swarm.dht.sampling import Ask, Found, Sample
from swarm.dht.search import Result, Searcher
from swarm.dht.validator import Clock, Entry, GateLimits, OnEntries, RecordGate
from swarm.errors import SwarmError, Unreachable
from swarm.net.reach import is_public

if TYPE_CHECKING:
    from swarm.dht.light.host import LightHost  # py-libp2p: only where it runs

Value = TypeVar("Value")
_log = structlog.get_logger("swarm.light")


@asynccontextmanager
async def open_light(
    network: str, initial_peers: Sequence[str], clock: Clock, access: Access = EVERYBODY
) -> "AsyncIterator[LightStore]":
    """Join as a reader while the block runs. Raises Unreachable, ClockSkew, BadConfiguration."""
    from swarm.dht.light.host import open_host  # noqa: PLC0415 - see above

    public = access.network_key is None and await is_public(tuple(initial_peers))
    async with open_host(public=public) as host:
        store = LightStore(host, network, initial_peers, clock, access)
        try:
            await store.join()
            with suppress(TimeoutError):  # the first look-up goes on with it
                async with asyncio.timeout(store.limits.explore_timeout_s):
                    await store.explore()
            yield store
        finally:
            await store.close()


class LightStore:
    """Reads the DHT. Lives in the asyncio loop."""

    def __init__(
        self,
        host: "LightHost",
        network: str,
        initial_peers: Sequence[str],
        clock: Clock,
        access: Access = EVERYBODY,
        limits: ReaderLimits = ReaderLimits(),  # noqa: B008 - frozen
    ) -> None:
        # Checked in shorter slices than elsewhere: a web server shares this loop.
        self.gate = RecordGate(network, clock, access, GateLimits(verify_slice=8))
        self._host, self._clock = host, clock
        self.limits = limits
        self._initial = tuple(initial_peers)[: limits.initial_peers_max]
        self._nodes: dict[bytes, None] = {}  # that have answered, in the order of their last answer
        self._namers: dict[bytes, bytes] = {}  # peer -> the node that named it, and so knows its addresses
        self._searcher = Searcher(self.find, random.Random())  # noqa: S311 - spreads load, keeps no secret
        self._rates = RateLimit(CALLS.per_s * limits.pace, CALLS.burst * limits.pace)
        self._verifying = asyncio.Lock()
        self._explored = False
        self._arrival = Arrival()

    @property
    def alive(self) -> bool:
        """Whether the host below still runs; if not, open another store."""
        return self._host.alive

    async def join(self) -> None:
        """Connect to the initial peers and compare clocks. Raises Unreachable, ClockSkew, BadConfiguration."""
        answers = await self._arrival.greetings(map(self._greet, self._initial))
        skews = [answer for answer in answers if isinstance(answer, float)]
        if not skews:
            reasons = sorted({str(answer.why) for answer in answers if isinstance(answer, Unreachable)})
            raise Unreachable("the swarm", self._initial, self.limits.connect_timeout_s, "; ".join(reasons)[:300])
        check_clock(skews)

    async def explore(self) -> None:
        """Measure how far nodes lie from each other, once: searches need that."""
        if not self._explored:
            await self._searcher.explore(self._nodes, self.limits.places)
            self._explored = True

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Refuse: a reader announces nothing."""
        raise NotImplementedError("a light store only reads")

    async def get(
        self, keys: Sequence[str], on_entries: OnEntries | None = None, sample: Sample | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Search the DHT. Returns the newest living records under each key. Raises Unreachable."""
        if not self._nodes:
            await self.join()
        try:
            async with asyncio.timeout(self.limits.get_timeout_s):
                await self.explore()
                found = await self._read(keys, on_entries or (lambda entries: None), sample)
        except TimeoutError:
            after_s = self.limits.get_timeout_s
            raise Unreachable("the swarm (looking up records)", self._initial, after_s) from None
        if keys and not any(result.nodes for result in found.values()):
            self._nodes = {}  # begin again with the initial peers
            raise Unreachable("the swarm (looking up records)", self._initial, 0.0, "no node answers")
        return {key: tuple(entry.data for entry in result.ordered()) for key, result in found.items()}

    async def _read(self, keys: Sequence[str], on_entries: OnEntries, sample: Sample | None) -> dict[str, Result]:
        async def search(places: Sequence[bytes], salt: bytes | None) -> dict[bytes, Result]:
            return await self._searcher.search(places, self._nodes, on_entries=on_entries, salt=salt)

        if sample is None:
            found = await search([key_id(key) for key in keys], None)
            return {key: found[key_id(key)] for key in keys}
        (key,) = keys
        reading = Reading(self._searcher, search, lambda: list(self._nodes), on_entries, CALLS.keys_max)
        return await reading.read(key, sample)

    async def close(self) -> None:
        """End the calls that are still under way."""
        await self._searcher.close()
        await self._arrival.close()

    # --- the search --------------------------------------------------------------------------------------------------

    async def find(self, peer: bytes, asks: Sequence[Ask]) -> list[Found] | None:
        """Ask one node; remember the nodes that it names, and forget it if it does not answer."""
        try:
            data = request_of(asks).SerializeToString()
            answer = await self._call(peer, "find", data, FindResponse, len(asks), self._namers.get(peer))
        except SwarmError as error:
            self._nodes.pop(peer, None)
            _log.debug("a node does not answer", why=str(error)[:200])
            return None
        self._remember(self._nodes, peer, None)
        if len(answer.results) != len(asks):
            return None
        found: list[Found] = []
        for (key, _), result in zip(asks, answer.results, strict=True):
            for other in peers_named(result.nearest_peer_ids):
                self._remember(self._namers, other, peer)
            async with self._verifying:  # many answers at once must not each take a slice of one turn of the loop
                found.append(await found_in(self.gate, key, result, len(data) // len(asks)))
        return found

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _greet(self, multiaddr: str) -> Greeting:
        """Return our clock's skew (seconds) against one initial peer, or why it cannot be reached."""
        try:
            peer = await self._host.connect(multiaddr, self.limits.connect_timeout_s)
            asked = self._clock()
            pong = await self._call(peer, "ping", PingRequest().SerializeToString(), PingResponse, 1, None)
        except Unreachable as error:
            return error
        if not math.isfinite(pong.dht_time):
            return Unreachable("a peer", (multiaddr,), 0.0, "its clock is no number")
        self._remember(self._nodes, peer, None)
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
        raw = await self._host.call(peer, f"DHTProtocol.rpc_{method}", data, CALLS.timeout_s, via)
        try:
            return kind.FromString(raw)
        except DecodeError:
            raise Unreachable("a node", (), 0.0, "its answer is malformed") from None

    async def _turn(self, peer: bytes, cost: int) -> None:
        while not self._rates.take(peer.hex(), asyncio.get_running_loop().time(), cost):  # noqa: ASYNC110 - time alone refills it
            await asyncio.sleep(self.limits.pace_s)

    def _remember(self, into: "dict[bytes, Value]", peer: bytes, value: "Value") -> None:
        into.pop(peer, None)
        into[peer] = value
        if len(into) > self.limits.nodes_max:
            del into[next(iter(into))]
