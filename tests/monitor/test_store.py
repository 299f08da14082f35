"""The light reader's search, over nodes that are a dictionary."""

import asyncio
import hashlib
import time
from collections.abc import Mapping

import pytest

from swarm.dht.directory import Directory
from swarm.dht.format import CALLS, pack_dictionary
from swarm.dht.light.limits import ReaderLimits
from swarm.dht.light.store import LightStore
from swarm.dht.messages import FOUND_DICTIONARY, FindRequest, FindResponse, PingResponse, varint
from swarm.dht.records import key_id
from swarm.dht.search import SearchLimits
from swarm.dht.validator import Entry, RecordGate
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.monitor.assess import KnownModel
from swarm.monitor.reading import ReadingLimits, read
from tests.dht.support import NETWORK, ROOT, signed


class FakeHost:
    """Nodes by peer id: each holds records by key and names all others. Notes every call."""

    alive = True

    def __init__(self, count: int) -> None:
        self.nodes: dict[bytes, dict[bytes, list[Entry]]] = {bytes([0, 36, n]): {} for n in range(count)}
        self.dead: set[bytes] = set()
        self.asked: list[tuple[bytes, int]] = []
        self.gate = RecordGate(NETWORK, time.time)

    def nearest(self, key: bytes) -> list[bytes]:
        place = int.from_bytes(key)
        return sorted(self.nodes, key=lambda n: int.from_bytes(hashlib.sha1(n).digest()) ^ place)

    def announce(self, data: bytes, replicas: int = 5) -> None:
        facts = self.gate.facts(data)
        for place in (facts.span, facts.model):
            for peer in self.nearest(place.key)[:replicas]:
                self.nodes[peer].setdefault(place.key, []).append(Entry(data, facts, place))

    async def connect(self, multiaddr: str, timeout_s: float) -> bytes:
        return next(iter(self.nodes))

    async def call(self, peer: bytes, method: str, data: bytes, timeout_s: float, via: bytes | None = None) -> bytes:
        if peer in self.dead:
            raise Unreachable("a node", (), timeout_s)
        if method.endswith("ping"):
            return PingResponse(dht_time=time.time()).SerializeToString()
        request = FindRequest.FromString(data)
        self.asked.append((peer, len(request.keys)))
        answer = FindResponse()
        for key in request.keys:
            entries = self.nodes[peer].get(key, [])
            result = answer.results.add(nearest_peer_ids=self.nearest(key)[:20])
            if entries:
                result.type, result.value = FOUND_DICTIONARY, pack_dictionary(entries)
        return answer.SerializeToString()


def directory(host: FakeHost) -> tuple[LightStore, Directory]:
    store = LightStore(host, NETWORK, ("/ip4/127.0.0.1/tcp/1/p2p/x",), time.time)  # type: ignore[arg-type]
    return store, Directory(store, identity=None, network=NETWORK, clock=time.time)


@pytest.mark.parametrize("dead", [0, 4])
async def test_it_finds_every_record_among_many_nodes_though_some_are_dead(dead):
    host = FakeHost(100)
    for start in range(0, 12, 4):
        host.announce(signed(Identity.generate(), start, start + 4))
    host.dead = set(host.nearest(key_id("x"))[:dead]) - {next(iter(host.nodes))}
    _, found = directory(host)
    assert len(await found.servers(ROOT, 12)) == 3
    assert [entry.name for entry in await found.models()] == ["org/model"]


async def test_it_asks_few_nodes_and_few_keys_at_a_time():
    host = FakeHost(200)
    store, _ = directory(host)
    await store.get([f"key {i}" for i in range(3)])
    assert max(n for _, n in host.asked) <= CALLS.keys_max
    a_key = SearchLimits().expected + SearchLimits().doors + 20
    assert sum(n for _, n in host.asked) <= (3 + ReaderLimits().places) * a_key


async def test_a_swarm_that_falls_silent_is_an_error_and_the_next_look_up_joins_anew():
    host = FakeHost(5)
    store, found = directory(host)
    host.announce(signed(Identity.generate()))
    assert len(await found.servers(ROOT, 12)) == 1
    host.dead = set(host.nodes)
    with pytest.raises(Unreachable):
        await store.get(["key"])
    host.dead = set()
    assert len(await found.servers(ROOT, 12)) == 1


async def test_many_keys_are_paced_below_what_a_node_grants():
    host = FakeHost(1)
    store, _ = directory(host)
    began = time.monotonic()
    await store.get([f"key {i}" for i in range(400)])  # 360 at once, the rest at 45 a second
    assert 0.5 < time.monotonic() - began < 10


def test_a_varint_is_protobufs():
    assert [varint(n) for n in (0, 127, 128, 300)] == [b"\x00", b"\x7f", b"\x80\x01", b"\xac\x02"]


class SlowHost(FakeHost):
    """Nodes that answer after 50 ms, and some that never do."""

    silent = 0

    async def call(self, peer: bytes, method: str, data: bytes, timeout_s: float, via: bytes | None = None) -> bytes:
        await asyncio.sleep(0.05)
        if 0 < peer[2] <= self.silent:
            await asyncio.sleep(timeout_s)
            raise Unreachable("a node", (), timeout_s)
        return await super().call(peer, method, data, timeout_s, via)


async def honest_ones(silent: int, made_up: int, n_blocks: int, known: Mapping[str, KnownModel]) -> tuple[int, float]:
    """Return how many of three honest records the page reads beside made-up models, and the seconds that it takes."""
    host, liar, loop = SlowHost(30), Identity.generate(), asyncio.get_running_loop()
    host.silent = silent
    for start in (0, 4, 8):
        host.announce(signed(Identity.generate(), start, start + 4))
    for i in range(1, made_up + 1):
        host.announce(signed(liar, 0, 1, model=f"made/up{i}", root=f"{i:064x}", n_blocks=n_blocks))
    _, found = directory(host)
    began = loop.time()
    reading = await read(found, known, ReadingLimits())
    return sum(record.root == ROOT for record in reading.records), loop.time() - began


@pytest.mark.virtual_clock
async def test_made_up_models_of_many_blocks_cost_a_reading_little():
    found, took_s = await honest_ones(0, 16, 1024, {})
    assert (found, took_s < 5) == (3, True)


@pytest.mark.virtual_clock
async def test_made_up_models_keep_no_known_one_off_the_page():
    """A fifth of the nodes is silent, so that each look-up takes a second."""
    found, took_s = await honest_ones(6, 63, 8, {ROOT: KnownModel("org/model", 12)})
    assert (found, took_s < 20) == (3, True)
