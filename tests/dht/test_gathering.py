"""Readers of large models: which nodes they ask, for which records, and how many bytes that moves."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from swarm.dht.asking import request_of
from swarm.dht.fetch import Reading, Slices, spread
from swarm.dht.records import RECORD, span_key
from swarm.dht.sampling import SAMPLING, Ask, Found, chosen, drawn, for_plan, tail_of, unpacked
from swarm.dht.search import EVERYWHERE, Result, Searcher, position
from swarm.dht.validator import Entry
from tests.dht.support import NETWORK, ROOT
from tests.dht.test_sampling import KEY, SALT, entries

FIRST = span_key(NETWORK, ROOT)


@dataclass
class Far:
    """Nodes with records, and a reader that knows some of them. around: those that keep the model's first key."""

    held: dict[bytes, Sequence[Entry]]
    known: list[bytes]
    around: list[bytes] = field(default_factory=list)
    first: int = RECORD.held_per_key  # records under the model's first key
    late: dict[bytes, Sequence[Entry]] = field(default_factory=dict)  # records that no answer has room for
    searched: int = 0
    asked: Counter[bytes] = field(default_factory=Counter)
    tried: set[bytes] = field(default_factory=set)
    names: Callable[[bytes], Sequence[bytes]] = lambda _: ()
    searcher: Searcher = field(init=False)

    def __post_init__(self) -> None:
        self.searcher = Searcher(self.call, random.Random(1))
        radius, ten = (10 << 160) // len(self.held), list(self.held)[:10]
        self.searcher.surroundings.learn(position(ten[-1]) ^ radius, ten)

    async def read(self, n_blocks: int = 4) -> Result:
        reading = Reading(self.searcher, self.search, lambda: self.known, lambda entries: None, 1)
        return (await reading.read(FIRST, for_plan(SALT, n_blocks)))[FIRST]

    async def search(self, places: Sequence[bytes], salt: bytes) -> dict[bytes, Result]:
        self.searched += 1
        held = dict.fromkeys(self.around, self.first)
        return {KEY: Result(nodes=list(self.around), held=held, more=list(self.around))}

    async def call(self, peer: bytes, asks: Sequence[Ask]) -> list[Found] | None:
        self.tried.add(peer)
        if peer not in self.held:
            return None
        found = []
        for key, look in asks:
            assert look is not None
            late = self.late.get(peer, ()) if look.blocks else ()
            by_data = {entry.data: entry for entry in (*self.held[peer], *late)}
            if key == KEY:
                self.asked[peer] += 1
                data = chosen(list(by_data.values()), look)
                size = request_of([(key, look)]).ByteSize() + len(data) + 40
                found.append(Found([by_data[one] for one in unpacked(data)], (), len(by_data), size))
            else:
                found.append(Found((), self.names(peer), 0, 200))
        return found


def peers(count: int) -> list[bytes]:
    source = random.Random(2)
    return [source.randbytes(34) for _ in range(count)]


def shared(held: Sequence[Entry], nodes: Sequence[bytes]) -> dict[bytes, Sequence[Entry]]:
    """Give each sixteenth of the records to the nodes of a sixteenth of the key space."""
    return {peer: held[position(peer) >> 156 :: 16] for peer in nodes}


def owners(result: Result) -> set[str]:
    return {entry.facts.owner for entry in result.entries.values()}


def test_neighbours_send_different_slices_and_then_others() -> None:
    source = random.Random(1)
    nodes = [source.randbytes(34) for _ in range(64)]
    slices = Slices((1 << 157) - 1, 4, SALT)
    slices.add(nodes)
    first = slices.next()
    assert sorted(peer for peer, _ in first) == sorted(nodes)
    sent: dict[int, list[int]] = {}
    for peer, part in first:
        sent.setdefault(position(peer) >> 157, []).append(part)
        slices.came(peer, part, (), more=False)
    assert all(max(Counter(parts).values()) - min(Counter(parts).values()) <= 1 for parts in sent.values())
    assert not set(slices.next()) & set(first)


def test_neighbours_are_told_what_has_come_and_others_are_not() -> None:
    slices, held = Slices((1 << 157) - 1, 1, SALT), entries(3)
    nodes = sorted((bytes([i]) * 34 for i in range(64)), key=position)
    slices.add(nodes)
    slices.came(nodes[0], 0, held, more=True)
    assert slices.seen(nodes[1], 0) == b"".join(tail_of(drawn(entry, SALT)) for entry in held)
    assert slices.seen(nodes[-1], 0) == b""


def test_last_round_asks_neighbours_for_all_slices_that_they_have_not_sent():
    nodes = [bytes([i]) * 4 for i in range(5)]
    slices = Slices(EVERYWHERE, 4, SALT)
    slices.add(nodes)
    first = slices.next()
    assert sorted(peer for peer, _ in first) == nodes
    for peer, part in first:
        slices.came(peer, part, [], more=False)
    rest = slices.next(every=True)
    assert sorted([*first, *rest]) == [(peer, part) for peer in nodes for part in range(4)]


def test_nodes_that_have_sent_nothing_are_asked_once() -> None:
    slices = Slices(1, 1, SALT)
    slices.add([b"a", b"b"])
    assert sorted(slices.next()) == [(b"a", 0), (b"b", 0)]
    slices.came(b"b", 0, (), more=True)
    assert slices.next() == [(b"b", 0)]
    slices.came(b"b", 0, (), more=False)
    assert slices.next() == []


def test_first_nodes_are_spread_where_a_reader_knows_many_of_one_place() -> None:
    source = random.Random(1)
    nodes = [source.randbytes(34) for _ in range(4000)]
    crowd = [peer for peer in nodes if position(peer) < 1 << 153][:30]
    others = [peer for peer in nodes if position(peer) >= 1 << 153][:30]
    assert len(set(crowd) & set(spread([*crowd, *others], source)[:20])) < 4


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.virtual_clock
async def test_reader_of_a_large_model_spares_its_first_key_until_few_servers_are_left() -> None:
    held, nodes = entries(200), peers(20)
    far = Far(dict.fromkeys(nodes, held), nodes, around=nodes[:12])
    assert len((await far.read()).entries) == len((await far.read()).entries) == 200
    assert far.searched == 1
    far.held, far.first = dict.fromkeys(nodes, held[:9]), 9
    assert len((await far.read()).entries) == 9
    assert far.searched == 2


@pytest.mark.virtual_clock
@pytest.mark.slow("a thousand signatures")
@pytest.mark.parametrize("empty", [0.0, 0.9])
async def test_look_up_of_a_large_model_moves_its_bytes_at_most(empty: float) -> None:
    held, nodes, source = entries(1000, rtts=16), peers(200), random.Random(3)
    kept = {peer: some if source.random() >= empty else () for peer, some in shared(held, nodes).items()}
    result = await Far(kept, nodes, around=[peer for peer in nodes if kept[peer]][:7]).read()
    assert result.moved <= SAMPLING.plan_bytes + 8192
    assert len(result.entries) > (150 if empty else 400)  # few nodes have some of the records


@pytest.mark.virtual_clock
async def test_reader_asks_for_blocks_that_its_sample_misses() -> None:
    held, nodes = entries(200), peers(60)
    rare = entries(201, start=4, stop=12)[200:]
    far = Far(shared(held, nodes), nodes, around=nodes[:7], late={nodes[9]: rare})
    assert rare[0].facts.owner in owners(await far.read(12))


@pytest.mark.virtual_clock
async def test_reader_that_knows_few_nodes_learns_of_others() -> None:
    nodes, source = peers(600), random.Random(3)
    far = Far(shared(entries(300), nodes), nodes[:60], around=nodes[:7], names=lambda _: source.sample(nodes, 8))
    await far.read()
    assert 200 < len(far.asked) <= SAMPLING.nodes_max


@pytest.mark.virtual_clock
async def test_reader_asks_few_nodes_of_one_that_names_ghosts() -> None:
    nodes, source = peers(600), random.Random(3)
    ghosts = [source.randbytes(34) for _ in range(400)]
    far = Far(shared(entries(300), nodes), nodes[:60], around=nodes[:7])
    far.names = lambda peer: source.sample(ghosts if peer == nodes[0] else nodes, 8)
    await far.read()
    assert len(far.asked) > 150
    assert sum(ghost in far.tried for ghost in ghosts) <= SAMPLING.blamed_max
