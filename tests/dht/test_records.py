import contextlib
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.dht.records import (
    RECORD,
    Announcement,
    canonical_json,
    key_id,
    model_subkey,
    open_announcement,
    open_envelope,
    packed_text,
    sign_announcement,
)
from swarm.errors import RecordError, RecordExpired
from swarm.identity import SIGNATURE_BYTES, Identity
from tests.dht.support import NETWORK, announcement, signed

NOW = 1_800_000_000.0
ALICE, MALLORY = Identity(b"a" * 32), Identity(b"m" * 32)


def opened(data: bytes, now: float = NOW) -> Announcement:
    return open_announcement(data, now=now, network=NETWORK)


def resigned(payload: bytes, identity: Identity = ALICE) -> bytes:
    return identity.sign(b"swarm announcement", payload) + payload


def changed(**changes: object) -> bytes:
    """A record with raw JSON fields changed, signed again by its owner."""
    fields = json.loads(signed(ALICE, now=NOW)[SIGNATURE_BYTES:])
    return resigned(json.dumps(fields | changes, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


text = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=32)
addresses = st.lists(st.sampled_from(["1.2.3.4:5", "[2001:db8::1]:65535", "host.example:80", "a:1"]), max_size=8)
rates = st.none() | st.floats(min_value=0.001, max_value=1e9)


@given(
    public_name=text,
    addresses=addresses.map(tuple),
    decode_tps=rates,
    prefill_tps=rates,
    free_tokens=st.integers(0, 2**53 - 1),
    load=st.floats(0, 1e6),
    state=st.sampled_from(["joining", "online", "draining", "withdrawn"]),
    rtts=st.lists(st.tuples(st.just("0123456789abcdef"), st.floats(0, 1e6)), max_size=16).map(tuple),
    span=st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda s: s[0] < s[1]),
)
def test_what_was_signed_is_what_is_opened(span: tuple[int, int], **fields: object) -> None:
    record = announcement(ALICE, *span, now=NOW, **fields)
    assert opened(sign_announcement(record, ALICE)) == record


@given(st.data())
def test_any_changed_byte_is_rejected(data: st.DataObject) -> None:
    record = bytearray(signed(ALICE, now=NOW))
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        opened(bytes(record))


@given(st.binary(max_size=RECORD.bytes_max + 100))
def test_arbitrary_bytes_are_rejected_by_name(data: bytes) -> None:
    with pytest.raises(RecordError):
        opened(data)
    with pytest.raises(RecordError):
        opened(resigned(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(field=st.sampled_from(sorted(Announcement.model_fields)), value=json_values)
def test_a_field_of_any_value_is_accepted_or_rejected_by_name(field: str, value: object) -> None:
    with contextlib.suppress(RecordError):
        opened(changed(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 2}, "this side must upgrade"),
        ({"protocol": 1.0}, "protocol"),
        ({"protocol": True}, "protocol"),
        ({"network": "other"}, "another network"),
        ({"public_key": "AB" * 32}, "public_key"),
        ({"public_key": MALLORY.public_key.hex()}, "signature"),
        ({"root": "ab" * 31}, "root"),
        ({"model": "two\nlines"}, "model"),
        ({"model": "\u202ereversed"}, "model"),
        ({"model": ""}, "model"),
        ({"n_blocks": 0}, "n_blocks"),
        ({"n_blocks": 100_000}, "n_blocks"),
        ({"blocks": [4, 4]}, "blocks out of range"),
        ({"blocks": [8, 4]}, "blocks out of range"),
        ({"blocks": [0, 13]}, "blocks out of range"),
        ({"blocks": [-1, 3]}, "blocks"),
        ({"blocks": [0, 3, 5]}, "blocks"),
        ({"numeric_class": "float 32"}, "numeric_class"),
        ({"numeric_class": "a+b+c+d"}, "numeric_class"),
        ({"numeric_class": "float32++"}, "numeric_class"),
        ({"numeric_class": "f" * 33}, "numeric_class"),
        ({"addresses": ["1.2.3.4:5"] * 9}, "addresses"),
        ({"addresses": ["1.2.3.4"]}, "addresses"),
        ({"addresses": ["1.2.3.400:5"]}, "addresses"),
        ({"addresses": ["[::zz]:5"]}, "addresses"),
        ({"addresses": ["host:0"]}, "addresses"),
        ({"addresses": ["host:65536"]}, "addresses"),
        ({"addresses": ["user@host:1"]}, "addresses"),
        ({"addresses": ["ho st:1"]}, "addresses"),
        ({"addresses": ["\u0661.2.3.4:5"]}, "addresses"),
        ({"decode_tps": 0}, "decode_tps"),
        ({"decode_tps": "5"}, "decode_tps"),
        ({"load": -1}, "load"),
        ({"free_tokens": 2**53}, "free_tokens"),
        ({"free_tokens": 1.5}, "free_tokens"),
        ({"state": "sleeping"}, "state"),
        ({"rtts": [["0123456789abcdef", 1.0]] * 17}, "rtts"),
        ({"rtts": [["short", 1.0]]}, "rtts"),
        ({"public_name": " padded"}, "public_name"),
        ({"public_name": "x" * 65}, "public_name"),
        ({"sequence": -1}, "sequence"),
        ({"expires": NOW + 61}, "lifetime"),
        ({"expires": NOW - 1, "issued": NOW - 2}, "expired"),
        ({"expires": NOW + 91, "issued": NOW + 31}, "from the future"),
        ({"expires": NOW, "issued": NOW + 10}, "lifetime"),
        ({"padding": "x" * 2000}, "size"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        opened(changed(**changes))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
        b"[" * 1900,
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'"\\ud800"',
        b"\xff\xfe",
        b'{"a":' + b"9" * 1900 + b"}",
        b'{ "a":1}',
        b'{"a":1,"a":2}',
    ],
)
def test_a_payload_that_is_not_canonical_json_is_rejected(payload: bytes) -> None:
    with pytest.raises(RecordError):
        opened(resigned(payload))


def test_one_announcement_has_one_encoding() -> None:
    payload = signed(ALICE, now=NOW)[SIGNATURE_BYTES:]
    for other in (
        payload.replace(b":0.0,", b":0.00,"),
        payload.replace(b",", b", ", 1),
        payload.replace(b"o", b"\\u006f", 1),
    ):
        assert other != payload
        with pytest.raises(RecordError, match="canonical"):
            opened(resigned(other))


def test_a_record_lives_from_thirty_seconds_before_it_was_issued_until_it_expires() -> None:
    data = signed(ALICE, now=NOW)
    for now in (NOW - 30, NOW, NOW + 59.9):
        opened(data, now)
    for now in (NOW - 30.1, NOW + 60):
        with pytest.raises(RecordExpired):
            opened(data, now)


def test_an_unknown_field_is_signed_kept_and_ignored() -> None:
    data = signed(ALICE, now=NOW, colour={"deep": [1, 2]})
    record = opened(data)
    assert record.unknown_fields == ("colour",)
    assert sign_announcement(record, ALICE) == data
    with pytest.raises(RecordError, match="signature"):
        opened(data.replace(b"[1,2]", b"[1,3]"))


def test_a_record_of_the_next_protocol_can_be_stored_and_not_used() -> None:
    data = changed(protocol=2, state="teleporting", load="heavy")
    assert open_envelope(data, now=NOW, network=NETWORK).protocol == 2
    with pytest.raises(RecordError, match="theirs is 2, ours 1; this side must upgrade"):
        opened(data)


def test_nobody_signs_for_somebody_else() -> None:
    with pytest.raises(RecordError, match="its own"):
        sign_announcement(announcement(ALICE, now=NOW), MALLORY)


def test_a_full_announcement_fits_and_a_larger_one_is_refused() -> None:
    rtts = tuple((f"{i:016x}", 123.4) for i in range(16))
    names = tuple(f"host-{i}.example.org:31337" for i in range(8))
    full = announcement(ALICE, now=NOW, rtts=rtts, addresses=names, model="m" * 128, public_name="n" * 64)
    assert len(sign_announcement(full, ALICE)) <= RECORD.bytes_max
    with pytest.raises(RecordError, match="size"):
        sign_announcement(
            announcement(ALICE, now=NOW, addresses=("h" * 60 + ".x" * 30 + ":1",) * 8, extra="x" * 600), ALICE
        )


@given(text)
def test_keys_are_hashed_as_hivemind_hashes_them(name: str) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    assert key_id(name) == DHTID.generate(name).to_bytes()
    assert packed_text(name) == MSGPackSerializer.dumps(name)


def test_a_models_entry_binds_name_root_and_size() -> None:
    def subkey(**changes: object) -> str:
        return model_subkey(announcement(ALICE, now=NOW, **changes))

    assert subkey() == subkey(state="draining", sequence=1)
    assert len({subkey(), subkey(model="other"), subkey(root="cd" * 32), subkey(n_blocks=13)}) == 4


def test_canonical_json_refuses_what_json_cannot_carry() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            canonical_json(value)


def test_light_readers_import_neither_hivemind_nor_torch() -> None:
    code = (
        "import sys, swarm.dht.records, swarm.dht.store, swarm.dht.directory\n"
        "assert not {'hivemind', 'torch', 'transformers', 'msgpack'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
