import math

import pytest

from swarm.dht.records import packed_text
from swarm.dht.storage import RecordStorage, StorageLimits
from swarm.dht.validator import Entry, GateLimits, RecordGate, pack_value
from swarm.errors import RecordError
from swarm.identity import Identity
from tests.dht.support import NETWORK, signed

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> RecordGate:
    return RecordGate(NETWORK, clock)


@pytest.fixture
def storage(clock: Clock) -> RecordStorage:
    return RecordStorage(clock)


def entry(gate: RecordGate, data: bytes) -> Entry:
    facts = gate.facts(data)
    return Entry(data, facts, facts.span)


def admit(gate: RecordGate, data: bytes, **changes: object) -> Entry:
    facts = gate.facts(data)
    parts = {
        "key": facts.span.key,
        "subkey": packed_text(facts.span.subkey),
        "value": pack_value(data),
        "expiration": facts.expires,
    }
    return gate.admit(**parts | changes)


def test_a_record_is_admitted_in_its_two_places_only(gate: RecordGate, clock: Clock) -> None:
    data, other = signed(ALICE, now=clock.now), gate.facts(signed(BOB, 8, 12, now=clock.now, root="cd" * 32))
    facts = gate.facts(data)
    assert admit(gate, data).place == facts.span
    assert admit(gate, data, key=facts.model.key, subkey=packed_text(facts.model.subkey)).place == facts.model
    for changes in (
        {"key": other.span.key},
        {"key": facts.model.key},
        {"key": bytes(20)},
        {"subkey": packed_text(other.span.subkey)},
        {"subkey": b""},
        {"subkey": b"\xc0"},
    ):
        with pytest.raises(RecordError, match="misplaced"):
            admit(gate, data, **changes)


@pytest.mark.parametrize("expiration", [math.inf, -math.inf, math.nan, 1e308, 0.0, -1.0])
def test_an_expiry_that_is_not_the_records_is_refused(gate: RecordGate, clock: Clock, expiration: float) -> None:
    with pytest.raises(RecordError, match="expiry"):
        admit(gate, signed(ALICE, now=clock.now), expiration=expiration)


def test_a_slightly_different_expiry_is_refused_too(gate: RecordGate, clock: Clock) -> None:
    data = signed(ALICE, now=clock.now)
    for shift in (-5, 5):
        with pytest.raises(RecordError, match="expiry"):
            admit(gate, data, expiration=clock.now + 60 + shift)


@pytest.mark.parametrize(
    "value", [b"", b"\xc5", b"\xc5\xff\xff", b"\xc0", b"\x81\xa1a\x01", b"\xc5\x00\x01xx", b"\xc4\x01x"]
)
def test_a_value_that_is_no_packed_record_is_refused(gate: RecordGate, clock: Clock, value: bytes) -> None:
    with pytest.raises(RecordError):
        admit(gate, signed(ALICE, now=clock.now), value=value)


def test_a_remembered_record_still_expires(gate: RecordGate, clock: Clock) -> None:
    data = signed(ALICE, now=clock.now)
    admit(gate, data)
    clock.now += 61
    with pytest.raises(RecordError, match="expired"):
        admit(gate, data, expiration=clock.now - 1)


def test_the_newer_record_wins_and_an_older_one_changes_nothing(
    gate: RecordGate, storage: RecordStorage, clock: Clock
) -> None:
    old, new = (entry(gate, signed(ALICE, now=clock.now + i, load=float(i))) for i in (0, 5))
    assert storage.put(old)
    assert storage.put(new)
    assert not storage.put(old)
    assert storage.put(new)
    clock.now += 62  # the old one is over, the new one is not
    assert [held.data for held in storage.entries(new.place.key)] == [new.data]


def test_an_equal_sequence_does_not_replace(gate: RecordGate, storage: RecordStorage, clock: Clock) -> None:
    first, second = (entry(gate, signed(ALICE, now=clock.now, load=load)) for load in (1.0, 2.0))
    assert storage.put(first)
    assert not storage.put(second)
    assert storage.entries(first.place.key) == (first,)


def test_expired_entries_are_gone_and_free_their_bytes(gate: RecordGate, storage: RecordStorage, clock: Clock) -> None:
    for start in range(12):
        storage.put(entry(gate, signed(ALICE, start, 12, now=clock.now)))
    assert storage.bytes > 0
    clock.now += 70
    storage.put(entry(gate, signed(BOB, now=clock.now)))
    assert len(storage) == 1
    clock.now += 70
    assert storage.entries(gate.facts(signed(BOB, now=clock.now)).span.key) == ()
    assert storage.bytes == 0


def test_a_key_takes_256_entries_and_then_keeps_the_first(
    gate: RecordGate, storage: RecordStorage, clock: Clock
) -> None:
    owners = [Identity(i.to_bytes(32, "big")) for i in range(1, StorageLimits().entries_per_key + 2)]
    entries = [entry(gate, signed(owner, now=clock.now)) for owner in owners]
    assert [storage.put(one) for one in entries] == [True] * StorageLimits().entries_per_key + [False]
    assert storage.put(entry(gate, signed(owners[0], now=clock.now + 1))), "who is in may refresh"
    assert len(storage.entries(entries[0].place.key)) == StorageLimits().entries_per_key


def test_one_owner_cannot_fill_a_key(gate: RecordGate, storage: RecordStorage, clock: Clock) -> None:
    spans = [(a, b) for a in range(8) for b in range(9, 13)]
    kept = [storage.put(entry(gate, signed(ALICE, *span, now=clock.now))) for span in spans]
    assert sum(kept) == StorageLimits().owned_max
    assert storage.put(entry(gate, signed(BOB, now=clock.now)))


def test_memory_is_bounded_and_refused_entries_leave_nothing(gate: RecordGate, clock: Clock) -> None:
    storage = RecordStorage(clock, StorageLimits(bytes_max=20_000))
    entries = [
        entry(gate, signed(Identity(i.to_bytes(32, "big")), now=clock.now, root=f"{i:064x}")) for i in range(1, 50)
    ]
    kept = [storage.put(one) for one in entries]
    assert 5 < sum(kept) < 30
    assert storage.bytes <= 20_000
    assert len(storage._keys) == sum(kept)
    assert StorageLimits().bytes_max <= 64 << 20


def test_the_memory_of_verified_records_is_bounded(clock: Clock) -> None:
    gate = RecordGate(NETWORK, clock, limits=GateLimits(verified_max=10))
    for i in range(50):
        gate.facts(signed(ALICE, now=clock.now, load=float(i)))
    assert len(gate._verified) == 10
    assert GateLimits().verified_max <= 8192
