"""The model behind `directory.py --model`: a swarm that is too large to be run, computed from one that was run.

Computed with production code: each server's records, the keys and levels that take them, the reading of samples, the
bytes of packed records, and routes. Taken from the measured swarm: bytes and calls of a search for one key, and
messages of an announcement at each keeper. Assumed: `Assumptions`.
"""

import asyncio
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from directory_routes import Judge
from directory_swarm import NETWORK, NOW, ROOT, LookUps, Shape, make_servers

from swarm.dht.asking import request_of
from swarm.dht.fetch import Reading
from swarm.dht.format import CALLS
from swarm.dht.records import RECORD, SignedAnnouncement, branch_of, key_id, sign_announcement, span_key
from swarm.dht.sampling import Ask, Found, chosen, for_plan, unpacked
from swarm.dht.search import Result, Searcher, SearchLimits, position
from swarm.dht.validator import Entry, RecordGate
from swarm.identity import Identity

ANSWER_BYTES = 40  # of an answer, beside its records


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The model's assumptions about a large swarm's members."""

    plan_every_s: float = 600.0  # a client reads the directory for a plan, on average
    servers_read_every_s: float = 600.0  # a server reads a sample for its round trips
    new_share: float = 0.1  # of the readers do not know yet that the model is large
    look_ups: int = 24  # computed with all their records; planning among 10,000 servers takes long


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of the run. search_bytes: of the search for one key. search_calls: the same.

    message_share: messages of one announcement at one of its keepers.
    """

    search_bytes: float
    search_calls: float
    message_share: float

    @classmethod
    def of(cls, figures: dict[str, dict[str, float]]) -> Self:
        """Take the model's input from a run's figures."""
        loads, search = figures["announcements, messages a second"], figures["a search for one key"]
        share = loads["a server"] * RECORD.refresh_s / loads["keepers of a record"]
        return cls(search["bytes, median"], search["calls, median"], share)


@dataclass(slots=True)
class Network:
    """Nodes by peer id, with their places and the records that they keep."""

    places: dict[bytes, int]
    draw: random.Random
    held: dict[bytes, list[Entry]] = field(default_factory=dict)
    served: Counter[bytes] = field(default_factory=Counter)  # calls of look-ups that each node took
    order: list[tuple[int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, count: int, draw: random.Random) -> Self:
        """Make nodes without records."""
        peers = [draw.randbytes(34) for _ in range(count)]
        network = cls({peer: position(peer) for peer in peers}, draw)
        network.order = sorted((place, peer) for peer, place in network.places.items())
        return network

    def nearest(self, place: int) -> list[bytes]:
        """Return the nodes that are near a place, nearest first."""
        at = bisect_left(self.order, (place, b""))
        some = self.order[max(0, at - 200) : at + 200]
        return [peer for _, peer in sorted(some, key=lambda one: one[0] ^ place)]

    def radius(self) -> int:
        """Return the radius that a node assumes: the widest of a few samples."""
        samples = [self.draw.getrandbits(160) for _ in range(SearchLimits().samples)]
        return max(self.places[self.nearest(place)[SearchLimits().expected - 1]] ^ place for place in samples)

    def keepers(self, key: str) -> list[bytes]:
        """Return the nodes that keep a key's records."""
        place, radius = int.from_bytes(key_id(key)), self.radius()
        near = self.nearest(place)[: SearchLimits().asked_max]
        within = sum(self.places[peer] ^ place <= radius for peer in near)
        return near[: max(CALLS.replicas, within)]

    def known(self, own: int) -> list[bytes]:
        """Return the nodes that a member knows: a bucket's worth at each distance from its own place."""
        buckets: dict[int, list[bytes]] = {}
        for peer in self.draw.sample(list(self.places), len(self.places)):
            buckets.setdefault((self.places[peer] ^ own).bit_length(), []).append(peer)
        return [peer for bucket in buckets.values() for peer in bucket[: CALLS.bucket_size]]

    async def call(self, peer: bytes, asks: Sequence[Ask]) -> list[Found]:
        """Answer as a node does."""
        found = []
        by_data = {entry.data: entry for entry in self.held.get(peer, ())}
        for key, look in asks:
            assert look is not None
            if not look.below:
                known, place = self.known(self.places[peer]), int.from_bytes(key)
                near = sorted(known, key=lambda other: self.places[other] ^ place)[: look.named]
                found.append(Found((), near, 0, request_of([(key, look)]).ByteSize() + 36 * len(near)))
                continue
            self.served[peer] += 1
            packed = chosen(list(by_data.values()), look)
            entries = [by_data[data] for data in unpacked(packed)]
            size = request_of([(key, look)]).ByteSize() + len(packed) + ANSWER_BYTES
            found.append(Found(entries, (), len(by_data), size))
        return found


def modelled(measured: Measured, shape: Shape, clients: int, seed: int) -> dict[str, dict[str, float]]:
    """Compute a large swarm. Returns figures of the same form as the run's."""
    draw, assumed = random.Random(seed), Assumptions()
    identities = [Identity(draw.randbytes(32)) for _ in range(shape.servers)]
    announcements = make_servers(shape, draw, identities)
    gate = RecordGate(NETWORK, lambda: NOW)
    entries = []
    for announcement, identity in zip(announcements, identities, strict=True):
        facts = gate.facts(data := sign_announcement(announcement, identity), ours=True)
        entries.append(Entry(data, facts, facts.span))
    by_data = {entry.data: SignedAnnouncement(a, b"") for entry, a in zip(entries, announcements, strict=True)}
    keys, network = _levels(entries), Network.of(shape.nodes, draw)
    announced = _announced(keys, network, measured)
    judge, found = Judge(list(by_data.values()), shape.n_blocks, draw), LookUps()
    for _ in range(assumed.look_ups):
        result = asyncio.run(_look_up(network, measured, len(keys[span_key(NETWORK, ROOT)]), shape.n_blocks))
        found.bytes.append(result.moved)
        found.calls.append(len(result.nodes))
        found.take([by_data[entry.data] for entry in result.entries.values()], judge)
    read = _read(network, found, measured, clients, assumed)
    return {
        "swarm": {
            "servers": shape.servers,
            "nodes": shape.nodes,
            "clients": clients,
            "keys": len(keys),
            "records of the fullest key": max(map(len, keys.values())),
            "records at a node, most": max(map(len, network.held.values())),
        },
        "announcements, messages a second": {
            "a node, median": announced[len(announced) // 2],
            "a node, most": announced[-1],
        },
        "look-ups of all, messages a second": {"a node, median": read[len(read) // 2], "a node, most": read[-1]},
        "look-ups": found.summary(),
    }


def _levels(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the records of each key, as servers that come one after the other choose keys."""
    keys: dict[str, list[Entry]] = {}
    for entry in entries:
        branch = branch_of(entry.facts.owner)
        for depth in range(len(branch) + 1):
            held = keys.setdefault(span_key(NETWORK, ROOT, branch[:depth]), [])
            if len(held) < RECORD.held_per_key:
                held.append(entry)
                break
    return keys


def _announced(keys: Mapping[str, list[Entry]], network: Network, measured: Measured) -> list[float]:
    """Give records to their keepers. Returns each node's messages a second of announcements, in order."""
    announced: Counter[bytes] = Counter()
    for key, entries in keys.items():
        for keeper in network.keepers(key):
            network.held.setdefault(keeper, []).extend(entries)
            announced[keeper] += measured.message_share * len(entries) / RECORD.refresh_s
    return sorted(announced[peer] for peer in network.places)


async def _look_up(network: Network, measured: Measured, first: int, n_blocks: int) -> Result:
    """Return the findings of a reader that does not know the model yet. first: records under the model's first key."""
    place = key_id(span_key(NETWORK, ROOT))
    around = network.keepers(span_key(NETWORK, ROOT))
    searcher = Searcher(network.call, network.draw)
    for each in [network.draw.getrandbits(160) for _ in range(SearchLimits().samples)]:
        searcher.surroundings.learn(each, network.nearest(each))

    async def search(_: Sequence[bytes], salt: bytes) -> dict[bytes, Result]:
        held = dict.fromkeys(around, first)
        return {place: Result(nodes=list(around), held=held, more=list(around), moved=int(measured.search_bytes))}

    reading = Reading(searcher, search, partial(network.known, network.draw.getrandbits(160)), lambda entries: None, 1)
    sample = for_plan(network.draw.randbytes(8), n_blocks)
    return (await reading.read(span_key(NETWORK, ROOT), sample))[span_key(NETWORK, ROOT)]


def _read(network: Network, found: LookUps, measured: Measured, clients: int, assumed: Assumptions) -> list[float]:
    """Return each node's messages a second of all look-ups, in order."""
    readers = [(clients, assumed.plan_every_s), (len(network.held), assumed.servers_read_every_s)]
    per_s = sum(count / every_s for count, every_s in readers)
    first = network.keepers(span_key(NETWORK, ROOT))
    share = sum(network.served.values()) / len(found.calls) / len(network.places)  # of nodes, asked by one look-up
    read = {peer: per_s * share for peer in network.places}
    for peer in first:
        read[peer] += per_s * assumed.new_share
    return sorted(read.values())
