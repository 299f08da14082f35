"""Nodes that lie: production nodes whose answers are replaced, on either transport."""

import random
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from swarm.dht.format import CALLS, pack_dictionary
from swarm.dht.messages import FindResult
from swarm.dht.node import SwarmNode
from swarm.dht.sampling import Look, packed
from swarm.dht.search import position
from swarm.dht.validator import Entry, Facts, RecordGate
from swarm.identity import Identity
from tests.dht.support import NETWORK, signed


class Lie(StrEnum):
    """What a liar answers. All say that they store what they are given."""

    NOTHING = "no records, no neighbours"
    LIARS = "no records, only other liars for neighbours"
    GHOSTS = "no records, neighbours beside the key that do not exist"
    FORGED = "records with broken signatures, and other liars"
    STRANGERS = "valid records of strangers, and other liars"
    COUNTS = "a claim of many records, and none of them; other liars"
    ERROR = "an error"


def lie(node: SwarmNode, how: Lie, liars: Sequence[bytes], source: random.Random) -> None:
    """Make a node lie from now on. liars: the peer ids of all of them."""
    assert node.member is not None
    protocol = node.member.protocol
    strangers = [Identity(source.randbytes(32)) for _ in range(8)]

    def find(key: bytes, entries: Sequence[Entry], look: Look | None, bytes_max: int, exclude: DHTID) -> Any:
        if how is Lie.ERROR:
            raise ConnectionError("go away")
        result = FindResult(type=dht_pb2.NOT_FOUND)
        place = int.from_bytes(key)
        if how is Lie.GHOSTS:
            named = sorted((source.randbytes(34) for _ in range(400)), key=lambda p: position(p) ^ place)[
                : CALLS.named_max
            ]
        else:
            named = [] if how is Lie.NOTHING else sorted(liars, key=lambda p: position(p) ^ place)[: CALLS.named_max]
        for peer in named:
            result.nearest_node_ids.append(position(peer).to_bytes(20))
            result.nearest_peer_ids.append(peer)
        if how is Lie.COUNTS:
            result.held = 100_000
        if how in {Lie.FORGED, Lie.STRANGERS} and look is not None:
            result.held, result.packed = 100_000, packed(_records(how, key, strangers))
        elif how in {Lie.FORGED, Lie.STRANGERS}:
            result.type, result.value = dht_pb2.FOUND_DICTIONARY, pack_dictionary(_records(how, key, strangers))
        return result

    protocol._find_one = find  # type: ignore[method-assign]
    protocol._store_one = lambda *_: True  # type: ignore[method-assign, assignment]


def _records(how: Lie, key: bytes, strangers: Sequence[Identity]) -> list[Entry]:
    """Records that come with the answer; whoever looks for their own key finds them in place."""
    gate = RecordGate(NETWORK, time.time)
    entries = []
    for stranger in strangers:
        data = signed(stranger, root=f"{key.hex():0>64}"[:64])
        facts: Facts = gate.facts(data)
        if how is Lie.FORGED:
            data = bytes([data[0] ^ 1]) + data[1:]
        entries.append(Entry(data, facts, facts.span))
    return entries


def beside(key: bytes, count: int, source: random.Random, *, among: int = 100) -> list[Identity]:
    """Make identities that are nearer to a key than any of `among` honest nodes is likely to be."""
    place, limit = int.from_bytes(key), (1 << 160) // (4 * among)
    chosen: list[Identity] = []
    while len(chosen) < count:
        identity = Identity(source.randbytes(32))
        if place_of(identity) ^ place < limit:
            chosen.append(identity)
    return chosen


def place_of(identity: Identity) -> int:
    return position(peer_bytes(identity))


def peer_bytes(identity: Identity) -> bytes:

    return bytes(PeerID.from_base58(identity.peer_id).to_bytes())
