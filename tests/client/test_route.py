"""Planning is pure: announcements in, hops out."""

import gc
import time
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from itertools import combinations
from types import ModuleType

import pytest

from swarm.blocks import Blocks
from swarm.client.planning.costs import estimated
from swarm.client.planning.eligible import Reason
from swarm.client.planning.evidence import Evidence, edge_of, key_of
from swarm.client.planning.explain import ExplainedRoute, explanation
from swarm.client.planning.plan import plan
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.request import PlanningLimits, Request
from swarm.client.planning.route import Hop, step_s_of
from swarm.config import PROTOCOL_VERSION
from swarm.dht.records import Announcement, Mooring, SignedAnnouncement, Span
from swarm.errors import NoRoute
from swarm.identity import Identity

UNKNOWN_RTT_MS = PlanningLimits().unknown_rtt_ms


def server(
    start,
    stop,
    *,
    tps=None,
    dtype="float32",
    state="online",
    load=0.0,
    free_tokens=0,
    rtts=(),
    identity=None,
    device="",
):
    identity = identity or Identity.generate()
    now = time.time()
    return SignedAnnouncement(
        Announcement(
            protocol=PROTOCOL_VERSION,
            version="1",
            network="public",
            public_key=identity.public_key.hex(),
            root="0" * 64,
            model="m",
            n_blocks=200,
            blocks=Span(start, stop),
            numeric_class=dtype,
            addresses=("127.0.0.1:1",),
            channel_key="0" * 64,
            decode_tps=tps,
            free_tokens=free_tokens,
            load=load,
            state=state,
            device=device,
            rtts=tuple((signed.announcement.public_key[:16], float(ms)) for signed, ms in rtts),
            sequence=1,
            issued=now,
            expires=now + 60,
        ),
        b"",
    )


def proven(*servers):
    """Return the evidence of a client whose sessions have borne out all that these servers claim."""
    claims = [signed.announcement for signed in servers]
    trips = {edge_of(one, other): 0.0 for one, other in combinations(claims, 2)}
    return Evidence(blocks={key_of(claim): 0.0 for claim in claims}, trips=trips)


def adrift(signed):
    """The same server, hidden, when it has lost its anchors."""
    return SignedAnnouncement(signed.announcement.model_copy(update={"addresses": ()}), b"")


def request(
    wanted,
    servers,
    *,
    allowed_peers=None,
    blocked_peers=(),
    trusted_peers=(),
    optimize="latency",
    quality="full",
    exact=False,
    **options,
):
    preferences = Preferences(allowed_peers, blocked_peers, optimize, trusted_peers, quality, exact)
    return Request("m", wanted, tuple(servers), preferences=preferences, **options)


def planned(wanted, servers, **options):
    return plan(request(wanted, servers, **options))


def blocks_of(*servers, wanted="0:12", **options):
    return [str(hop.blocks) for hop in planned(Blocks.parse(wanted), servers, **options)]


def test_spans_are_joined_in_order():
    assert blocks_of(server(8, 12), server(0, 4), server(4, 8)) == ["0:4", "4:8", "8:12"]


def test_one_server_of_everything_beats_three_as_fast_ones():
    assert blocks_of(server(0, 4, tps=30), server(4, 8, tps=30), server(8, 12, tps=30), server(0, 12, tps=10)) == [
        "0:12"
    ]


def test_a_slow_server_of_everything_loses_to_fast_ones():
    spans = [server(0, 6, tps=200), server(6, 12, tps=200), server(0, 12, tps=0.5)]
    assert blocks_of(*spans) == ["0:6", "6:12"]


def test_a_span_is_entered_and_left_in_the_middle():
    assert blocks_of(server(0, 7), server(3, 12)) in (["0:3", "3:12"], ["0:7", "7:12"])
    assert blocks_of(server(0, 12), wanted="5:6") == ["5:6"]


def test_the_slowest_hop_says_how_long_a_step_takes():
    assert step_s_of(planned(Blocks(0, 12), [server(0, 4, tps=50), server(4, 12, tps=10, load=1.0)])) == 0.2
    assert step_s_of(planned(Blocks(6, 12), [server(0, 12, tps=10)])) == 0.05
    assert step_s_of(planned(Blocks(0, 12), [server(0, 12)])) == 0.0  # it has not measured itself
    assert step_s_of(()) == 0.0


def test_a_busy_server_is_left_to_others():
    busy, idle = server(0, 12, tps=10, load=5.0), server(0, 12, tps=10)
    assert planned(Blocks(0, 12), [busy, idle])[0].signed is idle


def test_only_servers_that_take_the_coding_are_planned():
    plain, coded = server(0, 12), server(0, 6)
    takes = coded.announcement.model_copy(update={"codings": ("zip", "int8")})
    coded = SignedAnnouncement(takes, b"")
    rest = SignedAnnouncement(server(6, 12).announcement.model_copy(update={"codings": ("int8",)}), b"")
    assert blocks_of(plain, coded, rest) == ["0:12"]
    assert blocks_of(plain, coded, rest, coding="int8") == ["0:6", "6:12"]
    with pytest.raises(NoRoute, match="--wire int8") as caught:
        planned(Blocks(0, 12), [plain, coded], coding="int8")
    assert caught.value.missing == tuple(range(6, 12))


def test_only_classes_of_the_wanted_dtype_are_used():
    rounded = server(0, 12, dtype="bfloat16+int8")
    assert planned(Blocks(0, 12), [rounded, server(0, 12, tps=100)], dtype="bfloat16")[0].signed is rounded
    with pytest.raises(NoRoute, match=r"bfloat16.*pass that as dtype"):
        blocks_of(rounded, dtype="float32")


def test_draining_and_joining_servers_are_not_used():
    with pytest.raises(NoRoute):
        blocks_of(server(0, 12, state="draining"), server(0, 12, state="joining"))


def test_hidden_servers_without_a_mooring_are_not_used():
    lost, moored = adrift(server(0, 12, tps=100)), server(0, 12, tps=1)
    anchors = (Mooring("1" * 64, "2" * 64, "192.0.2.1:1"),)
    moored = SignedAnnouncement(moored.announcement.model_copy(update={"addresses": (), "anchors": anchors}), b"")
    assert planned(Blocks(0, 12), [lost, moored])[0].signed is moored
    with pytest.raises(NoRoute, match="behind routers") as caught:
        blocks_of(lost)
    assert caught.value.passing


def test_missing_blocks_are_named():
    with pytest.raises(NoRoute) as caught:
        blocks_of(server(0, 4), server(7, 12))
    assert caught.value.missing == (4, 5, 6)


def test_avoided_peers_are_left_out():
    bad, good = server(0, 12, tps=100), server(0, 12, tps=1)
    assert planned(Blocks(0, 12), [bad, good], avoid=[bad.announcement.peer_id])[0].signed is good


def test_a_copied_channel_key_does_not_have_its_owner_avoided():
    honest, mallory = server(0, 12), server(0, 12, tps=1e6)
    assert honest.announcement.channel_key == mallory.announcement.channel_key
    (hop,) = planned(Blocks(0, 12), [honest, mallory])
    assert hop.signed is mallory
    (hop,) = planned(Blocks(0, 12), [honest, mallory], avoid=[hop.process])
    assert hop.signed is honest


def test_a_plan_is_repeatable():
    servers = [server(0, 12) for _ in range(20)]
    first = planned(Blocks(0, 12), servers)
    assert all(planned(Blocks(0, 12), servers[i:] + servers[:i]) == first for i in range(20))


def test_a_route_never_comes_back_to_a_peer():
    """A hop holds one part of a session: coming back to it would be refused."""
    slow, fast = server(0, 12, tps=5), server(4, 8, tps=1000)
    hops = planned(Blocks(0, 12), [slow, fast])
    assert [(hop.peer_id, str(hop.blocks)) for hop in hops] == [(slow.announcement.peer_id, "0:12")]


def test_a_directory_full_of_servers_is_planned_in_a_moment():
    servers = [server(n % 125, n % 125 + 1 + n % 3) for n in range(500)] * 8
    began = time.process_time()
    with pytest.raises(NoRoute):
        planned(Blocks(0, 200), servers)
    planned(Blocks(0, 125), servers)
    assert time.process_time() - began < 5  # 0.3 s


# --- round trips


def test_near_hops_are_taken_over_faster_far_ones():
    identity = Identity.generate()
    first, far = server(0, 6, rtts=[(server(6, 12, identity=identity), 2)]), server(6, 12, tps=25)
    near = server(6, 12, rtts=[(first, 2)], identity=identity)
    hops = planned(Blocks(0, 12), [first, near, far])
    assert [hop.signed for hop in hops] == [first, near]


def test_hop_known_to_be_far_loses_to_an_unmeasured_one():
    first = server(0, 6)
    far, unknown = server(6, 12, tps=25, rtts=[(first, 300)]), server(6, 12)
    assert [hop.signed for hop in planned(Blocks(0, 12), [first, far, unknown])] == [first, unknown]


def test_the_longer_of_two_announced_round_trips_counts():
    identity = Identity.generate()
    liar = server(6, 12, tps=25, identity=identity)
    honest = server(0, 6, rtts=[(liar, 300)])
    liar = server(6, 12, tps=25, identity=identity, rtts=[(honest, 0)])
    other = server(6, 12)
    assert [hop.signed for hop in planned(Blocks(0, 12), [honest, liar, other])] == [honest, other]


def test_a_peer_with_two_spans_serves_one_of_them():
    identity = Identity.generate()
    servers = [server(0, 6, tps=99, identity=identity), server(6, 12, tps=99, identity=identity), server(6, 12)]
    for optimize in ("latency", "throughput"):
        hops = planned(Blocks(0, 12), servers, optimize=optimize)
        assert [hop.signed for hop in hops] == [servers[0], servers[2]]


def test_client_round_trips_count_for_first_and_last_hop():
    near, far = server(0, 12), server(0, 12, tps=21)
    rtts = {near.announcement.public_key: 5.0, far.announcement.public_key: 100.0}
    route = planned(Blocks(0, 12), [near, far], client_rtts=rtts)
    assert route[0].signed is near
    assert route.estimate_ms == pytest.approx(5.0 + 50.0 + 0.5)


def test_an_unmeasured_peer_is_as_far_as_the_median():
    """Else it would stay with the first peers that it met, or never come back to them."""
    known, faster = server(0, 12), server(0, 12, tps=21)
    for ms in (1.0, 200.0):
        (hop,) = planned(Blocks(0, 12), [known, faster], client_rtts={known.announcement.public_key: ms})
        assert hop.signed is faster


# --- room, and who may be used


def test_a_server_without_room_is_left_to_shorter_sessions():
    full, empty = server(0, 12, tps=100, free_tokens=10), server(0, 12, tps=20, free_tokens=1000)
    assert planned(Blocks(0, 12), [full, empty], positions_needed=10)[0].signed is full
    assert planned(Blocks(0, 12), [full, empty], positions_needed=11)[0].signed is empty


def test_servers_without_room_fill_gaps_alone():
    full, empty = server(0, 12, tps=100, free_tokens=10), server(0, 8, tps=20, free_tokens=1000)
    route = planned(Blocks(0, 12), [full, empty], positions_needed=500)
    assert [(hop.signed, str(hop.blocks)) for hop in route] == [(empty, "0:8"), (full, "8:12")]
    assert route.estimate_ms < 1000


def test_blocked_peers_are_unused_and_named_by_the_error():
    fast, slow = server(0, 12, tps=100), server(0, 12, tps=10)
    blocked = {fast.announcement.peer_id}
    assert planned(Blocks(0, 12), [fast, slow], blocked_peers=blocked)[0].signed is slow
    with pytest.raises(NoRoute, match="blocked_peers") as caught:
        planned(Blocks(0, 12), [fast], blocked_peers=blocked)
    assert caught.value.missing == tuple(range(12))


def test_only_allowed_peers_are_used():
    mine, other = server(0, 8, tps=1), server(0, 12, tps=100)
    allowed = {mine.announcement.peer_id}
    assert planned(Blocks(0, 8), [mine, other], allowed_peers=allowed)[0].signed is mine
    with pytest.raises(NoRoute, match="allowed_peers") as caught:
        planned(Blocks(0, 12), [mine, other], allowed_peers=allowed)
    assert caught.value.missing == (8, 9, 10, 11)
    with pytest.raises(NoRoute, match="no server has them"):
        planned(Blocks(0, 12), [mine], allowed_peers=allowed)


# --- throughput


def test_throughput_spares_the_slowest_server():
    slow, fast = server(0, 9, tps=5), server(3, 12, tps=20)
    route = planned(Blocks(0, 12), [slow, fast], optimize="throughput", evidence=proven(fast))
    assert [(hop.signed, str(hop.blocks)) for hop in route] == [(slow, "0:3"), (fast, "3:12")]


def test_throughput_shares_the_work_where_latency_does_not():
    servers = [server(0, 12, tps=10), server(0, 6, tps=18), server(6, 12, tps=18)]
    assert len(planned(Blocks(0, 12), servers)) == 1
    assert len(planned(Blocks(0, 12), servers, optimize="throughput")) > 1


def test_throughput_does_not_split_stages_faster_than_a_trip():
    servers = [server(0, 12, tps=60) for _ in range(4)]
    assert len(planned(Blocks(0, 12), servers, optimize="throughput")) == 1


# --- explanations


def test_an_explanation_has_a_reason_for_every_unused_server():
    best, slower, other = server(0, 12, tps=20), server(0, 12, tps=10), server(0, 12, dtype="bfloat16+int8")
    quantised = server(0, 12, dtype="float32+q4_0")
    full, failed, blocked = (server(0, 12, tps=tps, free_tokens=0) for tps in (30, 40, 50))
    leaving, elsewhere, lost = server(0, 12, state="draining"), server(20, 30), adrift(server(0, 12))
    best, slower, failed = (
        SignedAnnouncement(signed.announcement.model_copy(update={"free_tokens": 9}), b"")
        for signed in (best, slower, failed)
    )
    asked = request(
        Blocks(0, 12),
        [best, slower, other, quantised, full, failed, blocked, leaving, elsewhere, lost],
        dtype="float32",
        avoid=[Hop(failed, Blocks(0, 12)).process],
        blocked_peers=[blocked.announcement.peer_id],
        positions_needed=9,
    )
    route = plan(asked)
    assert [hop.signed for hop in route] == [best]
    explained = explanation(route, asked)
    reasons = {one.peer_id: one.reason for one in explained.rejected}
    assert reasons == {
        slower.announcement.peer_id: Reason.SLOWER,
        other.announcement.peer_id: Reason.OTHER_CLASS,
        quantised.announcement.peer_id: Reason.OTHER_TIER,
        full.announcement.peer_id: Reason.NO_ROOM,
        failed.announcement.peer_id: Reason.AVOIDED,
        blocked.announcement.peer_id: Reason.BLOCKED,
        leaving.announcement.peer_id: Reason.NOT_ONLINE,
        lost.announcement.peer_id: Reason.NO_ADDRESS,
        elsewhere.announcement.peer_id: Reason.ELSEWHERE,
    }
    assert explained.rejected[0].slower_ms == pytest.approx(50 / 12 + UNKNOWN_RTT_MS / 2 + 0.5)  # for one block
    only = explained.hops[0]
    assert (only.trip_ms, only.compute_ms, only.queue_ms) == (UNKNOWN_RTT_MS / 2, pytest.approx(50.0), 0.0)
    assert route.estimate_ms == explained.estimate_ms == pytest.approx(50.0 + UNKNOWN_RTT_MS + 0.5)


def test_an_explanation_for_people_names_every_hop_and_stays_short():
    fast = [server(0, 6), server(6, 12)]
    slow = [server(0, 12, tps=1) for _ in range(150)]
    asked = request(Blocks(0, 12), fast + slow, evidence=proven(*fast))
    route = ExplainedRoute.of(plan(asked), asked)
    text = route.explain()
    assert len(text.splitlines()) < 65
    assert all(hop.peer_id in text for hop in route)
    assert "and 100 more" in text
    assert "ms more" in text
    assert text == str(explanation(route, asked))


def test_a_route_is_a_sequence_of_hops():
    servers = [server(0, 6), server(6, 12)]
    first, second = Hop(servers[0], Blocks(0, 6)), Hop(servers[1], Blocks(6, 12))
    route = planned(Blocks(0, 12), servers)
    assert isinstance(route, Sequence)
    assert (len(route), list(route), route[0], route[-1], route[1:]) == (2, [first, second], first, second, (second,))
    assert second in route
    with pytest.raises(IndexError):
        route[2]
    with pytest.raises(FrozenInstanceError):
        route.hops = ()


def test_a_printed_route_is_the_table_that_explains_it():
    measured = Hop(server(0, 6, load=2.0), Blocks(0, 6), latency_ms=12.34)
    asked = request(Blocks(0, 12), [measured.signed, server(6, 12)])
    route = ExplainedRoute.of(estimated([measured, Hop(asked.servers[1], Blocks(6, 12))], asked), asked)
    assert repr(route) == str(route)
    assert str(route) == route.explain()  # no other server is there to be compared with
    head, promise, _, _, first, second, home = str(route).splitlines()
    assert head == "2 hops in float32, 261.0 ms a token by estimate, planned for latency"
    assert promise.startswith("exactness 'tokens': other servers of these classes choose the same tokens")
    assert first.split() == [
        *(route[0].peer_id, "0:6", "float32"),
        *("12.3", "20.0", "50.0", "100.0", "0.5", "170.5", "claimed"),
    ]
    assert second.split() == [
        *(route[1].peer_id, "6:12", "float32"),
        *("20.0", "50.0", "0.0", "0.5", "70.5", "claimed"),
    ]
    assert home == "and 20.0 ms from the last hop to the client"
    assert repr(measured) == f"<Hop {measured.peer_id} 0:6, 12.3 ms>"


def test_a_route_does_not_hold_unused_servers():
    asked = request(Blocks(0, 12), [server(0, 12)] + [server(0, 12, tps=1) for _ in range(20)])
    route = plan(asked)
    unused = {id(signed) for signed in asked.servers} - {id(route[0].signed)}
    assert not unused & set(map(id, reachable(route)))


def reachable(route):
    """All that a route refers to, directly or not, but modules and classes."""
    found, left = {}, [route]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, (type, ModuleType)):
            found[id(one)] = one
            left += gc.get_referents(one)
    return found.values()


def test_a_server_gets_only_blocks_it_is_trusted_with():
    mine, other, whole = server(0, 8, tps=1), server(0, 12, tps=1000), server(4, 12, tps=1)
    trusted = ((Blocks(0, 2), frozenset({mine.announcement.peer_id})),)
    asked = request(Blocks(0, 12), [mine, other, whole], trusted_peers=trusted, evidence=proven(other))
    route = plan(asked)
    assert [(hop.signed is mine, str(hop.blocks)) for hop in route] == [(True, "0:2"), (False, "2:12")]
    rejected = explanation(route, asked).rejected
    assert {one.peer_id: one.reason for one in rejected} == {whole.announcement.peer_id: Reason.SLOWER}


def test_a_pin_in_the_middle_splits_other_offers():
    mine, other, after = server(4, 8), server(0, 12), server(8, 12)
    trusted = ((Blocks(5, 6), frozenset({mine.announcement.peer_id})),)
    route = planned(Blocks(0, 12), [mine, other, after], trusted_peers=trusted)
    assert [hop.peer_id for hop in route] == [s.announcement.peer_id for s in (other, mine, after)]
    with pytest.raises(NoRoute):  # `other` would have to hold two parts of one session
        planned(Blocks(0, 12), [server(5, 6, identity=None), other], trusted_peers=trusted)


def test_pins_of_one_block_hold_together():
    one, two = server(0, 12), server(0, 12)
    ids = [signed.announcement.peer_id for signed in (one, two)]
    trusted = ((Blocks(0, 8), frozenset(ids)), (Blocks(4, 12), frozenset(ids[1:])))
    route = planned(Blocks(0, 12), [one, two], trusted_peers=trusted)
    assert route[-1].signed is two
    nobody = (*trusted, (Blocks(6, 7), frozenset(ids[:1])))
    with pytest.raises(NoRoute, match="trusted_peers") as caught:
        planned(Blocks(0, 12), [one, two], trusted_peers=nobody)
    assert caught.value.missing == (6,)


def test_an_explanation_names_untrusted_servers():
    mine, other = server(0, 4), server(0, 4, tps=1000)
    trusted = ((Blocks(0, 4), frozenset({mine.announcement.peer_id})),)
    asked = request(Blocks(0, 4), [mine, other], trusted_peers=trusted)
    assert [one.reason for one in explanation(plan(asked), asked).rejected] == [Reason.NOT_TRUSTED]
