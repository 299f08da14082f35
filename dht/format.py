"""What every reader of the DHT shares: the form of an answer, and the bounds of a call. Neither hivemind nor libp2p."""

import asyncio
from collections.abc import Sequence

import msgpack

from swarm.dht.records import RECORD_BYTES_MAX, packed_text
from swarm.dht.sealing import SEAL_BYTES
from swarm.dht.storage import SUBKEYS_MAX
from swarm.dht.validator import Entry, RecordGate, pack_value
from swarm.errors import RecordError, RecordExpired

BUCKET_SIZE = 20
REPLICAS = 5
CALL_TIMEOUT_S = 3.0
FIND_TIMEOUT_S = 1.5  # in a search, where others answer as well: some five round trips for who is not connected yet
KEYS_MAX = 4  # keys in one find: 4 full keys fill half of p2pd's largest message, 4 MiB
FALSE_MAX = 8  # forged or misplaced records in one answer; then the rest of it is not looked at
NAMED_MAX = 2 * BUCKET_SIZE  # neighbours in one answer for one key, so that a crowd of liars does not hide all others
FOUND_MAX = NAMED_MAX * SUBKEYS_MAX  # records that one search keeps per key: all that it can be told, or liars fill it
VERIFY_SLICE = 24  # records checked without a pause: about 2 ms
RATE, BURST = 50.0, 400.0  # others' calls a second, per peer; a stored entry counts like a call
_DICTIONARY_TAG = 0x50  # hivemind's msgpack extension for a dictionary of subkeys
_NOTHING_ELSE = {
    f"max_{kind}_len": 0 for kind in ("array", "map", "bin", "str")
}  # msgpack makes room for what is claimed


def pack_dictionary(entries: Sequence[Entry]) -> bytes:
    """Return hivemind's wire form of a dictionary of subkeys."""
    items = [[entry.place.subkey, pack_value(entry.data), entry.facts.expires] for entry in entries]
    latest = max((entry.facts.expires for entry in entries), default=0.0)
    inner = msgpack.packb([SUBKEYS_MAX, latest, items], use_bin_type=True)
    return bytes(msgpack.packb(msgpack.ExtType(_DICTIONARY_TAG, inner)))


def unpack_dictionary(value: bytes) -> list[tuple[bytes, bytes, float]]:
    """Invert pack_dictionary into (packed subkey, packed value, expiry); what is malformed is left out."""
    try:
        outer = msgpack.unpackb(value, max_ext_len=len(value), **_NOTHING_ELSE)
        if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY_TAG:
            return []
        limits = {"max_array_len": SUBKEYS_MAX, "max_bin_len": RECORD_BYTES_MAX + SEAL_BYTES + 3, "max_str_len": 256}
        _, _, items = msgpack.unpackb(outer.data, raw=False, max_map_len=0, max_ext_len=0, **limits)
        return [(packed_text(s), v, e) for s, v, e in items if _is_item(s, v, e)]
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return []


async def believe(gate: RecordGate, key: bytes, value: bytes, slice_records: int = VERIFY_SLICE) -> list[Entry]:
    """Pick the records that hold out of an answer for one key, `slice_records` at a time without a pause."""
    believed: list[Entry] = []
    false = 0
    for i, (subkey, packed, expiration) in enumerate(unpack_dictionary(value)):
        try:
            believed.append(gate.admit(key, subkey, packed, expiration))
        except RecordExpired:  # clocks differ a little: nobody's fault
            pass
        except RecordError:
            false += 1
            if false >= FALSE_MAX:
                break
        if i % slice_records == slice_records - 1:
            await asyncio.sleep(0)
    return believed


def _is_item(subkey: object, value: object, expiration: object) -> bool:
    return (
        isinstance(subkey, str)
        and subkey.isascii()
        and len(subkey) < 200
        and isinstance(value, bytes)
        and isinstance(expiration, float)
    )
