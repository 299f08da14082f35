"""A node that strangers write to: thousands of records that do not hold, and thousands that do."""

import asyncio
import contextlib
import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import pytest
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarm.dht.format import CALLS
from swarm.dht.messages import FindRequest
from swarm.dht.node import SwarmNode
from swarm.dht.protocol import node_id_of
from swarm.dht.records import RECORD, key_id, packed_text, span_key, span_subkey
from swarm.dht.validator import pack_value
from swarm.errors import TooBusy
from swarm.identity import Identity
from tests.dht.memory import MemoryNetwork
from tests.dht.support import NETWORK, ROOT, signed
from tests.support.often import rest_is_long

Store = tuple[bytes, bytes, bytes, float]  # key, subkey, value, expiry as the stranger claims them
NOW = 1_800_000_000.0
KEY = key_id(span_key(NETWORK, ROOT))
ROUNDS = 5  # between which the honest ones refresh their records
COUNTS = pytest.mark.parametrize("count", rest_is_long([1000, 10_000], [1000]))


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


def store(owner: Identity, data: bytes, expires: float, start: int = 0, root: str = ROOT) -> Store:
    key = key_id(span_key(NETWORK, root))
    return key, packed_text(span_subkey(owner.public_key.hex(), (start, start + 4))), pack_value(data), expires


def true_store(owner: Identity, now: float, start: int = 0, **changes: object) -> Store:
    root = str(changes.get("root", ROOT))
    return store(owner, signed(owner, start, start + 4, now=now, **changes), now + 60, start, root)


async def send(victim: SwarmNode, stores: Sequence[Store]) -> int:
    """Store through the node's own handler, under a new peer id whenever one is slowed down. Returns the accepted."""
    assert victim.member is not None
    protocol, accepted, left = victim.member.protocol, 0, 0
    for first in range(0, len(stores), CALLS.stores_max):
        if left < CALLS.stores_max:
            stranger, left = PeerID.from_base58(Identity.generate().peer_id), int(CALLS.burst)
        keys, subkeys, values, expirations = zip(*stores[first : first + CALLS.stores_max], strict=True)
        request = dht_pb2.StoreRequest(
            keys=keys, subkeys=subkeys, values=values, expiration_time=expirations, in_cache=[False] * len(keys)
        )
        answer = await protocol.rpc_store(request, P2PContext("", protocol.p2p.peer_id, stranger))
        left -= len(keys)
        accepted += sum(answer.store_ok)
    return accepted


def attacks(honest: Sequence[Identity], source: random.Random, count: int, now: float) -> Iterator[Store]:
    """Records that must not be taken, of every kind in turn; the honest ones' present records were issued at `now`."""
    for i in range(count):
        victim, mallory = source.choice(honest), Identity(source.randbytes(32))
        data = signed(victim, now=now + source.random())
        match i % 8:
            case 0:  # forged: a bit is wrong
                at = source.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :]
                yield store(victim, data, now + 60)
            case 1:  # forged: another's signature
                yield store(victim, mallory.sign(b"swarm announcement", data[64:]) + data[64:], now + 60)
            case 2:  # replayed: it lives, and is older than the present one
                older = now - source.uniform(1, 50)
                yield store(victim, signed(victim, now=older), older + 60)
            case 3:  # stale
                past = now - source.uniform(60, 1e6)
                yield store(mallory, signed(mallory, now=past), past + 60)
            case 4:  # from the far future
                future = now + source.uniform(31, 1e6)
                yield store(mallory, signed(mallory, now=future), future + 60)
            case 5:  # oversized
                long = signed(mallory, now=now) + bytes(RECORD.bytes_max)
                yield store(mallory, long, now + 60)
            case 6:  # misplaced: in another's place, or in its own under another key
                place, other = (store(victim, data, now + 60), true_store(mallory, now))
                elsewhere = source.choice([KEY, source.randbytes(20)])
                yield (elsewhere, other[1] if elsewhere != KEY else place[1], other[2], now + 60)
            case _:  # a true record with an expiry that is not its own
                yield store(mallory, signed(mallory, now=now), now + source.choice([5.0, 3600.0, 1e300, float("inf")]))


@COUNTS
async def test_records_that_do_not_hold_are_refused_and_displace_none(count: int) -> None:
    clock, source, network = Clock(), random.Random(1), MemoryNetwork()
    honest = [Identity(source.randbytes(32)) for _ in range(100)]
    async with network.node(clock=clock) as victim:
        for _ in range(ROUNDS):
            true = [true_store(owner, clock.now) for owner in honest]
            assert await send(victim, true) == len(honest)
            assert await send(victim, list(attacks(honest, source, count // ROUNDS, clock.now))) == 0
            held = {pack_value(entry.data) for entry in victim.storage.entries(KEY)}
            assert held == {value for _, _, value, _ in true}
            clock.now += RECORD.refresh_s


@COUNTS
async def test_signed_records_of_fresh_keys_displace_none_that_is_refreshed(count: int) -> None:
    clock, source, network = Clock(), random.Random(2), MemoryNetwork()
    honest = [Identity(source.randbytes(32)) for _ in range(100)]
    async with network.node(clock=clock) as victim:
        taken = 0
        for _ in range(ROUNDS):
            true = [true_store(owner, clock.now) for owner in honest]
            assert await send(victim, true) == len(honest)
            flood = [true_store(Identity(source.randbytes(32)), clock.now) for _ in range(count // ROUNDS)]
            taken += await send(victim, flood)
            held = {pack_value(entry.data) for entry in victim.storage.entries(KEY)}
            assert {value for _, _, value, _ in true} <= held
            assert len(held) <= RECORD.held_per_key
            clock.now += RECORD.refresh_s
        assert taken >= RECORD.held_per_key - len(honest), "strangers are welcome where there is room"


@pytest.mark.long
@pytest.mark.parametrize("stores", [20_000, 100_000])
async def test_stores_grow_a_node_by_64_mib_at_most(stores: int) -> None:
    """Each is a signed record of its own, mostly under keys of their own: the worst that can be stored."""
    clock, source, network = Clock(), random.Random(3), MemoryNetwork()
    owner = Identity(source.randbytes(32))
    async with network.node(clock=clock) as victim:
        await send(victim, [true_store(owner, clock.now)])
        gc.collect()
        before = psutil.Process().memory_info().rss
        accepted = 0
        for _ in range(0, stores, 1000):
            batch = [
                true_store(owner, clock.now, root=source.randbytes(32).hex(), device="d" * 64, public_name="n" * 64)
                for _ in range(1000)
            ]
            accepted += await send(victim, batch)
            del batch
        gc.collect()
        grown = psutil.Process().memory_info().rss - before
        print(f"{stores} stores, {accepted} kept: {grown / 2**20:.1f} MiB")
        assert accepted > 10_000
        assert grown <= 64 << 20


async def test_a_peer_that_asks_for_full_keys_again_and_again_is_refused() -> None:
    clock, source, network = Clock(), random.Random(2), MemoryNetwork()
    async with network.node(clock=clock) as victim:
        assert victim.member is not None
        protocol = victim.member.protocol
        held = [true_store(Identity(source.randbytes(32)), clock.now, public_name="x" * 64) for _ in range(100)]
        assert await send(victim, held) == len(held)
        greedy, modest = (P2PContext("", protocol.p2p.peer_id, stranger()) for _ in "ab")
        request = FindRequest(keys=[KEY])
        size = sum(len(entry.data) for entry in victim.storage.entries(KEY))
        answered = 0
        with contextlib.suppress(TooBusy):
            while answered <= 2 * CALLS.answered_burst:
                await protocol.rpc_find(request, greedy)
                answered += size
        assert answered <= CALLS.answered_burst + 10 * CALLS.answered_per_s
        assert (await protocol.rpc_find(request, modest)).results[0].value


async def test_callers_that_ask_to_be_called_back_hold_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(*_: object) -> None:
        await asyncio.Event().wait()

    network = MemoryNetwork()
    async with network.node() as victim:
        assert victim.member is not None
        protocol = victim.member.protocol
        monkeypatch.setattr(protocol, "ping", silence)
        for _ in range(2 * CALLS.handled_max):
            silent = stranger()
            node = dht_pb2.NodeInfo(node_id=node_id_of(silent).to_bytes())
            async with asyncio.timeout(1.0):
                answer = await protocol.rpc_ping(
                    dht_pb2.PingRequest(peer=node, validate=True), P2PContext("", protocol.p2p.peer_id, silent)
                )
            assert answer.available  # stock nodes give up otherwise


def stranger() -> PeerID:
    return PeerID.from_base58(Identity.generate().peer_id)
