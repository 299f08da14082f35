"""Reads a sample of the records around keys, once the nodes are known that have them.

Nodes share in the work: each of five sends another fifth of the sample, so that a record travels about once, and
a node that lies hides a fifth. Further nodes send the same parts again until the bytes are used up. So a key with few
records is read from all nodes that have it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.dht.format import CALLS
from swarm.dht.records import key_id
from swarm.dht.sampling import SAMPLING, Found, Look, Sample, is_full
from swarm.dht.search import Result
from swarm.dht.validator import OnEntries

Searching = Callable[[Sequence[bytes], bytes], Awaitable[Mapping[bytes, Result]]]
"""`search(places, salt)`: a search for a sample."""
Asking = Callable[[bytes, bytes, Look], Awaitable[Found | None]]


async def read_sample(
    keys: Iterable[str],
    sample: Sample,
    search: Searching,
    ask: Asking,
    on_entries: OnEntries,
    source: random.Random,
    at_once: int,
) -> dict[str, Result]:
    """Search for keys, and for those below full ones; then fetch records. at_once: keys in one search."""
    results: dict[str, Result] = {}
    level = list(keys)
    while level:
        for first in range(0, len(level), at_once):
            part = {key: key_id(key) for key in level[first : first + at_once]}
            found = await search(tuple(part.values()), sample.salt)
            results |= {key: found[place] for key, place in part.items()}
        deeper = [below for key in level if is_full(_claims(results[key])) for below in sample.branch(key)]
        source.shuffle(deeper)  # where not all can be read, each has its turn
        level = deeper[: max(0, sample.keys_max - len(results))]
    hungry = {key: result for key, result in results.items() if result.more}
    async with asyncio.TaskGroup() as group:
        for key, result in hungry.items():
            fetching = _Fetch(key_id(key), result, sample.salt, sample.bytes_max // len(hungry), on_entries)
            group.create_task(fetching.run(ask, source))
    return results


def _claims(result: Result) -> list[int]:
    """Return how many records the nodes nearest to a key say that they hold. Five at least are there to hold them."""
    return [result.held.get(peer, 0) for peer in result.nodes[: SAMPLING.asked_if_full]]


@dataclass(slots=True)
class _Fetch:
    """The reading of one key's sample. share: bytes, packed."""

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
        size = min(CALLS.answer_bytes_max // CALLS.keys_max, int(wanted / slices))
        for first in range(0, len(nodes), slices):
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
