"""Keys with more records than a plan needs: readers take samples, and publishers go to keys below."""

import random
import statistics
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hivemind.p2p import PeerID

from swarm.dht.asking import looks_of, request_of
from swarm.dht.directory import Directory
from swarm.dht.node import SwarmNode
from swarm.dht.records import RECORD, SignedAnnouncement, branch_of, key_id, span_key
from swarm.dht.sampling import (
    Look,
    children,
    chosen,
    drawn,
    is_full,
    missing,
    news,
    ordered,
    packed,
    price,
    tail,
    tail_of,
    unpacked,
)
from swarm.dht.search import position
from swarm.dht.store import MemoryStore
from swarm.dht.validator import Entry, RecordGate
from swarm.errors import InvalidMessage
from swarm.identity import Identity
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK, ROOT, announcement, signed

NOW = 1_800_000_000.0
SALT = b"salt"
KEY = key_id(span_key(NETWORK, ROOT))
GATE = RecordGate(NETWORK, lambda: NOW)


def entries(count: int, *, start: int = 0, stop: int = 4, rtts: int = 0, **changes: object) -> list[Entry]:
    made, source = [], random.Random(3)
    for i in range(1, count + 1):
        trips = tuple((source.randbytes(8).hex(), source.randrange(1, 1000) / 10) for _ in range(rtts))
        key = source.randbytes(32).hex()
        data = signed(Identity(i.to_bytes(32, "big")), start, stop, now=NOW, rtts=trips, channel_key=key, **changes)
        facts = GATE.facts(data)
        made.append(Entry(data, facts, facts.span))
    return made


def keys_of(found: Sequence[Entry]) -> list[str]:
    return [entry.facts.owner for entry in found]


@asynccontextmanager
async def swarm(
    n_nodes: int, held: Sequence[Entry], *, gaps: bool = False
) -> AsyncIterator[tuple[MemoryNetwork, list[SwarmNode], SwarmNode]]:
    """Nodes that have met, each key's records at the nodes near it, and a reader. gaps: one node lacks each record."""
    source, network = random.Random(1), MemoryNetwork()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            network.node(identity=Identity(source.randbytes(32)), clock=lambda: NOW)
        )
        nodes = [first]
        for i in range(n_nodes - 1):
            own = Identity(source.randbytes(32))
            joining = network.node(*first.addresses, identity=own, seed=i, clock=lambda: NOW)
            nodes.append(await stack.enter_async_context(joining))
        for number, entry in enumerate(levelled(held)):
            place = int.from_bytes(entry.place.key)
            for rank, node in enumerate(sorted(nodes, key=lambda node: place_of_peer(node) ^ place)[:13]):
                if not gaps or rank != number % n_nodes:
                    node.storage.put(entry)
        reader = await stack.enter_async_context(network.node(*first.addresses, client=True, clock=lambda: NOW))
        yield network, nodes, reader


def levelled(held: Sequence[Entry]) -> list[Entry]:
    """Put records under the keys that servers choose which come one after the other."""
    room: Counter[bytes] = Counter()
    placed = []
    for entry in held:
        place = next(place for place in entry.facts.spans() if room[place.key] < RECORD.held_per_key)
        room[place.key] += 1
        placed.append(Entry(entry.data, entry.facts, place))
    return placed


def place_of_peer(node: SwarmNode) -> int:
    return position(PeerID.from_base58(node.peer_id).to_bytes())


def directory(of: SwarmNode) -> Directory:
    return Directory(of, identity=None, network=NETWORK, clock=lambda: NOW)


def owners(servers: Sequence[SignedAnnouncement]) -> set[str]:
    return {server.announcement.public_key for server in servers}


# --- pure -------------------------------------------------------------------------------------------------------------


def test_nodes_agree_on_one_readers_sample_and_readers_differ() -> None:
    held = entries(100)
    shuffled = random.Random(2).sample(held, len(held))
    assert keys_of(ordered(held, SALT)) == keys_of(ordered(shuffled, SALT))
    assert keys_of(ordered(held, SALT))[:20] != keys_of(ordered(held, b"other"))[:20]


def test_slices_share_a_sample_without_repeating_records() -> None:
    held = entries(100)
    first = [unpacked(chosen(held, Look(SALT, part, 5, 3000))) for part in range(5)]
    assert all(len(chosen(held, Look(SALT, part, 5, 3000))) <= 3000 for part in range(5))
    together = [record for part in first for record in part]
    assert min(map(len, first)) >= 4
    assert len(set(together)) == len(together)
    whole = [unpacked(chosen(held, Look(SALT, part, 5, 1 << 20))) for part in range(5)]
    assert {record for part in whole for record in part} == {entry.data for entry in held}
    assert [part[: len(few)] for part, few in zip(whole, first, strict=True)] == first


def test_nodes_that_hold_other_records_cut_the_same_slices() -> None:
    held = entries(60)
    whole = [set(unpacked(chosen(held, Look(SALT, part, 5, 1 << 20)))) for part in range(5)]
    fewer = [set(unpacked(chosen(held[7:], Look(SALT, part, 5, 1 << 20)))) for part in range(5)]
    assert all(part <= other for part, other in zip(fewer, whole, strict=True))


def test_reader_pays_for_the_records_that_it_gets() -> None:
    held = entries(10)
    n_bytes = sum(len(entry.data) for entry in held)
    assert price(held, None) == price(held, Look(SALT, size=1 << 20, whole=True)) == n_bytes
    assert price(held, Look(SALT, size=1000, whole=True)) == 0
    assert price(held, Look(SALT, parts=5, size=1 << 20)) == n_bytes // 5
    assert price(held, Look(SALT, parts=5, size=100)) == 16 * len(held) + 48 * len(held) // 5, "all are looked at"
    assert price(held, Look(SALT, size=1, below=True)) == 64 * len(held)
    assert price(held, Look(SALT, size=0)) == price([], Look(SALT, size=1)) == 0


def test_fast_servers_come_first_and_claims_do_not_fill_a_sample() -> None:
    fast, honest = entries(40, decode_tps=1e9), entries(120, decode_tps=10.0)[40:]
    sample = set(keys_of(ordered([*honest, *fast], SALT))[:24])  # fast ones alone would fill it
    assert len(sample & set(keys_of(fast))) >= 16
    assert len(sample & set(keys_of(honest))) >= 2


def test_long_spans_of_the_same_speed_come_first() -> None:
    long, short = entries(40, stop=8, decode_tps=500.0), entries(80, stop=1, decode_tps=4000.0)[40:]
    assert long[0].facts.cost == short[0].facts.cost
    sample = set(keys_of(ordered([*short, *long], SALT))[:30])  # two thirds are drawn by weight
    assert len(sample & set(keys_of(long))) >= 20


def test_withdrawn_records_come_last() -> None:
    held = [*entries(3, state="withdrawn"), *entries(9)[3:]]
    assert set(keys_of(ordered(held, SALT))[-3:]) == set(keys_of(held[:3]))


def test_damaged_or_inflated_answers_hold_no_records() -> None:
    held = entries(3)
    data = packed(held)
    assert unpacked(data) == [entry.data for entry in held]
    assert unpacked(data[:-3]) == unpacked(b"") == unpacked(b"x" * 50) == []
    bomb = packed([Entry(bytes(1_000), held[0].facts, held[0].place)] * 5_000)  # each as long as a record may be
    assert len(bomb) < 50_000
    assert len(unpacked(packed([Entry(bytes(1_000), held[0].facts, held[0].place)] * 50))) == 50
    assert unpacked(bomb) == []


def test_a_few_bytes_stand_for_no_million_records() -> None:
    packer = zlib.compressobj()
    bomb = packer.compress(bytes(4 << 20)) + packer.flush()
    assert len(bomb) < 5000
    assert unpacked(bomb) == []
    held = packed(entries(1))
    long = Entry(entries(1)[0].data + b"\1\0" * 30_000, entries(1)[0].facts, entries(1)[0].place)
    assert unpacked(packed([long])) == []
    assert len(unpacked(held)) == 1


def test_digits_of_any_record_come_back() -> None:
    source = random.Random(1)
    for _ in range(200):
        digits = source.randbytes(source.randrange(8, 200)).hex().encode()
        record = source.randbytes(64) + b'{"a":"' + digits + b'","b":"' + digits[:20] + b'"}'
        entry = Entry(record, entries(1)[0].facts, entries(1)[0].place)
        assert unpacked(packed([entry])) == [record]


def test_who_wants_no_bytes_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    held = entries(3)
    monkeypatch.setattr("swarm.dht.sampling.drawn", None)
    assert chosen(held, Look(SALT, size=0, below=True, seen=b"abc")) == b""


@pytest.mark.parametrize(("part", "parts"), [(0, 257), (5, 5), (1, 0), (0, 2**32 - 1)])
def test_slices_that_are_too_thin_or_not_there_are_refused(part: int, parts: int) -> None:
    request = request_of([(b"k" * 20, Look(SALT, part, parts, 4096))], b"")
    with pytest.raises(InvalidMessage):
        looks_of(request)
    assert looks_of(request_of([(b"k" * 20, Look(SALT, 255, 256, 4096))], b""))


def test_names_only_nodes_that_the_reader_does_not_know() -> None:
    near = [(place, place) for place in (1, 2, 3, 1000, 2000)]
    assert news(near, Look(SALT, named=2)) == [0, 1]
    assert news(near, Look(SALT, named=2, seen=tail(1) + tail(3))) == [1, 3]
    assert news(near, Look(SALT, named=5, within=2)) == [0, 1, 2]
    assert news(near[3:], Look(SALT, named=5, within=2)) == [0, 1], "where none is near, any is better"


def test_few_nodes_that_claim_a_full_key_do_not_make_it_one() -> None:
    assert not is_full([])
    assert not is_full([0, 0, 0, 0, 100_000, 100_000, 100_000])
    assert is_full([400, 0, 400, 0, 400, 0, 400]), "two of the nearest seven need not hold it, and one lies"


def test_keys_end_at_the_deepest_level() -> None:
    key = span_key(NETWORK, ROOT)
    for _ in range(RECORD.depth_max):
        _, key = children(key)
    assert children(key) == ()


def test_a_third_of_short_answers_is_drawn_without_claims() -> None:
    held = [*entries(20, decode_tps=1e9), *entries(60, decode_tps=1.0)[20:]]
    firsts = [ordered(held, bytes([i]))[0].facts.cost for i in range(150)]
    assert 20 < sum(cost > 1 for cost in firsts) < 60


def test_servers_of_rare_blocks_come_early() -> None:
    held = [*entries(60), *entries(61, start=8, stop=12)[60:]]
    ranks = [keys_of(ordered(held, bytes([i]))).index(held[-1].facts.owner) for i in range(40)]
    assert statistics.median(ranks) < 6


def test_node_sends_only_what_the_reader_misses() -> None:
    held = [*entries(20), *entries(24, start=4, stop=8)[20:]]
    has = b"".join(tail_of(drawn(entry, SALT)) for entry in held[:15])
    rest = unpacked(chosen(held, Look(SALT, size=1 << 20, below=True, seen=has)))
    assert set(rest) == {entry.data for entry in held[15:]}
    of_block = unpacked(chosen(held, Look(SALT, size=1 << 20, below=True, blocks=missing(held[:20], 8))))
    assert set(of_block) == {entry.data for entry in held[20:]}


def test_blocks_without_a_living_server_are_missing() -> None:
    held = [*entries(2), *entries(3, start=4, stop=8, state="withdrawn")[2:]]
    assert missing(held, 12) == (0b1111_1111_0000).to_bytes(2, "little")
    assert missing(held, 4) == b""


def test_records_travel_with_bytes_for_digits_and_arrive_as_they_were() -> None:
    held = entries(3, rtts=16)
    odd = [b"s" * 64 + b'{"ab":"\1\2"}', b"s" * 64 + b"ab" * 90, b"s" * 64]
    strange = [Entry(data, held[0].facts, held[0].place) for data in odd]
    assert unpacked(packed([*held, *strange])) == [*(entry.data for entry in held), *odd]
    assert len(packed(held)) < 0.45 * sum(len(entry.data) for entry in held)


# --- over a network ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.virtual_clock
async def test_reader_of_a_large_key_takes_its_share_of_bytes() -> None:
    held = entries(500, rtts=16)
    async with swarm(30, held) as (network, _, reader):
        assert reader.member is not None
        own = reader.member.daemon.p2p.peer_id
        before = network.moved[own]
        first = await directory(reader).survey(ROOT, 12)
        moved = network.moved[own] - before
        second = await directory(reader).survey(ROOT, 12)
        print(moved, len(first.servers), len(owners(first.servers) & owners(second.servers)))
        assert moved <= 256 << 10
        assert 200 < len(first.servers) < 500
        assert owners(first.servers) != owners(second.servers)
        everybody = await directory(reader).survey(ROOT, 12, everybody=True)
        assert len(everybody.servers) == 500


@pytest.mark.virtual_clock
@pytest.mark.slow("thirty nodes")
@pytest.mark.parametrize("count", [1, 12, 60])
async def test_reader_of_a_small_key_finds_all_records(count: int) -> None:
    async with swarm(30, entries(count)) as (_, _, reader):
        assert len((await directory(reader).survey(ROOT, 12)).servers) == count


@pytest.mark.virtual_clock
@pytest.mark.parametrize("count", [24, 60])
async def test_record_that_one_node_lacks_is_found(count: int) -> None:
    async with swarm(6, entries(count), gaps=True) as (_, _, reader):
        assert len((await directory(reader).survey(ROOT, 12)).servers) == count


@pytest.mark.virtual_clock
@pytest.mark.slow("thirty nodes")
async def test_reader_finds_all_of_a_few_hundred_servers() -> None:
    async with swarm(30, entries(250)) as (_, _, reader):
        assert len((await directory(reader).survey(ROOT, 12)).servers) == 250


# --- keys below -------------------------------------------------------------------------------------------------------


@pytest.mark.slow("hundreds of signatures")
async def test_servers_of_a_full_key_are_found_below_it() -> None:
    store = MemoryStore.make(NETWORK, lambda: NOW)
    count = RECORD.held_per_key + 40
    made = [Identity(i.to_bytes(32, "big")) for i in range(1, count + 1)]
    for owner in made:
        mine = Directory(store, identity=owner, network=NETWORK, clock=lambda: NOW)
        assert (await mine.announce(announcement(owner, now=NOW))).replicas == 1
    above = store.storage.entries(KEY)
    below = [store.storage.entries(key_id(span_key(NETWORK, ROOT, bit))) for bit in "01"]
    assert len(above) == RECORD.held_per_key
    assert sum(map(len, below)) == 40
    assert all(branch_of(entry.facts.owner)[0] == bit for bit, held in zip("01", below, strict=True) for entry in held)
    reader = Directory(store, identity=None, network=NETWORK, clock=lambda: NOW)
    assert len((await reader.survey(ROOT, 12, everybody=True)).servers) == count
    assert owners((await reader.survey(ROOT, 12)).servers) == {owner.public_key.hex() for owner in made}


async def test_record_below_goes_up_again_when_there_is_room() -> None:
    clock = [NOW]
    store = MemoryStore.make(NETWORK, lambda: clock[0])
    for entry in entries(RECORD.held_per_key):
        store.storage.put(entry)
    owner = Identity(b"o" * 32)
    mine = Directory(store, identity=owner, network=NETWORK, clock=lambda: clock[0], source=random.Random(1))
    await mine.announce(announcement(owner, now=NOW))
    assert owner.public_key.hex() not in keys_of(store.storage.entries(KEY))
    clock[0] += RECORD.lifetime_s + 1  # the others are gone
    for _ in range(60):
        await mine.announce(announcement(owner, now=clock[0]))
    assert owner.public_key.hex() in keys_of(store.storage.entries(KEY))
    assert len((await mine.survey(ROOT, 12)).servers) == 1


async def test_withdrawn_record_below_a_full_key_is_gone() -> None:
    store = MemoryStore.make(NETWORK, lambda: NOW)
    for entry in entries(RECORD.held_per_key):
        store.storage.put(entry)
    owner = Identity(b"o" * 32)
    mine = Directory(store, identity=owner, network=NETWORK, clock=lambda: NOW)
    await mine.announce(announcement(owner, now=NOW))
    reader = Directory(store, identity=None, network=NETWORK, clock=lambda: NOW)
    assert owner.public_key.hex() in owners((await reader.survey(ROOT, 12, everybody=True)).servers)
    await mine.withdraw()
    assert owner.public_key.hex() not in owners((await reader.survey(ROOT, 12, everybody=True)).servers)
