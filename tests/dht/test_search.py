"""The search for the nodes around a key, over a graph in memory."""

import random
from collections.abc import Sequence

import pytest

from swarm.dht.format import CALLS
from swarm.dht.sampling import Ask, Found
from swarm.dht.search import Searcher, SearchLimits, position

NODES, LIARS = 100, 20


@pytest.mark.virtual_clock
async def test_who_names_nodes_that_do_not_exist_does_not_use_up_the_calls_of_a_search() -> None:
    """The nodes nearest to the key name nobody who exists; every search hears the honest ones behind them."""
    source = random.Random(1)
    key = source.randbytes(20)
    place = int.from_bytes(key)

    def nearest(peers: Sequence[bytes], count: int) -> list[bytes]:
        return sorted(peers, key=lambda peer: position(peer) ^ place)[:count]

    nodes = nearest([source.randbytes(34) for _ in range(NODES)], NODES)
    liars, behind = set(nodes[:LIARS]), set(nodes[LIARS : LIARS + SearchLimits().expected])

    async def call(peer: bytes, asks: Sequence[Ask]) -> list[Found] | None:
        if peer not in nodes:
            return None
        ghosts = [source.randbytes(34) for _ in range(400)]
        return [Found(near=nearest(ghosts if peer in liars else nodes, CALLS.named_max))] * len(asks)

    radius = position(nodes[SearchLimits().expected - 1 + LIARS]) ^ place
    for seed in range(20):
        searcher = Searcher(call, random.Random(seed))
        found = (await searcher.search([key], source.sample(nodes, 30), radius))[key]
        assert behind <= set(found.nodes), seed
