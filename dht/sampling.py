"""Samples of a key's records: what a reader asks for, what a node answers, and the form in which records travel. Pure.

A key of a large model holds more records than one plan needs. A reader draws a salt, and each node orders its records
by it, in the same way. So one reader sees the same sample everywhere, and readers spread over the servers. Of three
records two are drawn by weight: a server that claims to take half of the time is four times as likely to come first.
The third is drawn without a look at claims, so that servers which claim the moon do not fill a sample.

The order is that of weighted sampling without replacement (Efraimidis and Spirakis 2006).
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.dht.records import RECORD
from swarm.dht.validator import Entry
from swarm.limits import limit

_WORDS = (  # of a record, commonest last: records are packed with them as a dictionary that both sides know
    b'"anchors":[[],"automatic":false,true,"batches":true,"channel_key":"","codings":["int8"],"decode_tps":'
    b'"device":"","expires":17,"free_tokens":,"issued":17,"load":0.0,"model":"","n_blocks":,"network":"public"'
    b'"numeric_class":"bfloat16","float32","prefill_tps":null,"protocol":1,"public_key":"","public_name":"",'
    b'"root":"","rtts":[["","sequence":17,"state":"online","version":"0.1.0"{"addresses":["","blocks":[,'
)


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How much one look-up reads."""

    plan_bytes: int = limit(144 << 10, "bytes", "of packed records for one plan; a sample of the rest is left unread")
    everybody_bytes: int = limit(8 << 20, "bytes", "the same, for readers that need all servers")
    first_bytes: int = limit(1536, "bytes", "a node with no more than this answers a search with its records at once")
    distinct: float = limit(0.67, "share", "of the bytes that are for records once; the rest is for second copies")
    slices: int = limit(5, "nodes", "that share in one key's sample; one that lies hides a fifth of it")
    named: int = limit(8, "nodes", "named in one answer: those that the reader does not know yet, nearest first")
    seen_max: int = limit(48, "nodes", "that a reader says it knows; the nearest ones")
    full_share: float = limit(0.5, "share", "of a key's room; a reader of a key that holds more reads on below it")
    asked_if_full: int = limit(7, "nodes", "nearest to a key, of which most must say that it holds so much")
    keys_max: int = limit(32, "keys", "searched for one plan; deeper ones beyond are left unread")
    everybody_keys_max: int = limit(512, "keys", "searched by readers that need all servers")
    unpacked_max: int = limit(4 << 20, "bytes", "of records in one answer; a longer one is rejected")


SAMPLING = SamplingLimits()


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reader wants. bytes_max: of records, packed. branch: the keys to read below a key that is full."""

    salt: bytes
    bytes_max: int
    keys_max: int
    branch: Callable[[str], tuple[str, ...]]


def for_plan(salt: bytes, limits: SamplingLimits = SAMPLING) -> Sample:
    """Return a sample that is enough for a good route. Of two keys below a full one the salt chooses."""

    def branch(key: str) -> tuple[str, ...]:
        return children(key)[hashlib.sha256(salt + key.encode()).digest()[0] & 1 :][:1]

    return Sample(salt, limits.plan_bytes, limits.keys_max, branch)


def for_everybody(salt: bytes, limits: SamplingLimits = SAMPLING) -> Sample:
    """Return a sample that has all servers of all but huge swarms."""
    return Sample(salt, limits.everybody_bytes, limits.everybody_keys_max, children)


def children(key: str) -> tuple[str, ...]:
    """Return the two keys that continue a full key; none below the deepest."""
    depth = key.count("/") - RECORD.key_parts
    return (f"{key}/0", f"{key}/1") if depth < RECORD.depth_max else ()


class Look(NamedTuple):
    """What one call asks of a node about one key.

    size: bytes of records, packed, at most; the first in the salt's order of slice `part` of `parts`, which the salt
    cuts, too. whole: all records or none. named: nodes at most. within: only nodes that are nearer than 2**within,
    where there are any. seen: the last three bytes of the place of each node that the reader knows.
    """

    salt: bytes
    part: int = 0
    parts: int = 1
    size: int = 0
    whole: bool = False
    named: int = 0
    within: int = 160
    seen: bytes = b""


Ask = tuple[bytes, Look | None]  # a key, and what is wanted of it; None: all records, and as many nodes as there are


@dataclass(frozen=True, slots=True)
class Found:
    """One node's answer about one key. near: nodes nearer to it. held: records that the node says it has.

    size: of the records, in bytes as they came.
    """

    entries: Sequence[Entry] = ()
    near: Sequence[bytes] = ()
    held: int = 0
    size: int = 0


def chosen(entries: Sequence[Entry], look: Look) -> bytes:
    """Return a node's records for a look, packed; b"" for none."""
    if look.whole:
        return packed(entries) if sum(len(entry.data) for entry in entries) <= look.size else b""
    parts = max(1, look.parts)  # nodes hold different records at times: a slice is cut by hashes, not by ranks
    sliced = [entry for entry in entries if drawn(entry, look.salt)[-1] % parts == look.part]
    wanted = ordered(sliced, look.salt)
    best, count = b"", max(1, look.size // 512)
    for _ in range(3 if wanted else 0):  # packed sizes are not known before; each try packs about `size` bytes
        count = min(count, len(wanted))
        if len(part := packed(wanted[:count])) <= look.size and len(part) > len(best):
            best = part
        count = max(1, int(0.98 * count * look.size / len(part)))
    return best


def price(entries: Sequence[Entry], look: Look | None) -> int:
    """Return the bytes that an answer is charged with: those of its records, before they are packed."""
    n_bytes = sum(len(entry.data) for entry in entries)
    if look is None:
        return n_bytes
    if look.whole:
        return n_bytes if n_bytes <= look.size else 0
    return min(look.size, n_bytes // max(1, look.parts))


def ordered(entries: Sequence[Entry], salt: bytes) -> list[Entry]:
    """Return records in the order of a salt: two by weight, one by chance, and so on; withdrawn ones last."""
    draws = {entry.place.subkey: drawn(entry, salt) for entry in entries}

    def by_weight(entry: Entry) -> float:
        u = (int.from_bytes(draws[entry.place.subkey][:8]) + 1) / 2**64
        return -math.log(u) * entry.facts.cost**2

    def by_chance(entry: Entry) -> tuple[bool, bytes]:
        return entry.facts.cost == math.inf, draws[entry.place.subkey][8:]

    weighted, random = sorted(entries, key=by_weight), sorted(entries, key=by_chance)
    merged: dict[str, Entry] = {}
    for i, entry in enumerate(random):
        for other in (*weighted[2 * i : 2 * i + 2], entry):
            merged.setdefault(other.place.subkey, other)
    return list(merged.values())


def drawn(entry: Entry, salt: bytes) -> bytes:
    """Return the random bytes of a record under a salt."""
    return hashlib.sha256(salt + entry.place.subkey.encode()).digest()


def packed(entries: Sequence[Entry]) -> bytes:
    """Return records in the form in which they travel: each behind its length, compressed together."""
    if not entries:
        return b""
    packer = zlib.compressobj(zdict=_WORDS)
    return packer.compress(b"".join(len(e.data).to_bytes(2, "big") + e.data for e in entries)) + packer.flush()


def unpacked(data: bytes, limits: SamplingLimits = SAMPLING) -> list[bytes]:
    """Invert `packed`; nothing for data that is malformed or too long."""
    unpacker = zlib.decompressobj(zdict=_WORDS)
    try:
        text = unpacker.decompress(data, limits.unpacked_max)
    except zlib.error:
        return []
    if not unpacker.eof:
        return []
    records, at = [], 0
    while at + 2 <= len(text):
        length = int.from_bytes(text[at : at + 2])
        records.append(text[at + 2 : at + 2 + length])
        at += 2 + length
    return records if at == len(text) else []


def tail(place: int) -> bytes:
    """Return the end of a place in the key space, by which a reader names a node that it knows."""
    return (place & 0xFFFFFF).to_bytes(3, "big")


def news(near: Sequence[tuple[int, int]], look: Look) -> list[int]:
    """Return which nodes an answer names. near: (place, distance) of nodes, nearest first. Returns their indices."""
    seen = {look.seen[at : at + 3] for at in range(0, len(look.seen) - 2, 3)}
    inside = [i for i, (_, distance) in enumerate(near) if distance < 1 << min(look.within, 160)]
    unseen = [i for i in inside or range(len(near)) if tail(near[i][0]) not in seen]
    return unseen[: look.named]


def is_full(held: Sequence[int], limits: SamplingLimits = SAMPLING) -> bool:
    """Return whether a key is read on below: the lower half of the nodes near it says that it holds much.

    held: the counts that the nodes claim, 0 for those that have none.
    """
    return bool(held) and sorted(held)[(len(held) - 1) // 2] > limits.full_share * RECORD.held_per_key
