"""A hundred nodes of which twenty lie: what honest servers announce is found, and stays where it is."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm.dht.directory import Directory
from swarm.dht.node import SwarmNode
from swarm.dht.records import RECORD, key_id, span_key
from swarm.dht.validator import Entry, RecordGate
from swarm.identity import Identity
from tests.dht.liars import Lie, beside, lie, peer_bytes
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK, ROOT, announcement, node, signed
from tests.support.often import rest_is_long

NODES, LIARS, READERS = 100, 20, 8
OFTEN: frozenset[Lie] = frozenset()  # every lie is among those of the look-ups
AT_ONCE = 50  # look-ups
KEY = key_id(span_key(NETWORK, ROOT))


@dataclass(frozen=True, repr=False)
class Swarm:
    network: MemoryNetwork
    honest: list[SwarmNode]
    liars: list[SwarmNode]
    readers: Sequence[SwarmNode]
    source: random.Random


@asynccontextmanager
async def swarm(
    liars: list[Identity], seed: int, how: list[Lie], *, silent: int = 0, nodes: int = NODES
) -> AsyncIterator[Swarm]:
    """Nodes that have met, then some of them begin to lie; then readers join through honest ones."""
    source = random.Random(seed)
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        boot = await stack.enter_async_context(network.node(identity=Identity(source.randbytes(32)), seed=seed))
        honest, lying = [boot], []
        for i in range(nodes - len(liars) - 1):
            own = Identity(source.randbytes(32))
            honest.append(await stack.enter_async_context(network.node(*boot.addresses, identity=own, seed=i)))
        for i, own in enumerate(liars):
            lying.append(await stack.enter_async_context(network.node(*boot.addresses, identity=own, seed=i)))
        for member in honest:  # what every node does every 15 s
            assert member.member is not None
            await member.member.learn(1)
        names = [peer_bytes(own) for own in liars]
        for i, liar in enumerate(lying):
            lie(liar, how[i % len(how)], names, source)
            if i < silent:
                assert liar.member is not None
                network.silent.add(liar.member.daemon.p2p.peer_id)
        joining = (network.node(*boot.addresses, client=True, seed=1000 + i) for i in range(READERS))
        readers = await asyncio.gather(*(stack.enter_async_context(reader) for reader in joining))
        yield Swarm(network, honest, lying, readers, source)


async def announce(swarm: Swarm, owners: Sequence[Identity]) -> None:
    """Let honest nodes announce, or refresh; each owner's record has a key of its own."""

    async def one(member: SwarmNode, owner: Identity) -> None:
        directory = Directory(member, identity=owner, network=NETWORK, clock=time.time)
        await directory.announce(announcement(owner, root=owner.public_key.hex()))

    await asyncio.gather(*(one(member, owner) for member, owner in zip(swarm.honest, owners, strict=False)))


async def found(swarm: Swarm, root: str, owner: Identity) -> bool:
    """Tell whether a reader's look-up finds the owner's record."""
    directory = Directory(swarm.source.choice(swarm.readers), identity=None, network=NETWORK, clock=time.time)
    return owner.public_key.hex() in {server.announcement.public_key for server in await directory.servers(root, 12)}


@pytest.mark.long
@pytest.mark.virtual_clock
@pytest.mark.slow("a hundred nodes, and every record is verified")
@pytest.mark.parametrize("look_ups", rest_is_long([40, 1000], [40]))
async def test_look_ups_survive_twenty_liars_of_a_hundred(look_ups: int) -> None:
    source = random.Random(1)
    async with swarm([Identity(source.randbytes(32)) for _ in range(LIARS)], 2, list(Lie), silent=3) as hundred:
        owners = [Identity(source.randbytes(32)) for _ in range(20)]
        began, succeeded, calls = time.monotonic(), 0, 0
        for first in range(0, look_ups, AT_ONCE):
            await announce(hundred, owners)
            before = hundred.network.calls
            wanted = [source.choice(owners) for _ in range(first, min(first + AT_ONCE, look_ups))]
            looking = (found(hundred, owner.public_key.hex(), owner) for owner in wanted)
            succeeded += sum(await asyncio.gather(*looking))
            calls += hundred.network.calls - before
        took = time.monotonic() - began
        print(f"{succeeded} of {look_ups} look-ups, {took:.0f} s, {calls / look_ups:.1f} calls each")
        assert succeeded >= 0.99 * look_ups


@pytest.mark.virtual_clock
@pytest.mark.slow("a hundred nodes, and every record is verified")
@pytest.mark.parametrize("how", rest_is_long(Lie, OFTEN))
async def test_liars_that_settle_around_a_key_neither_hide_nor_displace_a_record(how: Lie) -> None:
    """The twenty nodes nearest to the key are liars. A server announces, and again when others have filled the key.

    Every reader finds it. Of a full key a reader takes a sample, which may lack a record: 6 look-ups of 624 did.
    """
    owner, gate = Identity(b"o" * 32), RecordGate(NETWORK, time.time)
    strangers = [Identity(i.to_bytes(32, "big")) for i in range(1, RECORD.held_per_key + 2)]
    async with swarm(beside(KEY, LIARS, random.Random(3)), 4, [how]) as hundred:
        directory = Directory(hundred.honest[7], identity=owner, network=NETWORK, clock=time.time)
        for least in (24, 20):
            published = await directory.announce(announcement(owner))
            record = published.signed.data
            keepers = [one for one in hundred.honest if record in {held.data for held in one.storage.entries(KEY)}]
            assert len(keepers) >= 5
            assert sum(await asyncio.gather(*(found(hundred, ROOT, owner) for _ in range(24)))) >= least
            # More than a key takes, at the nodes that have it. Signed just now: older ones expire on a busy machine.
            for stranger in map(signed, strangers):
                facts = gate.facts(stranger)
                for keeper in keepers:
                    keeper.storage.put(Entry(stranger, facts, facts.span))


@pytest.mark.long
async def test_look_ups_survive_liars_over_real_connections(tmp_path: Path) -> None:
    """Ten nodes with a p2pd each, of which four lie beside the key."""
    owner, source = Identity(b"o" * 32), random.Random(5)
    liars = beside(KEY, 4, source, among=10)
    async with AsyncExitStack() as stack:
        boot = await stack.enter_async_context(node(tmp_path, "boot"))
        honest = [await stack.enter_async_context(node(tmp_path, f"h{i}", boot.addresses)) for i in range(5)]
        for i, (own, how) in enumerate(zip(liars, [Lie.NOTHING, Lie.LIARS, Lie.GHOSTS, Lie.FORGED], strict=True)):
            liar = await stack.enter_async_context(node(tmp_path, f"l{i}", boot.addresses, identity=own))
            lie(liar, how, [peer_bytes(one) for one in liars], source)
        directory = Directory(honest[0], identity=owner, network=NETWORK, clock=time.time)
        record = (await directory.announce(announcement(owner))).signed.data
        reader = await stack.enter_async_context(node(tmp_path, "reader", boot.addresses, client=True))
        for _ in range(5):
            servers = await Directory(reader, identity=None, network=NETWORK, clock=time.time).servers(ROOT, 12)
            assert [server.data for server in servers] == [record]
