"""The search for the nodes around a key, and for their records, among nodes of which some lie.

A node can name any neighbours, real or not, so (docs/adr/0008-a-search-among-liars.md):

- A search follows disjoint paths: each has candidates of its own, begins at a node picked at random, and asks no node
  that another path has asked. The names that a liar gives lead its own path astray, no other one.
- Only nodes that answered count as near. A made-up neighbour costs a call; the names that a node gives are ignored once
  too many of them did not answer.
- The radius of a search is measured elsewhere: `Surroundings` knows the part of the key space that has `expected` nodes
  on average, from random places, where liars cannot have settled beforehand. Liars that crowd around a key do not push
  the honest nodes out of that part; they only make the search take longer, up to `asked_max`.

Neither hivemind nor libp2p: nodes and light readers share it. A node is named by its peer id, in bytes.
"""

import asyncio
import hashlib
import heapq
import random
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.dht.format import CALLS
from swarm.dht.records import RECORD
from swarm.dht.sampling import SAMPLING, Ask, Found, Look, tail
from swarm.dht.validator import Entry, OnEntries
from swarm.limits import limit

EVERYWHERE = 1 << 160  # the largest distance between two places: SHA-1 has 160 bits

Call = Callable[[bytes, Sequence[Ask]], Awaitable[Sequence[Found] | None]]
"""`call(peer, asks)`: ask one node about at most `keys_max` keys. An answer for each, or None; it raises nothing."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How wide and how long a search looks."""

    paths: int = limit(4, "paths", "disjoint: a liar leads only its own path astray")
    doors: int = limit(8, "nodes", "where they begin, two a path; with one liar in five, all lie once in 400,000")
    expected: int = limit(2 * CALLS.replicas, "nodes", "lie within the radius on average")
    crowd: int = limit(4 * CALLS.replicas, "nodes", "more within the radius are no accident (one key in 500)")
    asked_max: int = limit(CALLS.named_max, "nodes", "whose answers about one key count; then the search ends")
    blamed_max: int = limit(3, "neighbours", "of one node without an answer, beyond those with one; then it is ignored")
    calls_max: int = limit(4 * CALLS.named_max, "calls", "for one key, answered or not; then the search ends")
    found_max: int = limit(CALLS.named_max * RECORD.held_per_key, "records", "kept for one key: all that can be found")
    slow_s: float = limit(0.5, "s", "then the next node is asked as well")
    stragglers_s: float = limit(1.0, "s", "that the last nodes get when enough have answered")
    under_way_max: int = limit(4, "calls", "of one path at one time")
    samples: int = limit(5, "places", "that Surroundings remembers; the widest counts")


def position(peer: bytes) -> int:
    """Return a node's place in the key space: others could choose an id, and cannot choose a hash."""
    return int.from_bytes(hashlib.sha1(peer, usedforsecurity=False).digest())


@dataclass(slots=True)
class Result:
    """The records and nodes around one key. nodes: those that answered, nearest first.

    held: by node, the records that it says it has. more: the nodes that have more than they have sent. moved: bytes of
    the calls that were answered.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    holders: Counter[str] = field(default_factory=Counter)
    nodes: list[bytes] = field(default_factory=list)
    held: dict[bytes, int] = field(default_factory=dict)
    more: list[bytes] = field(default_factory=list)
    moved: int = 0
    limits: SearchLimits = SearchLimits()

    def heard(self, peer: bytes, found: Found) -> None:
        """Take in one node's answer to a search."""
        self.nodes.append(peer)
        self.moved += found.size
        if found.held:
            self.held[peer] = found.held
        if found.held > len(found.entries):
            self.more.append(peer)
        self.add(found.entries)

    def add(self, entries: Iterable[Entry]) -> None:
        """Merge one node's records: the newest in each place wins; the holders of each place are counted."""
        for entry in entries:
            subkey = entry.place.subkey
            held = self.entries.get(subkey)
            if held is None and len(self.entries) >= self.limits.found_max:
                continue
            if held is None or held.place.rank < entry.place.rank:
                self.entries[subkey] = entry
            self.holders[subkey] += 1

    def ordered(self) -> tuple[Entry, ...]:
        """Return the records, those first that most nodes hold: those that only liars hold come last."""
        return tuple(self.entries[subkey] for subkey, _ in self.holders.most_common())


class Surroundings:
    """The distance between neighbours, as seen from random places. The widest of the latest samples counts."""

    def __init__(self, limits: SearchLimits = SearchLimits()) -> None:
        self._expected = limits.expected
        self._samples: deque[int] = deque(maxlen=limits.samples)

    @property
    def radius(self) -> int:
        """The distance within which `expected` nodes lie on average; everywhere while unknown."""
        return max(self._samples, default=EVERYWHERE)

    def learn(self, place: int, nodes: Sequence[bytes]) -> None:
        """Take in a search for a random place: `nodes` answered, nearest first."""
        enough = len(nodes) >= self._expected
        self._samples.append(position(nodes[self._expected - 1]) ^ place if enough else EVERYWHERE)


class Searcher:
    """Makes searches through `call`. Several keys are asked for in one call where they have a node in common."""

    def __init__(self, call: Call, random_source: random.Random, limits: SearchLimits = SearchLimits()) -> None:
        self.surroundings = Surroundings(limits)
        self._call, self.source, self._limits = call, random_source, limits
        self.large: dict[bytes, float] = {}  # models that had more servers than one key, by their first key: until when
        self._waiting: dict[bytes, dict[Ask, list[asyncio.Future[Found | None]]]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def search(
        self,
        keys: Iterable[bytes],
        known: Iterable[bytes],
        radius: int | None = None,
        on_entries: OnEntries = lambda entries: None,
        salt: bytes | None = None,
    ) -> dict[bytes, Result]:
        """Search for keys (20 bytes), beginning with the nodes that we know. radius: else the surroundings' own.

        on_entries: takes each node's records as they come. salt: of a sample. Then a node that has more than a few
        records sends none, and says how many it has.
        """
        radius = self.surroundings.radius if radius is None else radius
        nodes = sorted(set(known))
        places = {peer: position(peer) for peer in nodes}
        blame: Counter[bytes] = Counter()
        searches = [
            _Search(key, radius, self.ask, blame, on_entries, salt, self._limits) for key in dict.fromkeys(keys)
        ]
        for search in searches:
            search.begin(places, self.source.sample(nodes, min(self._limits.doors, len(nodes))))
        async with asyncio.TaskGroup() as group:
            for search in searches:
                group.create_task(search.run())
        return {search.key: search.result for search in searches}

    async def explore(self, known: Iterable[bytes], places: int, own: bytes | None = None) -> None:
        """Measure distances between nodes at random places, and find the neighbours of `own`, our place, if given."""
        targets = {self.source.randbytes(20): True for _ in range(places)}
        wanted = targets if own is None else targets | {own: False}
        for key, result in (await self.search(wanted, known, radius=0)).items():
            if wanted[key] and result.nodes:
                self.surroundings.learn(int.from_bytes(key), result.nodes)

    def keepers(self, result: Result, key: bytes) -> tuple[bytes, ...]:
        """Return the nodes that are to keep records of a key: all within the radius, and CALLS.replicas at least."""
        place, radius = int.from_bytes(key), self.surroundings.radius
        within = sum(position(peer) ^ place <= radius for peer in result.nodes)
        return tuple(result.nodes[: min(self._limits.asked_max, max(CALLS.replicas, within))])

    async def close(self) -> None:
        """End the calls that are still under way."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    # --- calls: searches that ask one node in the same turn of the loop share a call ---------------------------------

    async def ask(self, peer: bytes, key: bytes, look: Look | None) -> Found | None:
        """Ask one node about one key. None without a usable answer."""
        answer: asyncio.Future[Found | None] = asyncio.get_running_loop().create_future()
        if peer not in self._waiting:
            self._waiting[peer] = {}
            asyncio.get_running_loop().call_soon(self._flush, peer)
        self._waiting[peer].setdefault((key, look), []).append(answer)
        return await answer

    def _flush(self, peer: bytes) -> None:
        waiting = self._waiting.pop(peer)
        asks = list(waiting)
        for first in range(0, len(asks), CALLS.keys_max):
            part = {ask: waiting[ask] for ask in asks[first : first + CALLS.keys_max]}
            call = asyncio.create_task(self._call_for(peer, part))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call_for(self, peer: bytes, waiting: dict[Ask, list[asyncio.Future[Found | None]]]) -> None:
        """Make one call. A search that does not wait any more leaves it to end by itself."""
        found: Sequence[Found] | None = None
        try:
            found = await self._call(peer, tuple(waiting))
        finally:
            for i, answers in enumerate(waiting.values()):
                for answer in answers:
                    if not answer.done():
                        answer.set_result(found[i] if found else None)


@dataclass(slots=True)
class _Path:
    """One path's candidates: (distance, peer, the peer that named it), nearest first."""

    doors: list[bytes] = field(default_factory=list)
    candidates: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)


class _Search:
    """The search for one key."""

    def __init__(
        self,
        key: bytes,
        radius: int,
        ask: Callable[[bytes, bytes, Look | None], Awaitable[Found | None]],
        blame: Counter[bytes],
        on_entries: OnEntries,
        salt: bytes | None,
        limits: SearchLimits,
    ) -> None:
        self.key = key
        self.result = Result(limits=limits)
        self._limits = limits
        self._place, self._radius = int.from_bytes(key), radius
        self._ask, self._blame, self._on_entries, self._salt = ask, blame, on_entries, salt
        self._paths = [_Path() for _ in range(limits.paths)]
        self._asked: set[bytes] = set()
        self._answered: list[int] = []  # distances, in order

    def begin(self, places: Mapping[bytes, int], doors: Sequence[bytes]) -> None:
        """Deal the nodes that we know to the paths. `doors`: nodes that are asked first, wherever they are."""
        nearest = heapq.nsmallest(CALLS.named_max, places, key=lambda peer: places[peer] ^ self._place)
        for i, peer in enumerate(nearest):
            self._offer(self._paths[i % len(self._paths)], peer, b"")
        for i, door in enumerate(doors):
            self._paths[i % len(self._paths)].doors.append(door)

    async def run(self) -> None:
        """Walk all paths to their ends."""
        async with asyncio.TaskGroup() as group:
            for path in self._paths:
                group.create_task(self._walk(path))
        self.result.nodes.sort(key=lambda peer: position(peer) ^ self._place)

    async def _walk(self, path: _Path) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                step = self._next(path) if len(under_way) < self._limits.under_way_max else None
                if step is not None:
                    under_way.add(asyncio.create_task(self._visit(path, *step)))
                if not under_way:
                    return
                done, under_way = await asyncio.wait(
                    under_way, timeout=self._patience_s(path, step is not None), return_when=asyncio.FIRST_COMPLETED
                )
                for visit in done:
                    visit.result()
                if step is None and not done:
                    return  # the others are stragglers
        finally:
            for visit in under_way:
                visit.cancel()
            if under_way:
                await asyncio.wait(under_way)

    def _patience_s(self, path: _Path, more: bool) -> float | None:
        if more:
            return 0.0 if path.doors else self._limits.slow_s
        return self._limits.stragglers_s if len(self._answered) >= CALLS.replicas else None

    def _next(self, path: _Path) -> tuple[bytes, bytes] | None:
        """Claim the node that this path asks next; returns it and the node that named it, None at the path's end."""
        while path.doors:
            door = path.doors.pop()
            if door not in self._asked:
                self._asked.add(door)
                return door, b""
        while path.candidates and len(self._asked) < self._limits.calls_max:
            distance, peer, namer = path.candidates[0]
            if self._is_enough(distance):
                return None
            heapq.heappop(path.candidates)
            if peer not in self._asked and self._blame[namer] < self._limits.blamed_max:
                self._asked.add(peer)
                return peer, namer
        return None

    def _is_enough(self, distance: int) -> bool:
        """Whether a node at this distance need not be asked any more."""
        nearer = bisect_left(self._answered, distance)
        if distance <= self._radius:
            return nearer >= self._limits.asked_max
        within = bisect_left(self._answered, self._radius)
        return nearer - (within if within > self._limits.crowd else 0) >= self._limits.expected

    async def _visit(self, path: _Path, peer: bytes, namer: bytes) -> None:
        found = await self._ask(peer, self.key, self._look(path))
        if namer:
            self._blame[namer] += 1 if found is None else -1
        if found is None:
            return
        insort(self._answered, position(peer) ^ self._place)
        self.result.heard(peer, found)
        self._on_entries(found.entries)
        for other in found.near[: CALLS.named_max]:
            self._offer(path, other, peer)

    def _look(self, path: _Path) -> Look | None:
        """Return what a node on this path is asked: in a sample, only for nodes that the path has not heard of.

        Other paths' nodes are no secret, but a path that relied on them would rely on the liars there, too.
        """
        if self._salt is None:
            return None
        known = heapq.nsmallest(SAMPLING.seen_max, ((position(peer) ^ self._place, peer) for peer in path.known))
        seen = b"".join(tail(position(peer)) for _, peer in known)
        size, within = SAMPLING.first_bytes, self._radius.bit_length()
        return Look(self._salt, size=size, whole=True, named=SAMPLING.named, within=within, seen=seen)

    def _offer(self, path: _Path, peer: bytes, namer: bytes) -> None:
        if peer not in path.known and peer not in self._asked:
            path.known.add(peer)
            heapq.heappush(path.candidates, (position(peer) ^ self._place, peer, namer))
