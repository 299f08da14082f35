"""What the client writes into OPEN and REROUTE is what the hops read: neighbours agree about the edge between them."""

from base64 import b64decode
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.blocks import Blocks
from swarm.protocol.messages import LIFETIME_S_MAX, Open, Reroute
from swarm.protocol.seat import Client, Grant, Itinerary, Peer, Relay, Seat, Stop, Terms

OWNER = "1" * 44
ROOT = "ab" * 32
TERMS = Terms(ROOT, positions_max=100, rollback_max=4, batch=2, positions_soon=50)


def itinerary(hops: int, relayed: frozenset[int]) -> Itinerary:
    """A route of so many hops of three blocks each, at epoch 7."""
    stops = (Stop(chr(ord("A") + i) * 44, b"record %d" % i, Blocks(3 * i, 3 * i + 3), "float32") for i in range(hops))
    return Itinerary("cd" * 16, 7, tuple(stops), relayed, after_step=9)


@given(st.data())
def test_neighbours_agree_about_the_edge_between_them(data):
    hops = data.draw(st.integers(1, 6))
    relayed = data.draw(st.frozensets(st.integers(0, hops - 2))) if hops > 1 else frozenset()
    kept = data.draw(st.frozensets(st.integers(0, hops - 1)))
    route = itinerary(hops, relayed)
    requests: list[Open | Reroute] = [
        route.reroute(index, reset=True) if index in kept else route.open(index, TERMS, rebuild=True)
        for index in range(hops)
    ]
    seats = [Seat.of(request, OWNER, now=0.0) for request in requests]
    assert seats[0].accepts(OWNER, 7)
    assert seats[-1].next == Client()
    assert [seat.has_next for seat in seats] == [True] * (hops - 1) + [False]
    for index, (seat, following) in enumerate(pairwise(seats)):
        if index in relayed:
            assert seat.next == Relay()
            assert following.accepts(OWNER, 7)
        else:
            assert isinstance(seat.next, Peer)
            assert b64decode(seat.next.record) == route.stops[index + 1].record
            assert following.accepts(route.stops[index].peer, 7)
            assert not following.accepts(OWNER, 7)


def test_messages_say_what_the_session_is_opened_for():
    route = itinerary(2, frozenset())
    assert route.open(1, TERMS, rebuild=True) == Open(
        session="cd" * 16,
        epoch=7,
        root=ROOT,
        numeric_class="float32",
        start=3,
        stop=6,
        positions_max=100,
        rollback_max=4,
        batch=2,
        positions_soon=50,
        previous="A" * 44,
        after_step=9,
        rebuild=True,
    )
    assert route.reroute(0, reset=False) == Reroute(
        session="cd" * 16, epoch=7, after_step=9, next_record=route.neighbours(0).next_record
    )


@pytest.mark.parametrize(
    ("sender", "epoch", "why"),
    [
        ("A" * 44, 7, None),
        ("B" * 44, 7, "its activations come from another peer"),
        ("A" * 44, 6, "of another epoch"),
        ("A" * 44, 8, "of another epoch"),
    ],
)
def test_seat_takes_one_peer_in_one_epoch(sender, epoch, why):
    seat = Seat.of(itinerary(2, frozenset()).open(1, TERMS, rebuild=False), OWNER, now=0.0)
    assert seat.objection(sender, epoch) == why
    assert seat.accepts(sender, epoch) == (why is None)


def test_grant_ends_after_its_time():
    request = itinerary(1, frozenset()).open(0, TERMS, rebuild=False)
    grant = Seat.of(request, OWNER, now=100.0).grant
    assert grant == Grant(100.0 + LIFETIME_S_MAX, None)
    short = Seat.of(request.model_copy(update={"lifetime_s": 5}), OWNER, now=100.0).grant
    assert [short.is_over(now) for now in (104.0, 105.0, 105.1)] == [False, False, True]


def test_grant_is_used_up_by_tokens():
    request = itinerary(1, frozenset()).reroute(0, reset=False).model_copy(update={"tokens_max": 10})
    seat = Seat.of(request, OWNER, now=0.0)
    assert (left := seat.spend(6)) is not None
    assert (left.grant.tokens, left.epoch, seat.grant.tokens) == (4, 7, 10)
    assert left.spend(5) is None
    assert (empty := left.spend(4)) is not None
    assert empty.grant.tokens == 0


def test_grant_without_a_bound_is_never_used_up():
    seat = Seat.of(itinerary(1, frozenset()).reroute(0, reset=False), OWNER, now=0.0)
    assert seat.spend(1 << 40) is seat
