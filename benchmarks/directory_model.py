"""The model behind `directory.py --model`: a swarm that is too large to be run, computed from one that was run.

Computed with production code: each server's records, the keys and levels that take them, the order of samples, the
bytes of packed records, and routes. Taken from the measured swarm: bytes and calls of a search for one key, and
messages of an announcement at each keeper. Assumed: `Assumptions`.
"""

import random
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from directory_swarm import NETWORK, NOW, ROOT, LookUps, Shape, best_ms, make_servers

from swarm.dht.records import RECORD, SignedAnnouncement, branch_of, key_id, sign_announcement, span_key, span_keys
from swarm.dht.sampling import SAMPLING, Look, chosen, for_plan, is_full, unpacked
from swarm.dht.search import SearchLimits
from swarm.dht.validator import Entry, RecordGate
from swarm.identity import Identity


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the model assumes of a large swarm's members."""

    plan_every_s: float = 600.0  # a client reads the directory for a plan, on average
    servers_read_every_s: float = 600.0  # a server reads a sample for its round trips
    look_ups: int = 8  # computed with all their records; planning among 10,000 servers takes long


@dataclass(frozen=True, slots=True)
class Measured:
    """What the run gave. search_bytes: of a look-up, less its packed records, for one key. search_calls: the same."""

    search_bytes: float
    search_calls: float
    message_share: float  # messages of one announcement at one of its keepers

    @classmethod
    def of(cls, figures: dict[str, dict[str, float]]) -> Self:
        """Take what the model needs from a run's figures."""
        swarm, loads, look_ups = figures["swarm"], figures["announcements, messages a second"], figures["look-ups"]
        keys = -(-swarm["blocks"] // RECORD.spans_per_key)
        records = min(look_ups["bytes, median"] * 0.9, SAMPLING.plan_bytes * SAMPLING.distinct)
        keepers = min(SearchLimits().expected, swarm["nodes"])
        return cls(
            (look_ups["bytes, median"] - records) / keys,
            look_ups["calls, median"] / keys,
            loads["a server"] * RECORD.refresh_s / keepers,
        )


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
    held = _levels(entries, announcements)
    best, found, searched = best_ms(list(by_data.values()), shape.n_blocks), LookUps(), []
    for _ in range(assumed.look_ups):
        keys, records, size = _look_up(held, shape, draw)
        searched.append(len(keys))
        servers = [by_data[record] for record in records]
        found.bytes.append(int(size + len(keys) * measured.search_bytes))
        found.calls.append(int(len(keys) * measured.search_calls))
        found.servers.append(len(servers))
        found.ratios.append(best_ms(servers, shape.n_blocks) / best)
    announced, read = _loads(held, shape, measured, draw, clients / assumed.plan_every_s, assumed)
    return {
        "swarm": {
            "servers": shape.servers,
            "nodes": shape.nodes,
            "clients": clients,
            "keys": len(held),
            "records of the fullest key": max(map(len, held.values())),
            "keys searched, median": statistics.median(searched),
        },
        "announcements, messages a second": {
            "a node, median": announced[len(announced) // 2],
            "a node, most": announced[-1],
        },
        "look-ups of all, messages a second": {"a node, median": read[len(read) // 2], "a node, most": read[-1]},
        "look-ups": found.summary(),
    }


def _levels(entries: Sequence[Entry], announcements: Sequence) -> dict[str, list[Entry]]:
    """Return the records of each key, as servers that come one after the other choose keys."""
    held: dict[str, list[Entry]] = {key: [] for key in span_keys(NETWORK, ROOT, announcements[0].n_blocks)}
    for entry, announcement in zip(entries, announcements, strict=True):
        branch = branch_of(announcement.public_key)
        for depth in range(len(branch) + 1):
            key = span_key(NETWORK, ROOT, announcement.blocks.start, branch[:depth])
            if len(held.setdefault(key, [])) < RECORD.held_per_key:
                held[key].append(entry)
                break
    return held


def _look_up(held: dict[str, list[Entry]], shape: Shape, draw: random.Random) -> tuple[list[str], set[bytes], int]:
    """Return the keys that one reader searches, the records that it finds, and their bytes, packed."""
    sample = for_plan(draw.randbytes(8))
    keys: list[str] = []
    level = list(span_keys(NETWORK, ROOT, shape.n_blocks))
    while level:
        keys += level
        deeper = [below for key in level if is_full([len(held[key])]) for below in sample.branch(key) if below in held]
        draw.shuffle(deeper)
        level = deeper[: max(0, sample.keys_max - len(keys))]
    share = sample.bytes_max // len(keys)
    size = int(SAMPLING.distinct * share / SAMPLING.slices)
    records, total = set(), 0
    for key in keys:
        for number in range(SAMPLING.slices):
            part = chosen(held[key], Look(sample.salt, number, SAMPLING.slices, size))
            records |= set(unpacked(part))
            total += len(part)
    return keys, records, total


def _loads(
    held: dict[str, list[Entry]],
    shape: Shape,
    measured: Measured,
    draw: random.Random,
    plans_per_s: float,
    assumed: Assumptions,
) -> tuple[list[float], list[float]]:
    """Return each node's messages a second of announcements, and of look-ups, in order."""
    places = sorted(int.from_bytes(draw.randbytes(20)) for _ in range(shape.nodes))
    radius = (1 << 160) * SearchLimits().expected // shape.nodes
    announced: Counter[int] = Counter()
    read: Counter[int] = Counter()
    reads_per_s = plans_per_s + shape.servers / assumed.servers_read_every_s
    for key, entries in held.items():
        place = int.from_bytes(key_id(key))
        near = sorted(places[max(0, bisect_left(places, place) - 200) :][:400], key=lambda other: other ^ place)
        keepers = [other for other in near if other ^ place <= radius][:40]
        keepers = keepers if len(keepers) >= 5 else near[:5]
        asked = reads_per_s / 2 ** (key.count("/") - RECORD.key_parts)  # of two keys below a full one, one is read
        for keeper in keepers:
            announced[keeper] += measured.message_share * len(entries) / RECORD.refresh_s
            read[keeper] += asked * (1 + SAMPLING.slices / len(keepers))
    return sorted(announced[place] for place in places), sorted(read[place] for place in places)
