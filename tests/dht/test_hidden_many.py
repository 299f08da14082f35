"""Two hundred servers that no other node can call, on five nodes that serve the DHT for all of them."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from hivemind.p2p import PeerID

from swarm.dht.directory import Directory
from swarm.dht.node import SwarmNode
from swarm.dht.records import RECORD, key_id, span_key
from swarm.dht.storage import StorageLimits
from swarm.identity import Identity
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK, ROOT, announcement

PUBLIC, HIDDEN, LOOK_UPS = 5, 200, 10
NOW = 1_800_000_000.0
ROUNDS = 2  # of announcements
CALLS_A_SERVER = 5.0  # that a node takes within `refresh_s` from one hidden server (docs/directory.md)
KEY = key_id(span_key(NETWORK, ROOT))


@dataclass(frozen=True, repr=False)
class Crowd:
    network: MemoryNetwork
    public: list[SwarmNode]
    hidden: dict[Identity, SwarmNode]

    def concealed(self) -> set[str]:
        return {identity.peer_id for identity in self.hidden}

    def calls(self) -> list[int]:
        """The calls that each public node has taken."""
        return [self.network.served[PeerID.from_base58(node.peer_id)] for node in self.public]


def clock() -> float:
    return NOW + asyncio.get_running_loop().time()


async def crowd(stack: AsyncExitStack, source: random.Random) -> Crowd:
    network = MemoryNetwork()
    boot = await stack.enter_async_context(network.node(identity=Identity(source.randbytes(32)), clock=clock))
    public, hidden = [boot], {}
    for i in range(PUBLIC - 1):
        own = Identity(source.randbytes(32))
        public.append(await stack.enter_async_context(network.node(*boot.addresses, identity=own, clock=clock, seed=i)))
    for i in range(HIDDEN):
        own, ways_in = Identity(source.randbytes(32)), source.choice(public).addresses
        node = network.node(*ways_in, identity=own, proven=False, clock=clock, seed=i)
        hidden[own] = await stack.enter_async_context(node)
    return Crowd(network, public, hidden)


async def announce(made: Crowd, source: random.Random) -> None:
    """Let each hidden server announce once, at some moment of `refresh_s`."""

    async def one(identity: Identity, node: SwarmNode, after_s: float) -> None:
        await asyncio.sleep(after_s)
        directory = Directory(node, identity=identity, network=NETWORK, clock=clock)
        changes = {"now": clock(), "device": "d" * RECORD.device_chars, "public_name": "n" * RECORD.public_name_chars}
        assert (await directory.announce(announcement(identity, **changes))).replicas == PUBLIC

    async with asyncio.TaskGroup() as group:
        for identity, node in made.hidden.items():
            group.create_task(one(identity, node, source.uniform(0.0, RECORD.refresh_s)))
        await asyncio.sleep(RECORD.refresh_s)


async def look_up(made: Crowd, seed: int) -> set[str]:
    async with made.network.node(*made.public[0].addresses, client=True, clock=clock, seed=seed) as reader:
        found = await Directory(reader, identity=None, network=NETWORK, clock=clock).servers(ROOT, 12)
    return {signed.announcement.peer_id for signed in found}


@pytest.mark.virtual_clock
@pytest.mark.long
async def test_five_public_nodes_carry_two_hundred_hidden_servers() -> None:
    source, overhead = random.Random(28), StorageLimits().entry_overhead_bytes
    async with AsyncExitStack() as stack:
        made = await crowd(stack, source)
        for _ in range(ROUNDS):
            before = made.calls()
            await announce(made, source)
            taken = [after - start for start, after in zip(before, made.calls(), strict=True)]
            print(f"a server costs a node {max(taken) / HIDDEN:.2f} calls in {RECORD.refresh_s:.0f} s")
            assert max(taken) <= CALLS_A_SERVER * HIDDEN
            for node in made.public:
                assert made.concealed().isdisjoint(node.neighbours())
                assert len(node.storage.entries(KEY)) == RECORD.held_per_key < HIDDEN  # the rest is below it
                assert len(node.storage) == HIDDEN + 1  # and one for the model's name
                assert node.storage.bytes <= len(node.storage) * (RECORD.bytes_max + overhead)
            for seed in range(LOOK_UPS):
                assert await look_up(made, seed) == made.concealed()
