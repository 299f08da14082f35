"""A private swarm's directory: strangers read nothing, store nothing, and learn no places."""

import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.access import Access, NetworkKey
from swarm.dht.dialback import ask_dial_back
from swarm.dht.directory import Directory
from swarm.dht.helper import serve_dial_back
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.records import RECORD, key_id, model_key, packed_text, span_key, span_subkey
from swarm.dht.sealing import SEAL_BYTES, KeyedSeal, Purpose
from swarm.dht.store import FULL, MemoryStore
from swarm.dht.validator import Entry, RecordGate, pack_value
from swarm.errors import RecordError, Unreachable
from swarm.identity import Identity
from swarm.net.address import Address
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig
from tests.dht.support import LOOPBACK, NETWORK, ROOT, announcement, signed

ALICE, MALLORY = Identity(b"a" * 32), Identity(b"m" * 32)
OURS, THEIRS, NONE = Access(NetworkKey(b"o" * 32)), Access(NetworkKey(b"t" * 32)), Access()
STRANGERS = pytest.mark.parametrize("access", [THEIRS, NONE], ids=["another key", "no key"])


def store(access: Access) -> MemoryStore:
    return MemoryStore.make(NETWORK, time.time, access)


def directory(of: MemoryStore | SwarmNode, identity: Identity | None = None) -> Directory:
    return Directory(of, identity=identity, network=NETWORK, clock=time.time)


async def test_members_find_what_members_announce() -> None:
    private = store(OURS)
    published = await directory(private, ALICE).announce(announcement(ALICE))
    (found,) = await directory(private).servers(ROOT, 12)
    assert found == published.signed
    (model,) = await directory(private).models("org/model")
    assert model.root == ROOT
    await directory(private, ALICE).withdraw()


@STRANGERS
async def test_a_stranger_that_has_the_bytes_reads_no_record(access: Access) -> None:
    private = store(OURS)
    await directory(private, ALICE).announce(announcement(ALICE))
    ((data, *_), *_) = [
        [entry.data for entry in private.storage.entries(key_id(key))]
        for key in (span_key(private.gate.seal.scope, ROOT), model_key(private.gate.seal.scope, "org/model"))
    ]
    for secret in (ROOT.encode(), ALICE.public_key.hex().encode(), b"org/model", b"127.0.0.1:4000", b"network"):
        assert secret not in data
    with pytest.raises(RecordError):
        RecordGate(NETWORK, time.time, access).facts(data)


@STRANGERS
async def test_a_stranger_cannot_tell_where_a_model_is_kept(access: Access) -> None:
    private = store(OURS)
    await directory(private, ALICE).announce(announcement(ALICE))
    outside = RecordGate(NETWORK, time.time, access).seal
    for key in (span_key(outside.scope, ROOT), model_key(outside.scope, "org/model")):
        assert private.storage.entries(key_id(key)) == ()
    (held,) = private.storage.entries(key_id(span_key(private.gate.seal.scope, ROOT)))
    assert held.place.subkey != outside.subkey(span_subkey(ALICE.public_key.hex(), (0, 4)))
    assert ALICE.public_key.hex()[:16] not in held.place.subkey


@STRANGERS
def test_a_strangers_record_fails_validation_wherever_it_is_put(access: Access) -> None:
    ours, theirs = RecordGate(NETWORK, time.time, OURS), RecordGate(NETWORK, time.time, access)
    now = time.time()
    stored = theirs.seal.close(signed(MALLORY, now=now))
    for seal in (ours.seal, theirs.seal):  # even where it has learnt our places
        key = key_id(span_key(seal.scope, ROOT))
        subkey = packed_text(seal.subkey(span_subkey(MALLORY.public_key.hex(), (0, 4))))
        with pytest.raises(RecordError, match="seal"):
            ours.admit(key, subkey, pack_value(stored), now + 60)
    accepted = ours.seal.close(signed(ALICE, now=now))
    key = key_id(span_key(ours.seal.scope, ROOT))
    subkey = packed_text(ours.seal.subkey(span_subkey(ALICE.public_key.hex(), (0, 4))))
    assert ours.admit(key, subkey, pack_value(accepted), now + 60).data == accepted


def test_a_sealed_record_that_is_changed_or_cut_is_none() -> None:
    gate = RecordGate(NETWORK, time.time, OURS)
    stored = gate.seal.close(signed(ALICE))
    assert len(stored) <= RECORD.bytes_max + SEAL_BYTES
    for i in range(0, len(stored), 7):
        with pytest.raises(RecordError, match="seal"):
            gate.facts(stored[:i] + bytes([stored[i] ^ 1]) + stored[i + 1 :])
        with pytest.raises(RecordError, match="seal"):
            gate.facts(stored[:i])


def test_what_was_sealed_for_one_purpose_is_nothing_for_another() -> None:
    seal = KeyedSeal(NetworkKey(b"o" * 32), NETWORK)
    with pytest.raises(RecordError):
        seal.open(seal.close(b"answer", Purpose.ANSWER))


def test_networks_of_one_key_have_their_own_places() -> None:
    key = NetworkKey(b"o" * 32)
    assert KeyedSeal(key, "one").scope != KeyedSeal(key, "two").scope


async def test_a_record_of_a_peer_that_is_not_on_the_list_is_none() -> None:
    both = store(NONE)
    await directory(both, ALICE).announce(announcement(ALICE))
    await directory(both, MALLORY).announce(announcement(MALLORY))
    listed = dataclasses.replace(both, gate=RecordGate(NETWORK, time.time, Access(allowed=frozenset({ALICE.peer_id}))))
    assert [s.announcement.peer_id for s in await directory(listed).servers(ROOT, 12)] == [ALICE.peer_id]
    with pytest.raises(RecordError, match=rf"{MALLORY.peer_id}.*allowed peers"):
        listed.gate.facts(signed(MALLORY))


# --- over the network ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def node(
    folder: Path, name: str, access: Access, peers: tuple[str, ...] = (), identity: Identity | None = None
) -> AsyncIterator[SwarmNode]:
    (identity or Identity.generate()).save(folder / name)
    config = NodeConfig(NETWORK, P2PConfig(folder / name, LOOPBACK), peers, access)
    async with open_node(config, clock=time.time) as joined:
        yield joined


@STRANGERS
async def test_over_the_network_a_stranger_reads_no_record_and_stores_none(tmp_path: Path, access: Access) -> None:
    async with node(tmp_path, "boot", OURS) as boot, node(tmp_path, "alice", OURS, boot.addresses, ALICE) as alice:
        published = await directory(alice, ALICE).announce(announcement(ALICE))
        assert published.replicas == 1
        assert len(await directory(boot).servers(ROOT, 12)) == 1
        async with node(tmp_path, "mallory", access, boot.addresses, MALLORY) as mallory:
            assert (await directory(mallory).survey(ROOT, 12)).servers == ()
            (held,) = boot.storage.entries(key_id(span_key(boot.gate.seal.scope, ROOT)))
            ours, theirs = boot.gate, mallory.gate
            stored = theirs.seal.close(signed(MALLORY))
            facts = theirs.facts(stored)
            in_our_place = dataclasses.replace(held.place, rank=facts.span.rank)
            before = len(boot.storage)
            put = await mallory.put([Entry(stored, facts, facts.span), Entry(stored, facts, in_our_place)])
            assert put == (FULL, FULL)  # every node refused
            assert len(boot.storage) == before
            assert [s.announcement.peer_id for s in await directory(boot).servers(ROOT, 12)] == [ALICE.peer_id]
            assert ours.facts(held.data).owner == ALICE.public_key.hex()


@pytest.mark.long
async def test_a_stranger_is_no_helper_when_a_member_asks_to_be_dialled_back(tmp_path: Path) -> None:
    dialled = []

    async def dial(address: Address, *_: object) -> Any:
        dialled.append(str(address))
        return SimpleNamespace(close=lambda: None)

    async with node(tmp_path, "mallory", NONE) as mallory:
        await serve_dial_back(mallory, Endpoint(ALICE, ChannelKey(), NETWORK), dial)
        async with node(tmp_path, "alice", OURS, mallory.addresses, ALICE) as alice:
            published = await directory(alice, ALICE).announce(announcement(ALICE))
            assert published.replicas == 0
            with pytest.raises(Unreachable, match="seal"):  # whatever it answers, it is not taken for a member's word
                await ask_dial_back(alice, published.signed)
            assert dialled == []
        async with (
            node(tmp_path, "member", OURS, mallory.addresses) as member,
            node(tmp_path, "alice", OURS, member.addresses, ALICE) as alice,
        ):
            await serve_dial_back(member, Endpoint(ALICE, ChannelKey(), NETWORK), dial)
            (found,) = (await ask_dial_back(alice, published.signed)).found
            assert (found.helper, found.answer.answered) == (member.peer_id, ("127.0.0.1:4000",))
