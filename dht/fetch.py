"""Reads a sample of a model's records.

Few servers have their records under the model's first key alone. Then the nodes around it share in the work: each of
five sends another fifth of the sample, so that a node that lies hides a fifth. Further nodes send the same parts again
until the bytes are used up. Two nodes at least are asked for each part: one of them may lack a record. Where they claim
few records, five are asked for all of them at once.

The records of many servers are spread over most nodes of the network. So a reader needs no search for them: it asks
nodes that it knows, wherever they are, for their records of the model. Neighbours have the same records: the reader
asks each of them for another slice. So look-ups spread over all nodes. With the bytes that are left, the reader asks
neighbours for all slices that they have not sent, because one of them may have a record that the others lack.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.dht.format import CALLS
from swarm.dht.records import RECORD, key_id
from swarm.dht.sampling import SAMPLING, Found, Look, Sample, children, drawn, is_full, missing, tail_of
from swarm.dht.search import EVERYWHERE, Result, Searcher, SearchLimits, position
from swarm.dht.validator import Entry, OnEntries

Searching = Callable[[Sequence[bytes], bytes], Awaitable[Mapping[bytes, Result]]]
"""`search(places, salt)`: a search for a sample."""
Asking = Callable[[bytes, bytes, Look], Awaitable[Found | None]]


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
                return await self._near(place, result, sample)
        gathering = _Gathering(place, result, sample, self.searcher, self.on_entries)
        await gathering.run(self.known())
        if len(result.entries) > SAMPLING.full_share * RECORD.held_per_key:
            large[place] = now + SAMPLING.large_s
            while len(large) > SAMPLING.larges_max:
                del large[next(iter(large))]
        elif search:  # the nodes near the key claim what others do not bear out
            return await self._near(place, result, sample)
        else:  # the model is not large any more, or the nodes that this reader knows are gone
            return await self._for_plan(key, sample)
        return result

    async def _near(self, place: bytes, result: Result, sample: Sample) -> Result:
        """Fetch what the nodes around a key have, with the bytes that are left."""
        fetching = _Fetch(place, result, sample.salt, sample.bytes_max - result.moved, self.on_entries)
        await fetching.run(self.searcher.ask, self.searcher.source)
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
        nodes = [peer for peer in dict.fromkeys(self.result.nodes) if peer in more]
        at_once = min(SAMPLING.slices, len(nodes))
        nearest, others = nodes[:at_once], nodes[at_once:]
        for each in (nearest, others):
            source.shuffle(each)
        nodes = nearest + others
        claims = sorted(self.result.held.get(peer, 0) for peer in nodes)
        few = bool(claims) and claims[len(claims) // 2] <= SAMPLING.few
        parts = 1 if few else max(1, min(SAMPLING.slices, len(nodes) // SAMPLING.senders))
        wanted = SAMPLING.distinct * self.share
        size = min(CALLS.key_bytes_max, int(wanted / max(1, at_once)))
        for first in range(0, len(nodes), max(1, at_once)):
            if self.taken + size > self.share or self.new >= 0.9 * wanted:
                return
            wave = nodes[first : first + at_once]
            looks = [Look(self.salt, (first + i) % parts, parts, size) for i in range(len(wave))]
            answers = (ask(peer, self.key, look) for peer, look in zip(wave, looks, strict=True))
            await asyncio.gather(*map(self._one, answers))

    async def _one(self, answer: Awaitable[Found | None]) -> None:
        """Take one node's records as soon as they come: others may be silent."""
        if (found := await answer) is None:
            return
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
    parts: int = 1  # slices of the records that neighbours keep
    slices: "Slices" = field(init=False)
    namers: dict[bytes, bytes] = field(default_factory=dict)  # nodes that were named meanwhile -> the node that did
    blame: Counter[bytes] = field(default_factory=Counter)  # by namer: nodes without an answer

    async def run(self, known: Sequence[bytes]) -> None:
        """Ask nodes until the bytes are used up, each for a few slices; at last for blocks that are still missing."""
        around = [peer for peer in self.result.nodes if peer in self.result.held]
        nodes = [*spread(set(known) - set(around), self.searcher.source), *around]
        radius = self.searcher.surroundings.radius
        exist = max(1, SearchLimits().expected * EVERYWHERE // max(1, radius))  # nodes of the network, or about
        knows_all = len(nodes) > 0.7 * exist
        first = nodes[: SAMPLING.nodes_max if knows_all else SAMPLING.nodes_first]
        self.parts = 1 << int(math.log2(max(1.0, SearchLimits().expected * min(1.0, SAMPLING.nodes_max / exist))))
        self.slices = Slices(radius, self.parts, self.sample.salt)
        self.slices.add(first)
        most = int(self.sample.bytes_max * (1 - SAMPLING.missing_share))
        if not knows_all:
            await self._round(self.slices.next(), most * len(first) // SAMPLING.nodes_max, names=True)
            further = [*self.namers, *nodes[len(first) :]]
            self.slices.add(list(dict.fromkeys(further))[: SAMPLING.nodes_max - len(first)])
        await self._round(self.slices.next(), most)
        if blocks := missing(self.result.entries.values(), self.sample.n_blocks):
            asks = [(peer, 0) for peer in dict.fromkeys([*nodes[len(first) :], *self.namers, *first])]
            await self._round(asks[: SAMPLING.nodes_max], self.sample.bytes_max, blocks)
        for _ in range(SAMPLING.rounds_max):
            before = len(self.result.entries)
            await self._round(self.slices.next(), self.sample.bytes_max)
            if len(self.result.entries) == before:
                break
        await self._round(self.slices.next(every=True), self.sample.bytes_max)

    async def _round(
        self, asks: Sequence[tuple[bytes, int]], most: int, blocks: bytes = b"", *, names: bool = False
    ) -> None:
        """Ask nodes, a few at a time, each for a slice. most: bytes that may have moved then.

        names: each names some nodes near a random place as well.
        """
        left = list(reversed(asks))

        async def some() -> None:
            while left:
                unused = most - self.result.moved - self.pending
                if unused < SAMPLING.least_bytes:
                    return
                share = self.sent / self.offered  # of what the others could have sent
                size = max(SAMPLING.least_bytes, int(unused / max(1.0, len(left) * share)))
                peer, part = left.pop()
                if self.blame[self.namers.get(peer, b"")] < SAMPLING.blamed_max:
                    size = min(size, CALLS.key_bytes_max)
                    self.pending += size
                    seen = b"" if blocks else self.slices.seen(peer, part)
                    parts = 1 if blocks else self.parts
                    look = Look(self.sample.salt, part, parts, size, seen=seen, below=True, blocks=blocks)
                    await asyncio.gather(self._ask(peer, look), *([self._name(peer)] if names else []))
                    self.pending -= size

        async with asyncio.TaskGroup() as group:
            for _ in range(SAMPLING.nodes_at_once):
                group.create_task(some())

    async def _ask(self, peer: bytes, look: Look) -> None:
        found = await self.searcher.ask(peer, self.place, look)
        if found is None:
            if namer := self.namers.get(peer):
                self.blame[namer] += 1
            return
        self.result.moved += found.size
        self.offered += look.size
        self.sent += min(found.size, look.size)
        self.result.nodes.append(peer)
        self.result.add(found.entries)
        self.on_entries(found.entries)
        if found.held and not look.blocks:
            full = found.size > SAMPLING.filled_share * look.size
            self.slices.came(peer, look.part, found.entries, more=full and len(found.entries) > 0)

    async def _name(self, peer: bytes) -> None:
        """Learn of nodes that one knows near a random place."""
        found = await self.searcher.ask(
            peer, self.searcher.source.randbytes(20), Look(b"", named=SAMPLING.named_anywhere)
        )
        if found is None:
            return
        self.result.moved += found.size
        for other in found.near[: SAMPLING.named_anywhere]:
            if other not in self.slices:
                self.namers.setdefault(other, peer)


def spread(nodes: Iterable[bytes], source: random.Random) -> list[bytes]:
    """Return nodes in a random order in which the first ones are spread evenly: a reader knows many near itself."""
    left = {peer: position(peer) for peer in nodes}
    chosen = []
    while left:
        place = source.getrandbits(160)
        chosen.append(min(left, key=lambda peer: left[peer] ^ place))
        del left[chosen[-1]]
    return chosen


class Slices:
    """Which slice each node is asked for, and which records its neighbours have sent already. Pure.

    Each record is kept by nodes of one neighbourhood: a part of the key space as wide as the radius, or up to twice.
    Neighbours are asked for different slices; where there are more neighbours than slices, one after the other.
    """

    def __init__(self, radius: int, parts: int, salt: bytes) -> None:
        """radius: within which nodes keep the same records. parts: slices of a neighbourhood's records."""
        self._bits, self._parts, self._salt = radius.bit_length(), parts, salt
        self._sent: dict[bytes, set[int]] = {}
        self._more: dict[bytes, set[int]] = {}  # slices of which a node has more than it could send
        self._asked: set[bytes] = set()
        self._draws: dict[int, dict[bytes, None]] = {}  # of a neighbourhood's records that have come

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._sent

    def add(self, nodes: Iterable[bytes]) -> None:
        """Take in more nodes."""
        self._sent |= {peer: set() for peer in nodes if peer not in self._sent}

    def next(self, *, every: bool = False) -> list[tuple[bytes, int]]:
        """Return the next round: (node, part), neighbours far apart. Nodes of earlier rounds send other slices.

        every: all that are of use, instead of one for each node.
        """
        copies: dict[int, Counter[int]] = {}
        for peer, sent in self._sent.items():
            copies.setdefault(position(peer) >> self._bits, Counter()).update(sent)
        chosen: list[tuple[int, bytes, int]] = []
        ranks: Counter[int] = Counter()
        for peer in sorted(self._sent, key=position):
            sent, here = self._sent[peer], position(peer) >> self._bits
            of_use = [
                part
                for part in range(self._parts)
                if part in self._more.get(peer, ()) or (part not in sent and copies[here][part] < SAMPLING.copies)
            ]
            if peer not in self._asked or (sent and of_use):
                best = sorted(of_use or [0], key=lambda part: (part in sent, copies[here][part]))
                for part in best if every else best[:1]:
                    copies[here][part] += 1
                    ranks[here] += 1
                    chosen.append((ranks[here], peer, part))
        self._asked.update(self._sent)
        return [(peer, part) for _, peer, part in sorted(chosen)]

    def came(self, peer: bytes, part: int, entries: Sequence[Entry], *, more: bool) -> None:
        """Note the records of a slice that a node has sent. more: it has others for which there was no room."""
        self._sent[peer].add(part)
        (set.add if more else set.discard)(self._more.setdefault(peer, set()), part)
        self._draws.setdefault(position(peer) >> self._bits, {}).update({drawn(e, self._salt): None for e in entries})

    def seen(self, peer: bytes, part: int) -> bytes:
        """Return the records of a slice that this node need not send, as `Look.seen` names them."""
        draws = self._draws.get(position(peer) >> self._bits, {})
        return b"".join([tail_of(draw) for draw in draws if draw[-1] % self._parts == part][-SAMPLING.seen_max :])
