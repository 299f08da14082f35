"""Five attacks that spoil hivemind's DHT, over the wire: against its own node they work, against ours they fail."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.dht.directory import Directory
from swarm.dht.format import CALLS, unpack_dictionary
from swarm.dht.node import SwarmNode
from swarm.dht.protocol import node_id_of
from swarm.dht.records import key_id, packed_text, sign_announcement, span_key, span_subkey
from swarm.dht.validator import pack_value
from swarm.identity import Identity
from swarm.net.p2p import Daemon, P2PConfig, running_daemon
from tests.dht.support import LOOPBACK, NETWORK, ROOT, announcement, node, signed

ALICE, BOB, MALLORY = (Identity(name * 32) for name in (b"a", b"b", b"m"))
KEY = key_id(span_key(NETWORK, ROOT))
SUBKEY = packed_text(span_subkey(ALICE.public_key.hex(), (0, 4)))
MOMENT_S = 0.05  # after a record has expired
REGULAR = DHTProtocol.IS_REGULAR_VALUE


@dataclass(frozen=True)
class Attacker:
    """A libp2p peer that speaks hivemind's DHT protocol to one victim and does as it likes."""

    daemon: Daemon
    victim: PeerID

    @property
    def stub(self) -> Any:
        return super(DHTProtocol, DHTProtocol).get_stub(self.daemon.p2p, self.victim)

    async def store(self, *entries: tuple[bytes, bytes, bytes, float], in_cache: bool = False) -> list[bool]:
        keys, subkeys, values, expirations = zip(*entries, strict=True)
        request = dht_pb2.StoreRequest(
            keys=keys, subkeys=subkeys, values=values, expiration_time=expirations, in_cache=[in_cache] * len(keys)
        )
        return list((await self.stub.rpc_store(request, timeout=5)).store_ok)

    async def find(self, key: bytes = KEY) -> dht_pb2.FindResult:
        return (await self.stub.rpc_find(dht_pb2.FindRequest(keys=[key]), timeout=5)).results[0]

    async def records(self, key: bytes = KEY) -> list[bytes]:
        return [value[3:] for _, value, _ in unpack_dictionary((await self.find(key)).value)]


@asynccontextmanager
async def attacking(victim: Daemon) -> AsyncIterator[Attacker]:
    async with running_daemon(P2PConfig(None, None)) as daemon:
        (address,) = await victim.addresses()
        await daemon.connect(address, 5)
        yield Attacker(daemon, victim.p2p.peer_id)


@asynccontextmanager
async def stock(validator: RecordValidatorBase | None = None) -> AsyncIterator[Attacker]:
    """hivemind's own node, attacked: the control of every test here."""
    async with running_daemon(P2PConfig(None, LOOPBACK)) as daemon:
        await DHTNode.create(p2p=daemon.p2p, record_validator=validator)
        async with attacking(daemon) as attacker:
            yield attacker


@asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[tuple[Attacker, SwarmNode, bytes]]:
    """Our node, holding Alice's record, attacked."""
    async with node(folder, "victim") as victim:
        assert victim.member is not None
        async with attacking(victim.member.daemon) as attacker:
            directory = Directory(victim, identity=ALICE, network=NETWORK, clock=time.time)
            published = await directory.announce(announcement(ALICE))
            assert await attacker.records() == [published.signed.data]
            yield attacker, victim, published.signed.data


def entry(
    data: bytes, expiration: float, key: bytes = KEY, subkey: bytes = SUBKEY
) -> tuple[bytes, bytes, bytes, float]:
    return key, subkey, pack_value(data), expiration


# --- 1: one unsigned plain value with a later expiry replaces the whole dictionary -----------------------------------


async def plain_value(attacker: Attacker) -> None:
    await attacker.store((KEY, REGULAR, b"\xc4\x01x", time.time() + 1000))


async def test_a_plain_value_replaces_hiveminds_dictionary() -> None:
    async with stock() as attacker:
        await attacker.store(entry(b"victim" * 50, time.time() + 60))
        await plain_value(attacker)
        assert (await attacker.find()).type == dht_pb2.FOUND_REGULAR


async def test_a_plain_value_does_not_replace_ours(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, _, record):
        await plain_value(attacker)
        assert await attacker.records() == [record]


# --- 2: a rejected store with a short expiry makes the dictionary vanish when it expires -----------------------------


async def short_store(attacker: Attacker, record: bytes) -> None:
    expires = time.time() + 0.5
    assert await attacker.store((KEY, REGULAR, b"\xc4\x01x", expires)) == [False]
    assert await attacker.store(entry(record, expires)) == [False]
    await asyncio.sleep(expires + MOMENT_S - time.time())


async def test_a_rejected_short_store_deletes_hiveminds_dictionary() -> None:
    async with stock() as attacker:
        for _ in range(5):  # on a busy machine the short life may be over before the store comes
            await attacker.store(entry(b"victim" * 50, time.time() + 60))
            await short_store(attacker, b"victim" * 50)
            if (await attacker.find()).type == dht_pb2.NOT_FOUND:
                return
        pytest.fail("the dictionary is still there")


async def test_a_rejected_short_store_does_not_delete_ours(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, _, record):
        await short_store(attacker, record)
        assert await attacker.records() == [record]


# --- 3: replaying the victim's older record deletes its fresh one ----------------------------------------------------


async def replay(attacker: Attacker) -> None:
    """Alice's older record, which she signed and which lives for another half second."""
    now = time.time()
    old = signed(ALICE, now=now - 59.5)
    assert await attacker.store(entry(old, now + 0.5)) == [False]
    await asyncio.sleep(now + 0.5 + MOMENT_S - time.time())


async def test_a_replayed_older_record_deletes_hiveminds_fresh_one() -> None:
    async with stock() as attacker:
        await attacker.store(entry(signed(ALICE), time.time() + 60))
        await replay(attacker)
        assert await attacker.records() == []


async def test_a_replayed_older_record_does_not_delete_ours(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, _, record):
        await replay(attacker)
        assert await attacker.records() == [record]


# --- 4: endless expiries, and memory that rejected stores fill -------------------------------------------------------


async def test_hivemind_takes_endless_expiries() -> None:
    async with stock() as attacker:
        for expiration in (math.inf, 1e308, math.nan):
            assert await attacker.store((bytes(20), SUBKEY, b"\xc4\x01x", expiration)) or math.isnan(expiration)
        assert (await attacker.find(bytes(20))).expiration_time == math.inf


async def test_endless_expiries_and_rejected_stores_leave_nothing_in_ours(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, victim, record):
        before = len(victim.storage), victim.storage.bytes
        mine = signed(MALLORY)
        place = packed_text(span_subkey(MALLORY.public_key.hex(), (0, 4)))
        for expiration in (math.inf, -math.inf, 1e308, math.nan, time.time() + 3600):
            assert await attacker.store(entry(mine, expiration, subkey=place)) == [False]
        batch = [entry(record, time.time() + 30)] * CALLS.stores_max
        for _ in range(5):
            assert not any(await attacker.store(*batch))
        assert (len(victim.storage), victim.storage.bytes) == before
        assert len(victim.gate._verified) <= 2
        assert await attacker.records() == [record]


# --- 5: a malformed owner or value makes the validator raise and aborts the batch ------------------------------------


class Careless(RecordValidatorBase):
    def validate(self, record: DHTRecord) -> bool:
        raise ValueError("malformed owner key")


async def test_a_malformed_value_aborts_hiveminds_batch() -> None:
    async with stock(Careless()) as attacker:
        with pytest.raises(Exception, match="malformed"):
            await attacker.store(entry(b"malformed", time.time() + 60), entry(b"innocent", time.time() + 60))


MALFORMED = [
    entry(b"", 1e12),
    entry(b"x" * 300, time.time() + 60),
    entry(bytes(64) + b"[" * 1900, time.time() + 60),
    entry(MALLORY.sign(b"swarm announcement", b'{"network":"test"}') + b'{"network":"test"}', time.time() + 60),
    (b"", b"", b"", 0.0),
    (KEY, b"\xff\xff", b"\xd4", time.time() + 60),
    (KEY, DHTProtocol.IS_DICTIONARY, b"\xc7\x01\x50\x90", time.time() + 60),
    (KEY + b"\x00", SUBKEY, pack_value(b"x"), time.time() + 60),
]


async def test_malformed_values_do_not_abort_our_batch(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, _, record):
        bob = sign_announcement(announcement(BOB), BOB)
        expires = announcement(BOB).expires
        good = entry(bob, expires, subkey=packed_text(span_subkey(BOB.public_key.hex(), (0, 4))))
        for bad in MALFORMED:
            assert (await attacker.store(bad, good, bad))[1] is True
        assert sorted(await attacker.records()) == sorted([record, bob])


# --- and what else strangers may try ---------------------------------------------------------------------------------


async def test_nothing_is_stored_in_anothers_place(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, victim, record):
        mine = announcement(MALLORY)
        data = sign_announcement(mine, MALLORY)
        own = packed_text(span_subkey(MALLORY.public_key.hex(), (0, 4)))
        elsewhere = key_id(span_key(NETWORK, "cd" * 32))
        assert await attacker.store(entry(data, mine.expires)) == [False]
        assert await attacker.store(entry(data, mine.expires, key=elsewhere, subkey=own)) == [False]
        assert await attacker.store(entry(data, mine.expires, subkey=own), in_cache=True) == [False]
        assert await attacker.records() == [record]
        assert await attacker.store(entry(data, mine.expires, subkey=own)) == [True], "in its own place it is welcome"
        assert len(victim.storage) == 3


async def test_oversized_and_lopsided_requests_are_refused(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, _, record):
        stub = attacker.stub
        for request in (
            dht_pb2.StoreRequest(keys=[KEY], subkeys=[], values=[b"x"], expiration_time=[1.0], in_cache=[False]),
            dht_pb2.StoreRequest(
                keys=[KEY] * 100, subkeys=[b""] * 100, values=[b""] * 100, expiration_time=[1.0] * 100
            ),
        ):
            with pytest.raises(Exception, match="store request"):
                await stub.rpc_store(request, timeout=5)
        with pytest.raises(Exception, match="find request"):
            await stub.rpc_find(dht_pb2.FindRequest(keys=[KEY] * (CALLS.keys_max + 1)), timeout=5)
        with pytest.raises(Exception, match="find request"):
            await stub.rpc_find(dht_pb2.FindRequest(keys=[b"short"]), timeout=5)
        assert await attacker.records() == [record]


async def test_a_flood_of_requests_is_slowed_down(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, _, record):
        batch = [entry(record, time.time() + 30)] * CALLS.stores_max

        async def flood() -> None:
            for _ in range(50):
                await attacker.store(*batch)

        with pytest.raises(Exception, match="slow down"):
            await flood()


async def test_a_node_id_that_is_not_the_peers_own_is_not_learnt(tmp_path: Path) -> None:
    async with ours(tmp_path) as (attacker, victim, _):
        stub = attacker.stub
        assert victim.member is not None
        table = victim.member.protocol.routing_table
        chosen = DHTID(int.from_bytes(KEY, "big") ^ 1)
        await stub.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=chosen.to_bytes())), timeout=5)
        assert not table.uid_to_peer_id
        own = node_id_of(attacker.daemon.p2p.peer_id)
        await stub.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=own.to_bytes())), timeout=5)
        assert list(table.uid_to_peer_id) == [own]


async def test_a_lying_node_is_not_believed(tmp_path: Path) -> None:
    """A stock hivemind node near the key answers with forged, misplaced and garbled records among a true one."""
    async with node(tmp_path, "victim") as victim, running_daemon(P2PConfig(None, LOOPBACK)) as daemon:
        await daemon.connect(victim.addresses[0], 5)
        liar = await DHTNode.create(
            p2p=daemon.p2p, node_id=node_id_of(daemon.p2p.peer_id), initial_peers=victim.addresses
        )
        now = time.time()
        true = signed(ALICE, now=now)
        forged = bytearray(signed(BOB, now=now))
        forged[3] ^= 1
        lies = {
            "x": b"garbage",
            span_subkey(BOB.public_key.hex(), (0, 4)): bytes(forged),
            span_subkey(BOB.public_key.hex(), (1, 4)): signed(BOB, now=now),
            span_subkey(ALICE.public_key.hex(), (0, 4)): true,
        }
        key = DHTID.from_bytes(KEY)
        for subkey, data in lies.items():
            liar.protocol.storage.store_subkey(key, subkey, pack_value(data), now + 60)
        directory = Directory(victim, identity=None, network=NETWORK, clock=time.time)
        assert [found.data for found in await directory.servers(ROOT, 12)] == [true]
        liar.protocol.storage.store(key, b"\xc4\x01x", now + 1000)
        assert await directory.servers(ROOT, 12) == ()
