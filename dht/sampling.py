"""Samples of a key's records: what a reader asks for, what a node answers, and the form in which records travel. Pure.

A large model has more records than one plan needs. A reader draws a salt, and each node orders its records by it, in
the same way. So one reader sees the same sample everywhere, and readers spread over the servers. Of three records two
are drawn by weight: a server that claims to take half of the time is 256 times as likely to come first. The third is
drawn without a look at claims, so that servers which claim the moon do not fill a sample. Among these, a record comes
the earlier the fewer others the node holds of one of its blocks, so that few servers of a block are not lost in many.

The order is that of weighted sampling without replacement (Efraimidis and Spirakis 2006).
"""

import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

from swarm.dht.records import RECORD
from swarm.dht.sealing import SEAL_BYTES
from swarm.dht.validator import Entry
from swarm.identity import SIGNATURE_BYTES
from swarm.limits import limit

_DIGITS = re.compile(rb"(?:[0-9a-f]{2}){8,64}")
_WORDS = (  # a record as most are: records are packed with it as a dictionary that both sides know
    b'true"int4""float32""float16""joining""draining"{"addresses":["192.168.1.10:31330"],"anchors":[],"automatic":false,'
    b'"batches":null,"blocks":[0,8],"channel_key":"\1 ","codings":["int8"],"decode_tps":69.6,"device":"","expires":1800'
    b'000060.3703,"free_tokens":288024,"issued":1800000000.3703,"load":0.0,"model":"","n_blocks":80,"network":"public","'
    b'numeric_class":"bfloat16","prefill_tps":2289.84,"protocol":1,"public_key":"\1 ","public_name":"","root":"\1 ","rt'
    b'ts":[["\1\x08","\1\x08"]],"sequence":1800000000300,"state":"online","version":"0.1.0"}'
)


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How much one look-up reads."""

    plan_bytes: int = limit(248 << 10, "bytes", "that the look-up for one plan moves, its search included")
    everybody_bytes: int = limit(16 << 20, "bytes", "of records for readers that need all servers")
    first_bytes: int = limit(4096, "bytes", "a node with no more than this answers a search with its records at once")
    distinct: float = limit(0.67, "share", "of the bytes that are for records once; the rest is for second copies")
    slices: int = limit(5, "nodes", "that share in one key's sample; one that lies hides a fifth of it")
    few: int = limit(32, "records", "of one key are asked for as a whole, from each of five nodes")
    senders: int = limit(2, "nodes", "are asked for each part, where there are so many; one may lack a record")
    named: int = limit(8, "nodes", "named in one answer: those that the reader does not know yet, nearest first")
    seen_max: int = limit(48, "nodes", "that a reader says it knows; the nearest ones")
    full_share: float = limit(0.5, "share", "of a key's room; a reader of a key that holds more reads on elsewhere")
    asked_if_full: int = limit(7, "nodes", "nearest to a key, of which most must say that it holds so much")
    everybody_keys_max: int = limit(512, "keys", "searched by readers that need all servers; deeper ones are not read")
    nodes_max: int = limit(256, "nodes", "anywhere, that are asked for some of a large model's records")
    nodes_first: int = limit(72, "nodes", "of them are asked for others as well, where the reader knows too few")
    named_anywhere: int = limit(4, "nodes", "that a node names near a random place, where the reader knows too few")
    blamed_max: int = limit(2, "nodes", "named by one node, without an answer; its others are not asked then")
    nodes_at_once: int = limit(48, "nodes", "of them at one time: answers say how much the next may send")
    least_bytes: int = limit(512, "bytes", "of one answer: with fewer left for each node, fewer nodes are asked")
    filled_share: float = limit(0.6, "share", "of its bytes that an answer fills where a node has more to send")
    copies: int = limit(8, "nodes", "near each other that a slice comes from, while bytes are left")
    rounds_max: int = limit(8, "rounds", "of them, each for other slices, while they bring records and bytes are left")
    missing_share: float = limit(0.1, "share", "of the bytes, kept for blocks that the rest has not brought")
    larges_max: int = limit(64, "models", "that a reader remembers as large; the oldest is searched for again")
    large_s: float = limit(3600.0, "s", "a reader remembers so long that a model is large, and spares its first key")
    sharpness: float = limit(8.0, "power", "of the claimed time by which records are weighed")
    hop_ms: float = limit(4.0, "ms", "added to a span's claimed time before that: long spans make short routes")
    parts_max: int = limit(256, "slices", "of a key's records")
    drawn_bytes: int = limit(16, "bytes", "that an answer is charged for each record under its key: all are drawn for")
    sorted_bytes: int = limit(48, "bytes", "the same for each record of the slice, which is put in order")
    unpacked_max: int = limit(4 << 20, "bytes", "of records in one answer; a longer one is rejected")


SAMPLING = SamplingLimits()


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reader wants of a model with `n_blocks` blocks, all of which are to be held by servers of the sample.

    everybody: the records of all keys, bytes_max bytes at most. Else so many as `bytes_max` bytes of calls bring.
    """

    salt: bytes
    n_blocks: int
    bytes_max: int
    everybody: bool


def for_plan(salt: bytes, n_blocks: int, limits: SamplingLimits = SAMPLING) -> Sample:
    """Return a sample that is enough for a good route."""
    return Sample(salt, n_blocks, limits.plan_bytes, everybody=False)


def for_everybody(salt: bytes, n_blocks: int, limits: SamplingLimits = SAMPLING) -> Sample:
    """Return a sample that has all servers of all but huge swarms."""
    return Sample(salt, n_blocks, limits.everybody_bytes, everybody=True)


def children(key: str) -> tuple[str, ...]:
    """Return the two keys that continue a full key; none below the deepest."""
    depth = key.count("/") - RECORD.key_parts
    return (f"{key}/0", f"{key}/1") if depth < RECORD.depth_max else ()


class Look(NamedTuple):
    """What one call asks of a node about one key.

    size: bytes of records, packed, at most; the first in the salt's order of slice `part` of `parts`, which the salt
    cuts, too. whole: all records or none. named: nodes at most. within: only nodes that are nearer than 2**within,
    where there are any. seen: the last three bytes of the place of each node that the reader knows. below: the key is a
    model's first, and records under its other keys count as well; then `seen` names records that the reader has.
    blocks: only records that have one of them, a bit each, from the lowest bit of the first byte on; b"" for any.
    """

    salt: bytes
    part: int = 0
    parts: int = 1
    size: int = 0
    whole: bool = False
    named: int = 0
    within: int = 160
    seen: bytes = b""
    below: bool = False
    blocks: bytes = b""


Ask = tuple[bytes, Look | None]  # a key, and what is wanted of it; None: all records, and as many nodes as there are


@dataclass(frozen=True, slots=True)
class Found:
    """One node's answer about one key. near: nodes nearer to it. held: records that the node says it has.

    size: of the call, in bytes, request and answer.
    """

    entries: Sequence[Entry] = ()
    near: Sequence[bytes] = ()
    held: int = 0
    size: int = 0


def chosen(entries: Sequence[Entry], look: Look) -> bytes:
    """Return a node's records for a look, packed; b"" for none."""
    if not look.size:
        return b""
    if look.whole:
        return packed(entries) if sum(len(entry.data) for entry in entries) <= look.size else b""
    parts = max(1, look.parts)  # nodes hold different records at times: a slice is cut by hashes, not by ranks
    sliced = [entry for entry in entries if drawn(entry, look.salt)[-1] % parts == look.part]
    if look.below and look.seen:
        seen = _threes(look.seen)
        sliced = [entry for entry in sliced if tail_of(drawn(entry, look.salt)) not in seen]
    wanted = ordered(having(sliced, look.blocks), look.salt)
    best, n = b"", max(1, look.size // 400)
    for _ in range(3 if wanted else 0):  # packed sizes are not known before; each try packs about `size` bytes
        n = min(n, len(wanted))
        if len(part := packed(wanted[:n])) <= look.size and len(part) > len(best):
            best = part
        n = max(1, int(0.98 * n * look.size / len(part)))
    return best


def price(entries: Sequence[Entry], look: Look | None) -> int:
    """Return the bytes that an answer is charged with: its records, before they are packed, or what choosing costs."""
    n_bytes, n = sum(len(entry.data) for entry in entries), len(entries)
    if look is None:
        return n_bytes
    if look.whole or not look.size:
        return n_bytes if n_bytes <= look.size else 0
    parts, limits = max(1, look.parts), SAMPLING
    return max(min(look.size, n_bytes // parts), limits.drawn_bytes * n + limits.sorted_bytes * n // parts)


def having(entries: Sequence[Entry], blocks: bytes) -> Sequence[Entry]:
    """Return the records that have one of these blocks, as `Look.blocks` names them."""
    wanted = int.from_bytes(blocks, "little")
    return [entry for entry in entries if wanted & bits_of(entry)] if blocks else entries


def bits_of(entry: Entry) -> int:
    """Return a record's blocks, a bit each."""
    start, stop = entry.facts.blocks
    return (1 << stop) - (1 << start)


def missing(entries: Iterable[Entry], n_blocks: int) -> bytes:
    """Return the blocks of a model that no server of these records has, as `Look.blocks` names them; b"" for none."""
    left = (1 << n_blocks) - 1
    for entry in entries:
        if entry.facts.cost < math.inf:
            left &= ~bits_of(entry)
    return left.to_bytes(-(-n_blocks // 8), "little") if left else b""


def ordered(entries: Sequence[Entry], salt: bytes) -> list[Entry]:
    """Return records in the order of a salt: two by weight, one by chance, and so on; withdrawn ones last."""
    draws = {entry.place.subkey: drawn(entry, salt) for entry in entries}
    fewest = _fewest(entries)

    def by_weight(entry: Entry) -> float:
        return exponential(draws[entry.place.subkey][:8]) * math.pow(_time_of(entry), SAMPLING.sharpness)

    def by_chance(entry: Entry) -> tuple[bool, float]:
        return entry.facts.cost == math.inf, exponential(draws[entry.place.subkey][8:16]) * fewest[entry.facts.blocks]

    weighted, random = sorted(entries, key=by_weight), sorted(entries, key=by_chance)
    first = draws[random[0].place.subkey][16] if random else 0  # so that a third of short answers is by chance, too
    sources = iter(weighted), iter(random)
    merged: dict[str, Entry] = {}
    for i in count(first % 3):
        new = (entry for entry in sources[i % 3 == 0] if entry.place.subkey not in merged)
        if (entry := next(new, None)) is None:
            break
        merged[entry.place.subkey] = entry
    return list(merged.values())


def _time_of(entry: Entry) -> float:
    """Return the claimed time in ms of a token in one block, with the block's share of a hop."""
    start, stop = entry.facts.blocks
    return entry.facts.cost + SAMPLING.hop_ms / max(1, stop - start)


def _fewest(entries: Sequence[Entry]) -> dict[tuple[int, int], int]:
    """Return for each span how many of these records hold its rarest block."""
    spans = Counter(entry.facts.blocks for entry in entries)
    changes: Counter[int] = Counter()
    for (start, stop), n in spans.items():
        changes[start] += n
        changes[stop] -= n
    edges = sorted(changes)
    holders = list(accumulate(changes[edge] for edge in edges))
    at = {edge: i for i, edge in enumerate(edges)}
    return {(start, stop): min(holders[at[start] : at[stop]]) for start, stop in spans}


def exponential(random: bytes) -> float:
    """Return an exponentially distributed number from 8 random bytes."""
    return -math.log((int.from_bytes(random) + 1) / 2**64)


def drawn(entry: Entry, salt: bytes) -> bytes:
    """Return the random bytes of a record under a salt."""
    return hashlib.sha256(salt + entry.place.subkey.encode()).digest()


def tail_of(draw: bytes) -> bytes:
    """Return the part of a record's random bytes by which a reader names a record that it has."""
    return draw[-4:-1]


def packed(entries: Sequence[Entry]) -> bytes:
    """Return records in the form in which they travel: each behind its length, compressed together."""
    if not entries:
        return b""
    packer = zlib.compressobj(zdict=_WORDS)
    shorter = map(_with_bytes, (entry.data for entry in entries))
    return packer.compress(b"".join(len(data).to_bytes(2, "big") + data for data in shorter)) + packer.flush()


def unpacked(data: bytes, limits: SamplingLimits = SAMPLING) -> list[bytes]:
    """Invert `packed`; nothing for data that is malformed or too long, or has lengths that no record has."""
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
        if not SIGNATURE_BYTES < length <= 1 + RECORD.bytes_max + SEAL_BYTES:
            return []  # a few bytes may stand for a million of them
        records.append(_with_digits(text[at + 2 : at + 2 + length]))
        at += 2 + length
    return records if at == len(text) else []


def _with_bytes(record: bytes) -> bytes:
    """Return a record whose hexadecimal digits are bytes, each run behind 1 and its length; 0 comes first then.

    Digits do not compress to half. A record that has a 1 itself, as sealed ones do, stays as it is behind a 1.
    """
    signature, payload = record[:SIGNATURE_BYTES], record[SIGNATURE_BYTES:]
    if b"\1" in payload:
        return b"\1" + record
    shorter = _DIGITS.sub(lambda run: bytes([1, len(run[0]) // 2]) + bytes.fromhex(run[0].decode()), payload)
    return b"\0" + signature + shorter


def _with_digits(data: bytes) -> bytes:
    """Invert `_with_bytes`; anything else becomes no record that holds."""
    if data[:1] != b"\0":
        return data[1:]
    done = 1 + SIGNATURE_BYTES
    parts = [data[1:done]]
    while (at := data.find(b"\1", done)) >= 0:
        count = data[at + 1] if at + 1 < len(data) else 0
        parts += [data[done:at], data[at + 2 : at + 2 + count].hex().encode()]
        done = at + 2 + count
    return b"".join([*parts, data[done:]])


def tail(place: int) -> bytes:
    """Return the end of a place in the key space, by which a reader names a node that it knows."""
    return (place & 0xFFFFFF).to_bytes(3, "big")


def _threes(seen: bytes) -> set[bytes]:
    return {seen[at : at + 3] for at in range(0, len(seen) - 2, 3)}


def news(near: Sequence[tuple[int, int]], look: Look) -> list[int]:
    """Return which nodes an answer names. near: (place, distance) of nodes, nearest first. Returns their indices."""
    seen = _threes(look.seen)
    inside = [i for i, (_, distance) in enumerate(near) if distance < 1 << min(look.within, 160)]
    unseen = [i for i in inside or range(len(near)) if tail(near[i][0]) not in seen]
    return unseen[: look.named]


def is_full(held: Sequence[int], limits: SamplingLimits = SAMPLING) -> bool:
    """Return whether a model's records are elsewhere, too: the lower half of the nodes near a key says it holds much.

    held: the counts that the nodes claim, 0 for those that have none.
    """
    return bool(held) and sorted(held)[(len(held) - 1) // 2] > limits.full_share * RECORD.held_per_key
