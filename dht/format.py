"""The form of an answer and the bounds of a call, shared by all readers of the DHT. Neither hivemind nor libp2p."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgpack

from swarm.dht.records import RECORD, packed_text
from swarm.dht.sampling import unpacked
from swarm.dht.sealing import SEAL_BYTES
from swarm.dht.validator import Entry, RecordGate, pack_value
from swarm.errors import RecordError, RecordExpired
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of the calls between two nodes. All nodes share them: a caller keeps to the bounds of the other side."""

    bucket_size: int = limit(20, "nodes", "of one bucket of the routing table; a newcomer waits for a gap")
    waiting_max: int = limit(5, "nodes", "wait for a gap in one bucket; the one that came first is forgotten")
    replicas: int = limit(5, "nodes", "keep each record, at least")
    timeout_s: float = limit(3.0, "s", "a peer that does not answer a call by then is forgotten")
    find_timeout_s: float = limit(1.5, "s", "the same in a search: about five round trips to an unconnected peer")
    keys_max: int = limit(4, "keys", "in one find; 4 full keys fill half of p2pd's largest message, 4 MiB")
    named_max: int = limit(40, "nodes", "named for one key, two buckets: a crowd of liars does not hide all others")
    stores_max: int = limit(64, "entries", "in one store; a longer request is rejected")
    answer_bytes_max: int = limit(3 << 20, "bytes", "records in one answer; keys beyond are answered as not found")
    calls_max: int = limit(64, "calls", "of our own at one time; more wait")
    handled_max: int = limit(64, "calls", "of others at one time; more are refused")
    per_s: float = limit(50.0, "1/s", "others' calls, per peer; a stored entry counts like a call")
    burst: float = limit(400.0, "calls", "of one peer at once; more are refused")
    answered_per_s: float = limit(512 << 10, "bytes/s", "of records in answers to one peer; more calls are refused")
    answered_burst: float = limit(16 << 20, "bytes", "the same, at once: three surveys of the largest model")

    @property
    def key_bytes_max(self) -> int:
        """A key's part of the records in an answer to as many keys as there may be."""
        return self.answer_bytes_max // self.keys_max


CALLS = CallLimits()
_DICTIONARY_TAG = 0x50  # hivemind's msgpack extension for a dictionary of subkeys


def pack_dictionary(entries: Sequence[Entry]) -> bytes:
    """Return hivemind's wire form of a dictionary of subkeys, of the first entries_per_key."""
    entries = entries[: RECORD.entries_per_key]
    items = [[entry.place.subkey, pack_value(entry.data), entry.facts.expires] for entry in entries]
    latest = max((entry.facts.expires for entry in entries), default=0.0)
    inner = msgpack.packb([RECORD.entries_per_key, latest, items], use_bin_type=True)
    return bytes(msgpack.packb(msgpack.ExtType(_DICTIONARY_TAG, inner)))


def unpack_dictionary(value: bytes) -> list[tuple[bytes, bytes, float]]:
    """Invert pack_dictionary into (packed subkey, packed value, expiry); malformed items are left out."""
    try:  # every kind has a bound, because msgpack allocates the length that a header claims
        nothing_else = {f"max_{kind}_len": 0 for kind in ("array", "map", "bin", "str")}
        outer = msgpack.unpackb(value, max_ext_len=len(value), **nothing_else)
        if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY_TAG:
            return []
        bytes_max = RECORD.bytes_max + SEAL_BYTES + 3
        bounds = {"max_array_len": RECORD.entries_per_key, "max_bin_len": bytes_max, "max_str_len": 256}
        _, _, items = msgpack.unpackb(outer.data, raw=False, max_map_len=0, max_ext_len=0, **bounds)
        return [(packed_text(s), v, e) for s, v, e in items if _is_item(s, v, e)]
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return []


async def believe(gate: RecordGate, key: bytes, value: bytes) -> list[Entry]:
    """Return the entries of an answer that hold. Verified in slices, with a turn for the event loop in between."""
    items = unpack_dictionary(value)
    return await _believed(gate, [partial(gate.admit, key, *item) for item in items])


async def believe_sample(gate: RecordGate, key: bytes, data: bytes) -> list[Entry]:
    """Return the records of a sample that hold, as `believe` does."""
    records = unpacked(data)
    return await _believed(gate, [partial(gate.admit_span, key, record) for record in records])


async def _believed(gate: RecordGate, checks: Sequence[Callable[[], Entry]]) -> list[Entry]:
    believed: list[Entry] = []
    at_once = gate.limits.verify_slice
    false = 0
    for i, check in enumerate(checks):
        try:
            believed.append(check())
        except RecordExpired:  # clocks differ a little: not the node's fault
            pass
        except RecordError:
            false += 1
            if false >= 8:  # forged or misplaced records: the rest of the answer is not read
                break
        if i % at_once == at_once - 1:
            await asyncio.sleep(0)
    return believed


def peers_named(peers: Sequence[bytes], count_max: int = CALLS.named_max) -> list[bytes]:
    """Return the peer ids that an answer names for one key, without those that are too long to be any."""
    return [bytes(peer) for peer in peers[:count_max] if len(peer) <= 64]


def _is_item(subkey: object, value: object, expiration: object) -> bool:
    return (
        isinstance(subkey, str)
        and subkey.isascii()
        and len(subkey) < 200
        and isinstance(value, bytes)
        and isinstance(expiration, float)
    )
