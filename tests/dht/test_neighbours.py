"""Nodes that one node knows: strangers that call once neither fill its table nor hide those that answer."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.p2p import PeerID

from swarm.dht.format import CALLS
from swarm.dht.member import Member, MemberLimits
from swarm.dht.neighbours import Neighbours
from swarm.dht.protocol import SwarmProtocol, node_id_of


def peers(seed: int) -> Iterator[PeerID]:
    rng = random.Random(seed)
    while True:
        yield PeerID(b"\x00\x24\x08\x01\x12\x20" + rng.randbytes(32))


def some(seed: int, count: int) -> list[PeerID]:
    source = peers(seed)
    return [next(source) for _ in range(count)]


US, *HONEST = some(1, 101)


def table() -> Neighbours:
    """A table with a hundred nodes that have answered."""
    made = Neighbours(node_id_of(US), CALLS.bucket_size, CALLS.waiting_max)
    for peer in HONEST:
        made.add_answering(node_id_of(peer), peer)
    return made


def test_strangers_that_call_once_take_bounded_room_and_hide_nobody() -> None:
    known = table()
    before = set(known.answering())
    for peer in some(2, 20_000):
        known.add_or_update_node(node_id_of(peer), peer)
    places = (CALLS.bucket_size + CALLS.waiting_max) * len(known.buckets)
    assert len(known.uid_to_peer_id) == len(known.peer_id_to_uid) <= places < 2000
    assert before == set(known.answering()), "those that answer keep their places"
    assert len(known.peers()) > 2 * len(before)


def test_those_that_answer_are_named_first_and_the_nearest_of_them() -> None:
    known = table()
    for peer in some(3, 300):
        known.add_or_update_node(node_id_of(peer), peer)
    key = node_id_of(some(4, 1)[0])
    near = known.get_nearest_neighbors(key, 10)
    assert near == sorted(near, key=lambda each: key.xor_distance(each[0]))
    everybody = sorted(known.peers(), key=lambda peer: key.xor_distance(node_id_of(peer)))[:20]
    answering = [peer for peer in everybody if peer in HONEST]
    assert 0 < len(answering) < 10
    strangers = [peer for peer in everybody if peer not in HONEST]
    assert {peer for _, peer in near} == {*answering, *strangers[: 10 - len(answering)]}


def test_who_never_answered_is_doubted_until_it_answers_or_goes() -> None:
    known = table()
    assert known.doubtful(64) == []
    first, second = some(5, 2)
    for peer in (first, second):
        known.add_or_update_node(node_id_of(peer), peer)
    assert set(known.doubtful(64)) == {first, second}
    assert len(known.doubtful(1)) == 1
    known.add_answering(node_id_of(first), first)
    del known[node_id_of(second)]
    assert known.doubtful(64) == []
    assert second not in known.peers()


def test_a_full_bucket_has_those_doubted_that_were_heard_of_longest_ago() -> None:
    known, source = Neighbours(node_id_of(US), CALLS.bucket_size, CALLS.waiting_max), peers(6)
    half = 1 << 159
    far = (peer for peer in source if (int(node_id_of(peer)) < half) != (int(node_id_of(US)) < half))
    full = [next(far) for _ in range(400)]
    for peer in full:
        known.add_answering(node_id_of(peer), peer)
    doubted = known.doubtful(64)
    assert doubted, "others want their places"
    assert set(doubted) <= set(full)
    asked = doubted[0]
    known.add_answering(node_id_of(asked), asked)
    assert asked not in known.doubtful(64)


def test_who_has_answered_nobody_knows_is_all_there_is() -> None:
    known = Neighbours(node_id_of(US), CALLS.bucket_size, CALLS.waiting_max)
    strangers = some(7, 5)
    for peer in strangers:
        known.add_or_update_node(node_id_of(peer), peer)
    assert set(known.answering()) == set(strangers)
    known.add_answering(node_id_of(strangers[0]), strangers[0])
    assert known.answering() == strangers[:1]


@pytest.mark.virtual_clock
async def test_upkeep_goes_on_while_strangers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 2.4 s a stranger takes a place, and each takes 3 s to be found silent."""
    known, rounds, pings = table(), [0], [0]

    async def ping(peer: PeerID) -> None:
        pings[0] += 1
        await asyncio.sleep(CALLS.timeout_s)
        with suppress(KeyError):
            del known[node_id_of(peer)]

    async def learn(*_: object) -> None:
        rounds[0] += 1

    async def rejoin(_: Member) -> bool:
        return False

    monkeypatch.setattr(Member, "learn", learn)
    monkeypatch.setattr(Member, "_rejoin", rejoin)
    protocol = cast(SwarmProtocol, SimpleNamespace(routing_table=known, ping=ping))
    parts: Any = (None, protocol, None, (), None, 0.1, None, MemberLimits())
    upkeep = asyncio.create_task(Member(*parts).maintain([]))
    for peer in some(8, 250):
        await asyncio.sleep(2.4)
        known.add_or_update_node(node_id_of(peer), peer)
    upkeep.cancel()
    assert rounds[0] >= 20, "in ten minutes"
    assert pings[0] >= 150
    assert len(known.doubtful(1000)) < 70
