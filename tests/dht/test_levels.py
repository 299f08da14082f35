"""Where a server's record goes, how often its model's name is announced, and the keepers that it remembers."""

import random
from contextlib import AsyncExitStack

import pytest

from swarm.dht.directory import Directory
from swarm.dht.keepers import KeeperLimits, Keepers
from swarm.dht.levels import announces_name, depths
from swarm.dht.records import branch_of, key_id, span_key
from swarm.dht.storage import StorageLimits
from swarm.identity import Identity
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK, ROOT, announcement

NOW = 1_800_000_000.0
KEY, OTHER = b"k" * 20, b"o" * 20
PEERS = tuple(bytes([i]) * 38 for i in range(10))


def test_record_tries_the_key_above_from_time_to_time() -> None:
    source = random.Random(1)
    assert {depths(0, 8, source).start for _ in range(100)} == {0}
    firsts = [depths(3, 8, source).start for _ in range(1600)]
    assert set(firsts) == {2, 3}
    assert 60 < firsts.count(2) < 150
    assert depths(3, 8, source).stop == 9


def test_name_is_announced_by_all_of_few_servers_and_by_few_of_many() -> None:
    source = random.Random(1)
    assert all(announces_name(seen, 0, source) for seen in (0, 1, 31) for _ in range(100))
    for seen, depth, servers in ((320, 0, 320), (250, 2, 1000)):
        named = sum(announces_name(seen, depth, source) for _ in range(servers))
        assert 16 < named < 64


def test_keepers_are_remembered_for_a_while() -> None:
    keepers = Keepers()
    keepers.learn(KEY, PEERS, 100.0)
    assert keepers.known(KEY, 200.0) == PEERS
    assert keepers.known(KEY, 211.0) == keepers.known(OTHER, 100.0) == ()


def test_keepers_of_a_small_swarm_are_searched_for_each_time() -> None:
    keepers = Keepers()
    keepers.learn(KEY, PEERS[:9], 100.0)
    assert keepers.known(KEY, 100.0) == ()


def test_keepers_are_searched_for_again_when_some_are_silent() -> None:
    keepers = Keepers()
    keepers.learn(KEY, PEERS, 100.0)
    keepers.note(KEY, PEERS[:2])
    assert keepers.known(KEY, 101.0) == PEERS
    keepers.note(KEY, PEERS[:3])
    assert keepers.known(KEY, 101.0) == ()


def test_remembered_keepers_are_bounded() -> None:
    keepers = Keepers(KeeperLimits(keys_max=2))
    for key in (KEY, OTHER, b"x" * 20):
        keepers.learn(key, PEERS, 100.0)
    assert [bool(keepers.known(key, 100.0)) for key in (KEY, OTHER, b"x" * 20)] == [False, True, True]


@pytest.mark.virtual_clock
@pytest.mark.slow("a dozen nodes")
@pytest.mark.parametrize(("full", "below"), [(3, False), (11, True)])
async def test_record_goes_below_where_most_nodes_refuse_it(full: int, below: bool) -> None:
    owner, source = Identity(b"o" * 32), random.Random(1)
    async with AsyncExitStack() as stack:
        network = MemoryNetwork()
        first = await stack.enter_async_context(network.node(clock=lambda: NOW))
        nodes = [first]
        for i in range(11):
            limits = StorageLimits(entries_per_key=1 if i < full else 512)
            own = Identity(source.randbytes(32))
            joining = network.node(*first.addresses, identity=own, seed=i, clock=lambda: NOW, limits=limits)
            nodes.append(await stack.enter_async_context(joining))
        for i, name in enumerate((b"a", b"o")):
            other = Identity(name * 32)
            server = Directory(nodes[-1], identity=other, network=NETWORK, clock=lambda: NOW)
            await server.announce(announcement(other, now=NOW))
            assert i or any(node.storage.entries(key_id(span_key(NETWORK, ROOT))) for node in nodes)
        branch = branch_of(owner.public_key.hex())[: int(below)]
        key = key_id(span_key(NETWORK, ROOT, branch))
        holding = [n for n in nodes if owner.public_key.hex() in {e.facts.owner for e in n.storage.entries(key)}]
        assert len(holding) >= 6
