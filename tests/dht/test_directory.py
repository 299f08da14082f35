import time

import pytest

from swarm.blocks import Blocks
from swarm.dht.directory import Directory, DirectoryLimits, ModelEntry, Survey
from swarm.dht.records import SignedAnnouncement
from swarm.dht.store import MemoryStore
from swarm.dht.validator import Entry
from swarm.errors import RecordError
from swarm.identity import Identity
from tests.dht.support import NETWORK, ROOT, announcement, signed

ALICE, BOB, MALLORY = (Identity(name * 32) for name in (b"a", b"b", b"m"))


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore.make(NETWORK, clock)


def directory(store: MemoryStore, identity: Identity | None) -> Directory:
    return Directory(store, identity=identity, network=NETWORK, clock=store.gate.clock)


async def test_lists_the_servers_of_a_model_by_span(store: MemoryStore) -> None:
    await directory(store, BOB).announce(announcement(BOB, 4, 12))
    await directory(store, ALICE).announce(announcement(ALICE, 0, 4))
    found = await directory(store, None).servers(ROOT, 12)
    assert [(s.announcement.peer_id, str(s.announcement.span)) for s in found] == [
        (ALICE.peer_id, "0:4"),
        (BOB.peer_id, "4:12"),
    ]


async def test_a_refresh_replaces_the_record_and_prolongs_it(store: MemoryStore, clock: Clock) -> None:
    alice = directory(store, ALICE)
    first = await alice.announce(announcement(ALICE, load=1.0))
    second = await alice.announce(announcement(ALICE, load=2.0))
    assert second.signed.announcement.sequence > first.signed.announcement.sequence
    clock.now += 50
    await alice.announce(announcement(ALICE, load=3.0))
    clock.now += 50
    (found,) = await alice.servers(ROOT, 12)
    assert found.announcement.load == 3.0
    clock.now += 20
    assert await alice.servers(ROOT, 12) == ()


async def test_a_withdrawn_record_is_gone_and_its_replay_does_not_bring_it_back(store: MemoryStore) -> None:
    alice = directory(store, ALICE)
    published = await alice.announce(announcement(ALICE))
    await alice.withdraw()
    assert await alice.servers(ROOT, 12) == ()
    facts = store.gate.facts(published.signed.data)
    assert await store.put([Entry(published.signed.data, facts, facts.span)]) == (0,)
    assert await alice.servers(ROOT, 12) == ()
    await alice.announce(announcement(ALICE))
    assert len(await alice.servers(ROOT, 12)) == 1


async def test_a_server_that_moves_takes_back_its_old_span_alone(store: MemoryStore) -> None:
    alice = directory(store, ALICE)
    for start in (0, 4):
        await alice.announce(announcement(ALICE, start, start + 4))
    await alice.withdraw(Blocks(0, 4))
    assert [str(s.announcement.span) for s in await alice.servers(ROOT, 12)] == ["4:8"]
    await alice.withdraw()
    assert await alice.servers(ROOT, 12) == ()


async def test_of_a_peer_that_was_started_again_with_other_blocks_the_old_ones_are_left_out(store: MemoryStore) -> None:
    await directory(store, ALICE).announce(announcement(ALICE, 0, 4))
    await directory(store, BOB).announce(announcement(BOB, 0, 4))
    again = directory(store, ALICE)
    for start in (4, 8):
        await again.announce(announcement(ALICE, start, start + 4, channel_key="ef" * 32))
    found = [s.announcement for s in await directory(store, None).servers(ROOT, 12)]
    assert [(a.peer_id, a.blocks.start) for a in found] == [(BOB.peer_id, 0), (ALICE.peer_id, 4), (ALICE.peer_id, 8)]


async def test_a_claim_of_another_size_is_left_out(store: MemoryStore) -> None:
    await directory(store, MALLORY).announce(announcement(MALLORY, 0, 13, n_blocks=13))
    assert await directory(store, None).servers(ROOT, 12) == ()


async def test_a_squatter_adds_a_model_and_changes_none(store: MemoryStore) -> None:
    await directory(store, ALICE).announce(announcement(ALICE))
    for changes in ({"root": "ff" * 32}, {"n_blocks": 13}, {"model": "org/model-2"}):
        await directory(store, MALLORY).announce(announcement(MALLORY, **changes))
    models = await directory(store, None).models()
    assert ModelEntry("org/model", ROOT, 12) in models
    assert len(models) == 4
    assert await directory(store, None).models("org/model") == (
        ModelEntry("org/model", ROOT, 12),
        ModelEntry("org/model", ROOT, 13),
        ModelEntry("org/model", "ff" * 32, 12),
    )


async def test_the_next_protocol_is_kept_left_out_and_reported(store: MemoryStore, clock: Clock) -> None:
    await directory(store, ALICE).announce(announcement(ALICE))
    await directory(store, BOB).announce(announcement(BOB, protocol=2, hologram=True))
    survey = await directory(store, None).survey(ROOT, 12)
    assert [s.announcement.peer_id for s in survey.servers] == [ALICE.peer_id]
    assert survey.other_protocols == (2,)
    assert len(store.storage.entries(store.gate.facts(signed(BOB, now=clock.now)).span.key)) == 2


async def test_what_was_heard_of_the_next_survey_is_put_into_the_last_one(store: MemoryStore, clock: Clock) -> None:
    reader = directory(store, None)
    await directory(store, ALICE).announce(announcement(ALICE))
    await directory(store, BOB).announce(announcement(BOB))
    before = await reader.survey(ROOT, 12)
    old = store.storage.entries(store.gate.facts(signed(BOB, now=clock.now)).span.key)
    clock.now += 5
    await directory(store, BOB).announce(announcement(BOB, state="withdrawn"))
    new = store.storage.entries(store.gate.facts(signed(BOB, now=clock.now)).span.key)
    assert reader.updated(before, ROOT, 12, old) == before
    after = reader.updated(before, ROOT, 12, [*new, *old])
    assert [s.announcement.peer_id for s in after.servers] == [ALICE.peer_id]
    assert reader.updated(Survey((), ()), "ff" * 32, 12, new).servers == ()


async def test_only_its_own_network_and_identity(store: MemoryStore) -> None:
    with pytest.raises(RecordError, match="network"):
        await directory(store, ALICE).announce(announcement(ALICE, network="other"))
    with pytest.raises(RecordError, match="identity"):
        await directory(store, None).announce(announcement(ALICE))
    with pytest.raises(RecordError, match="its own"):
        await directory(store, ALICE).announce(announcement(BOB))


async def test_one_peer_announces_a_bounded_number_of_spans(store: MemoryStore) -> None:
    alice = directory(store, ALICE)
    for start in range(64):
        await alice.announce(announcement(ALICE, start, 100, n_blocks=100))
    with pytest.raises(RecordError, match="64"):
        await alice.announce(announcement(ALICE, 64, 100, n_blocks=100))


def test_readers_take_no_more_of_a_peer_than_it_may_announce() -> None:
    owner, other, most = Identity.generate(), Identity.generate(), DirectoryLimits().spans_max
    directory = Directory(MemoryStore(NETWORK, time.time), identity=None, network=NETWORK, clock=time.time)
    made = [announcement(owner, 0, stop, n_blocks=200) for stop in range(1, most + 50)]
    records = [SignedAnnouncement(one.model_copy(update={"sequence": n + 1}), b"") for n, one in enumerate(made)]
    records.append(SignedAnnouncement(announcement(other, 0, 4, n_blocks=200), b""))
    kept = directory._usable(records, ROOT, 200)
    assert len([1 for one in kept if one.announcement.public_key == owner.public_key.hex()]) == most
    assert len(made) in {one.announcement.sequence for one in kept}
    assert len(kept) == most + 1
