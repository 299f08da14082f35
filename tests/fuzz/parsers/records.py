"""The parsers of records, of their entries in the DHT, and of the addresses that they have."""

import contextlib
import json

from swarm.access import Access
from swarm.dht import helper
from swarm.dht.format import believe, pack_dictionary, unpack_dictionary
from swarm.dht.records import check_address, key_id, open_announcement, packed_text, span_key, span_subkey
from swarm.dht.search import SearchLimits
from swarm.dht.validator import RecordGate, pack_value
from swarm.errors import RecordError
from swarm.identity import SIGNATURE_BYTES
from tests.dht.support import NETWORK, ROOT, signed
from tests.fuzz.parsers.base import ALICE, NOW, SECRET, Opened, Parser, awaited, run

RECORD = signed(ALICE, now=NOW, addresses=("192.0.2.7:4000", "[2001:db8::1]:4000"), rtts=(("0123456789abcdef", 1.5),))
KEY = key_id(span_key(NETWORK, ROOT))
SUBKEY = packed_text(span_subkey(ALICE.public_key.hex(), (0, 4)))


def gate_of(access: Access | None = None) -> RecordGate:
    return RecordGate(NETWORK, lambda: NOW, access or Access())


HELD = gate_of().admit(KEY, SUBKEY, pack_value(RECORD), NOW + 60)


def _read_announcement(data: bytes) -> object:
    record = open_announcement(data, now=NOW, network=NETWORK, verified=True)
    return record.span, record.peer_id, record.unknown_fields, record.model_dump_json()


def opened_record(record: bytes) -> Opened:
    payload = record[SIGNATURE_BYTES:]
    return json.loads(payload), _signed


def _signed(payload: bytes) -> bytes:
    return ALICE.sign(b"swarm announcement", payload) + payload


def _read_entry(value: bytes) -> object:
    gate = gate_of()
    with contextlib.suppress(RecordError):
        gate.facts(value[3:], ours=True)  # past the signature
    return gate.admit(KEY, SUBKEY, value, NOW + 60)


def _opened_entry(value: bytes) -> Opened:
    fields, close = opened_record(value[3:])
    return fields, lambda text: pack_value(close(text)[: (1 << 16) - 1])


def _read_private_entry(value: bytes) -> object:
    gate = gate_of(Access(SECRET))
    key = key_id(span_key(gate.seal.scope, ROOT))
    return gate.admit(key, packed_text(gate.seal.subkey(span_subkey(ALICE.public_key.hex(), (0, 4)))), value, NOW + 60)


def _private_entry() -> bytes:
    return pack_value(gate_of(Access(SECRET)).seal.close(RECORD))


def packed_entries() -> bytes:
    return pack_dictionary([HELD])


def _read_dictionary(data: bytes) -> None:
    assert len(unpack_dictionary(data)) <= SearchLimits().found_max
    run(believe(gate_of(), KEY, data))


async def _read_address(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        check_address(text)
    except ValueError:
        return
    try:
        literal = await helper.resolved(text)
    except OSError:
        return
    assert literal is not None
    helper.is_global(literal)


def _all() -> tuple[Parser, ...]:
    return (
        Parser("announcement", _read_announcement, (RecordError,), (RECORD,), opened_record),
        Parser("entry", _read_entry, (RecordError,), (pack_value(RECORD),), _opened_entry),
        Parser("private-entry", _read_private_entry, (RecordError,), (_private_entry(),)),
        Parser("dictionary", _read_dictionary, (), (packed_entries(), b"\xdd\0\0\0\xff" * 9)),
        Parser(
            "address", awaited(_read_address), (), (b"192.0.2.7:1", b"[2001:db8::1]:80", b"[fe80::1%e]:80", b"a.b:1")
        ),
    )


PARSERS = _all()
