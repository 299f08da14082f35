"""Reads a sample of a model's records.

Few servers have their records under the model's first key alone. Then the nodes around it share in the work: each of
five sends another fifth of the sample, so that a record travels about once, and a node that lies hides a fifth. Further
nodes send the same parts again until the bytes are used up. So a key with few records is read from all nodes that have
it.

The records of many servers are spread over most nodes of the network. So a reader needs no search for them: it asks
nodes that it knows, wherever they are, for their records of the model. Neighbours have the same records: the reader
asks each of them for another slice. So look-ups spread over all nodes.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.dht.format import CALLS
from swarm.dht.records import RECORD, key_id
from swarm.dht.sampling import SAMPLING, Found, Look, Sample, children, is_full, missing
from swarm.dht.search import EVERYWHERE, Result, Searcher, position
from swarm.dht.validator import OnEntries

Searching = Callable[[Sequence[bytes], bytes], Awaitable[Mapping[bytes, Result]]]
"""`search(places, salt)`: a search for a sample."""
Asking = Callable[[bytes, bytes, Look], Awaitable[Found | None]]
_ANSWER_MAX = CALLS.answer_bytes_max // CALLS.keys_max


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader's way to samples. known: the nodes that it knows. at_once: keys in one search."""

    searcher: Searcher
    search: Searching
    known: Callable[[], Sequence[bytes]]
    on_entries: OnEntries
    at_once: int

    async def read(self, key: str, sample: Sample) -> dict[str, Result]:
        """Read a sample of a model. key: the model's first. Returns what was found, by key."""
        return await self._everybody(key, sample) if sample.everybody else {key: await self._for_plan(key, sample)}

    async def _for_plan(self, key: str, sample: Sample) -> Result:
        """Search the model's first key, unless the model is known to be large; then fetch records."""
        place, now = key_id(key), asyncio.get_running_loop().time()
        large, result = self.searcher.large, Result()
        search = large.pop(place, 0.0) <= now
        if search:
            result = (await self.search((place,), sample.salt))[place]
            if not is_full(_claims(result)):
                left = sample.bytes_max - result.moved
                fetching = _Fetch(place, result, sample.salt, left, self.on_entries)
                await fetching.run(self.searcher.ask, self.searcher.source)
                return result
        gathering = _Gathering(place, result, sample, self.searcher, self.on_entries)
        await gathering.run(self.known())
        if len(result.entries) > SAMPLING.full_share * RECORD.held_per_key:
            large[place] = now + SAMPLING.large_s
            while len(large) > SAMPLING.larges_max:
                del large[next(iter(large))]
        elif not search:  # the model is not large any more, or the nodes that this reader knows are gone
            return await self._for_plan(key, sample)
        return result

    async def _everybody(self, key: str, sample: Sample) -> dict[str, Result]:
        """Search a model's keys, each below a full one, and fetch what the nodes around them have."""
        results: dict[str, Result] = {}
        level = [key]
        while level:
            for first in range(0, len(level), self.at_once):
                part = {name: key_id(name) for name in level[first : first + self.at_once]}
                found = await self.search(tuple(part.values()), sample.salt)
                results |= {name: found[place] for name, place in part.items()}
            deeper = [below for name in level if is_full(_claims(results[name])) for below in children(name)]
            self.searcher.source.shuffle(deeper)  # where not all can be read, each has its turn
            level = deeper[: max(0, SAMPLING.everybody_keys_max - len(results))]
        hungry = {key: result for key, result in results.items() if result.more}
        async with asyncio.TaskGroup() as group:
            for name, result in hungry.items():
                share = sample.bytes_max // len(hungry)
                fetching = _Fetch(key_id(name), result, sample.salt, share, self.on_entries)
                group.create_task(fetching.run(self.searcher.ask, self.searcher.source))
        return results


def _claims(result: Result) -> list[int]:
    """Return how many records the nodes nearest to a key say that they hold. Five at least are there to hold them."""
    return [result.held.get(peer, 0) for peer in result.nodes[: SAMPLING.asked_if_full]]


@dataclass(slots=True)
class _Fetch:
    """The reading of one key's records from the nodes around it. share: bytes of the calls."""

    key: bytes
    result: Result
    salt: bytes
    share: int
    on_entries: OnEntries
    taken: int = 0  # bytes that came
    new: float = 0.0  # the part of them that was for records which had not come before

    async def run(self, ask: Asking, source: random.Random) -> None:
        """Ask the nearest nodes, which hold all records, and then others, until the share or the sample is used up."""
        more = set(self.result.more)
        nodes = [peer for peer in self.result.nodes if peer in more]
        slices = min(SAMPLING.slices, len(nodes))
        nearest, others = nodes[:slices], nodes[slices:]
        for each in (nearest, others):
            source.shuffle(each)
        nodes = nearest + others
        wanted = SAMPLING.distinct * self.share
        size = min(_ANSWER_MAX, int(wanted / max(1, slices)))
        for first in range(0, len(nodes), max(1, slices)):
            if self.taken + size > self.share or self.new >= 0.9 * wanted:
                return
            looks = [Look(self.salt, part, slices, size) for part in range(slices)]
            wave = zip(nodes[first : first + slices], looks, strict=False)
            for found in await asyncio.gather(*(ask(peer, self.key, look) for peer, look in wave)):
                if found is not None:
                    self._take(found)

    def _take(self, found: Found) -> None:
        before = len(self.result.entries)
        self.result.add(found.entries)
        self.on_entries(found.entries)
        self.taken += found.size
        self.new += found.size * (len(self.result.entries) - before) / max(1, len(found.entries))


@dataclass(slots=True)
class _Gathering:
    """The reading of a large model's records from nodes anywhere. place: of the model's first key.

    offered: bytes that the answers could have had; they had `sent`. pending: the same, of answers that are to come.
    """

    place: bytes
    result: Result
    sample: Sample
    searcher: Searcher
    on_entries: OnEntries
    offered: int = 1
    sent: int = 1
    pending: int = 0
    slices: "Slices" = field(init=False)

    async def run(self, known: Sequence[bytes]) -> None:
        """Ask nodes until the bytes are used up, each for a few slices; at last for blocks that are still missing."""
        around = [peer for peer in self.result.nodes if peer in self.result.held]
        others = sorted(set(known) - set(around))
        self.searcher.source.shuffle(others)
        nodes = [*around, *others]
        self.slices = Slices(nodes[: SAMPLING.nodes_max], self.searcher.surroundings.radius)
        most = int(self.sample.bytes_max * (1 - SAMPLING.missing_share))
        for _ in range(SAMPLING.rounds_max):
            await self._round(self.slices.next(), most)
        if blocks := missing(self.result.entries.values(), self.sample.n_blocks):
            further = [*nodes[SAMPLING.nodes_max :], *nodes][: SAMPLING.nodes_max]
            await self._round([(peer, 0, 1) for peer in further], self.sample.bytes_max, blocks)

    async def _round(self, asks: Sequence[tuple[bytes, int, int]], most: int, blocks: bytes = b"") -> None:
        """Ask nodes, a few at a time, each for a slice (part of parts). most: bytes that may have moved then."""
        left = list(asks)
        self.searcher.source.shuffle(left)

        async def some() -> None:
            while left:
                share = self.sent / self.offered  # of what the others could have sent
                size = int((most - self.result.moved - self.pending) / max(1.0, len(left) * share))
                if size < SAMPLING.least_bytes:
                    return
                peer, part, parts = left.pop()
                look = Look(self.sample.salt, part, parts, min(size, _ANSWER_MAX), below=True, blocks=blocks)
                await self._ask(peer, look)

        async with asyncio.TaskGroup() as group:
            for _ in range(SAMPLING.nodes_at_once):
                group.create_task(some())

    async def _ask(self, peer: bytes, look: Look) -> None:
        self.pending += look.size
        found = await self.searcher.ask(peer, self.place, look)
        self.pending -= look.size
        if found is None:
            return
        self.result.moved += found.size
        self.offered += look.size
        self.sent += min(found.size, look.size)
        self.result.nodes.append(peer)
        self.result.add(found.entries)
        self.on_entries(found.entries)
        if found.entries and not look.blocks:
            self.slices.came(peer, look.part)


class Slices:
    """Which slice each node is asked for: one that nodes near it, which keep the same records, have not sent.

    A slice is one of so many parts as there are nodes so near, or about: a power of two, so that nodes with more and
    with fewer neighbours cut alike. Pure.
    """

    def __init__(self, nodes: Sequence[bytes], radius: int) -> None:
        """radius: within which nodes keep the same records."""
        places = sorted((position(peer), peer) for peer in nodes)
        self._near = {
            peer: [other for far, other in places if far ^ place <= min(radius, EVERYWHERE - 1)]
            for place, peer in places
        }
        self._parts = {peer: 1 << round(math.log2(len(near))) for peer, near in self._near.items()}
        self._sent: dict[bytes, set[int]] = {peer: set() for peer in self._near}
        self._begun = False

    def next(self) -> list[tuple[bytes, int, int]]:
        """Return the next round: (node, part, parts). After the first one, only nodes that have sent records."""
        asked: dict[bytes, int] = {}
        for peer, near in self._near.items():
            parts, sent = self._parts[peer], self._sent[peer]
            if self._begun and not 0 < len(sent) < parts:
                continue
            alike = [other for other in near if self._parts[other] == parts]
            copies = Counter(part for other in alike for part in self._sent[other])
            copies.update(asked[other] for other in alike if other in asked)
            asked[peer] = min((part for part in range(parts) if part not in sent), key=lambda part: copies[part])
        self._begun = True
        return [(peer, part, self._parts[peer]) for peer, part in asked.items()]

    def came(self, peer: bytes, part: int) -> None:
        """Note that a node has sent records of a slice."""
        self._sent[peer].add(part)
