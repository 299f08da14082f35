"""What servers claim, and how far a client believes it: pure, but for the router that keeps what was learned."""

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from swarm.blocks import Blocks
from swarm.client.planning.blind import plan_blindly
from swarm.client.planning.costs import estimated, shown_by
from swarm.client.planning.evidence import Evidence, EvidenceLimits, Shown, edge_of, key_of
from swarm.client.planning.plan import plan
from swarm.client.planning.request import PlanningLimits
from swarm.client.planning.route import Hop, process_of
from swarm.client.session.ring import Use
from swarm.dht.records import SignedAnnouncement
from swarm.identity import Identity
from tests.client.test_route import planned, proven, request, server
from tests.client.test_router import PLAN, membership_of, router_of

ALL = Blocks(0, 12)
LIMITS = PlanningLimits()


def hops_of(*servers):
    return [Hop(signed, signed.announcement.span) for signed in servers]


def shown(ms, *servers):
    return Shown({key_of(signed.announcement): ms for signed in servers}, {})


def neighbours(ms, other_ms=None, *, doubled=False):
    """Two servers of half a model. ms: the round trip that the first announces; other_ms: the second, if it does."""
    identity = Identity.generate()
    there = server(6, 12, identity=identity)
    first = server(0, 6, rtts=[(there, ms)] * (1 + doubled))
    return first, server(6, 12, identity=identity, rtts=[] if other_ms is None else [(first, other_ms)])


def trip_ms(servers, *others, **options):
    asked = request(ALL, [*servers, *others], **options)
    return estimated(hops_of(*servers), asked).estimates[1].trip_ms


# --- claims of speed


def test_a_boast_counts_as_an_ordinary_speed():
    honest, liar = [server(0, 12, tps=tps) for tps in (10, 20, 40)], server(0, 12, tps=800)
    asked = request(ALL, [*honest, liar])
    assert estimated(hops_of(liar), asked).estimates[0].compute_ms == pytest.approx((1000 / 20 + 1000 / 40) / 2)
    assert estimated(hops_of(honest[0]), asked).estimates[0].compute_ms == pytest.approx(1000 / 10)


def test_clients_choose_among_ordinary_servers_each_its_own():
    honest, liar = [server(0, 12, tps=20) for _ in range(4)], server(0, 12, tps=400)
    chosen = Counter(planned(ALL, [*honest, liar], evidence=Evidence(salt=bytes([n])))[0].peer_id for n in range(200))
    assert set(chosen) == {signed.announcement.peer_id for signed in (*honest, liar)}
    assert all(20 <= times <= 60 for times in chosen.values()), chosen


def test_a_speed_that_use_has_borne_out_counts_in_full():
    ordinary, fast = [server(0, 12, tps=20) for _ in range(3)], server(0, 12, tps=400)
    route = planned(ALL, [*ordinary, fast], evidence=proven(fast))
    assert route[0].signed is fast
    assert route.estimates[0].compute_ms == pytest.approx(1000 / 400)
    assert [hop.speed for hop in route.estimates] == ["shown"]


def test_a_ring_as_fast_as_the_claims_bears_them_out():
    servers = server(0, 6, tps=100), server(6, 12, tps=50)
    asked = request(ALL, servers, client_rtts={s.announcement.public_key: 10.0 for s in servers})
    claimed_ms = 10.0 + 1000 / 100 + 1000 / 50 + 2 * LIMITS.hop_ms
    for token_ms in (1.0, claimed_ms, LIMITS.ring_slack * claimed_ms):
        found = shown_by(hops_of(*servers), token_ms, asked).blocks
        assert found == {
            key_of(servers[0].announcement): pytest.approx(1000 / 100 / 6),
            key_of(servers[1].announcement): pytest.approx(1000 / 50 / 6),
        }


def test_what_exceeds_the_claims_is_charged_to_each_hop():
    """One of two boasts: it may be either, so neither is believed beyond what the ring has left it."""
    honest, liar = neighbours(20.0, 20.0)
    liar = SignedAnnouncement(liar.announcement.model_copy(update={"decode_tps": 1e6}), b"")
    asked = request(ALL, [honest, liar], client_rtts={s.announcement.public_key: 10.0 for s in (honest, liar)})
    claimed_ms = 10.0 + 10.0 + 1000 / 20 + 1000 / 1e6 + 2 * LIMITS.hop_ms
    found = shown_by(hops_of(honest, liar), LIMITS.ring_slack * claimed_ms + 60.0, asked)
    assert found.blocks[key_of(liar.announcement)] == pytest.approx(10.0, abs=0.01)
    assert found.blocks[key_of(honest.announcement)] == pytest.approx(1000 / 20 / 6 + 10.0)
    assert found.trips == {edge_of(honest.announcement, liar.announcement): pytest.approx(10.0 + 60.0)}


def test_a_trip_that_no_server_announces_hides_no_boast():
    servers = server(0, 6, tps=1e6), server(6, 12, tps=1e6)
    asked = request(ALL, servers, client_rtts={s.announcement.public_key: 0.0 for s in servers})
    found = shown_by(hops_of(*servers), LIMITS.unknown_rtt_ms / 2, asked)
    assert all(ms > 0.9 * LIMITS.unknown_rtt_ms / 2 / 6 for ms in found.blocks.values())
    assert not found.trips


def test_what_use_has_shown_makes_no_server_slower_than_an_ordinary_one():
    servers = [server(0, 12, tps=20) for _ in range(3)]
    asked = request(ALL, servers, evidence=Evidence().used(shown(1e6, servers[0]), b""))
    assert estimated(hops_of(servers[0]), asked).estimates[0].compute_ms == pytest.approx(1000 / 20)


# --- claims of round trips


def test_a_trip_that_one_end_announces_is_no_shorter_than_an_unknown_one():
    for servers in (neighbours(0.1), neighbours(0.1, doubled=True)):  # who is listed twice has not answered
        assert trip_ms(servers) == LIMITS.unknown_rtt_ms / 2
        route = planned(ALL, servers)
        assert route.estimates[1].trip_ms == LIMITS.unknown_rtt_ms / 2
        assert route.estimate_ms == pytest.approx(LIMITS.unknown_rtt_ms * 1.5 + 100 + 2 * LIMITS.hop_ms)
    assert trip_ms(neighbours(300.0)) == 150.0


def test_a_boast_of_one_end_wins_no_place_in_a_route():
    identity, boaster = Identity.generate(), server(6, 12, tps=20)
    first = server(0, 6, tps=20, rtts=[(boaster, 0.1), (server(6, 12, identity=identity), 10.0)])
    honest = server(6, 12, tps=19, identity=identity, rtts=[(first, 10.0)])
    assert planned(ALL, [first, boaster, honest])[1].signed is honest


def test_a_trip_that_both_ends_announce_is_no_shorter_than_an_ordinary_one():
    others = [server(0, 12, rtts=[(server(0, 1), ms)]) for ms in (8.0, 9.0, 10.0)]
    pair = neighbours(0.1, 0.2)
    assert trip_ms(pair, *others) == 8.0 / 2
    assert planned(ALL, [*pair, *others], blocked_peers={s.announcement.peer_id for s in others}).estimates[
        1
    ].trip_ms == pytest.approx(8.0 / 2)
    silent = [server(0, 12) for _ in range(6)]
    assert trip_ms(pair, *silent) == LIMITS.unknown_rtt_ms / 2, "of whom most announce nothing, a trip is unknown"


def test_a_trip_that_use_has_borne_out_counts_in_full():
    for pair in (neighbours(2.0), neighbours(2.0, 1.0)):
        others = [server(0, 12) for _ in range(3)]
        evidence = Evidence(trips={edge_of(*(s.announcement for s in pair)): 1.2})
        assert trip_ms(pair, *others, evidence=evidence) == 1.2
        blocked = {s.announcement.peer_id for s in others}
        route = planned(ALL, [*pair, *others], evidence=evidence, blocked_peers=blocked)
        assert route.estimates[1].trip_ms == 1.2
        assert route.estimate_ms == pytest.approx(LIMITS.unknown_rtt_ms + 1.2 + 100 + 2 * LIMITS.hop_ms)


# --- audits


def test_servers_that_an_audit_has_confirmed_come_first_once_there_are_any():
    quick, near_it, slow = server(0, 12, tps=20), server(0, 12, tps=17), server(0, 12, tps=10)
    believed = proven(quick)
    route = planned(ALL, [quick, near_it, slow], evidence=believed)
    assert route[0].signed is quick
    assert route.cost_ms == route.estimate_ms
    evidence = believed.audited([key_of(near_it.announcement)], [])
    route = planned(ALL, [quick, near_it, slow], evidence=evidence)
    assert route[0].signed is near_it
    assert route.estimates[0].is_confirmed
    assert route.cost_ms == route.estimate_ms
    (hop,) = planned(ALL, [quick], evidence=evidence).estimates
    assert hop.caution_ms == pytest.approx(LIMITS.unaudited_share * 1000 / 20)
    evidence = believed.audited([key_of(slow.announcement)], [])
    assert planned(ALL, [quick, near_it, slow], evidence=evidence)[0].signed is quick, (
        "it is more than that much faster"
    )


def test_a_confirmed_server_loses_that_by_a_verdict_and_as_another_process():
    one, other = server(0, 12), server(0, 12)
    keys = [key_of(one.announcement), key_of(other.announcement)]
    evidence = Evidence().audited(keys, [])
    assert list(evidence.confirmed) == keys
    assert list(evidence.audited([], keys[:1]).confirmed) == keys[1:]
    assert list(evidence.audited(keys[:1], keys[:1]).confirmed) == keys[1:]
    again = one.announcement.model_copy(update={"channel_key": "1" * 64})
    assert key_of(again) not in evidence.confirmed


def test_what_a_client_remembers_is_bounded_and_the_oldest_goes_first():
    limits = EvidenceLimits(processes_max=2, trips_max=1)
    servers = [server(0, 6) for _ in range(3)]
    a, b, c = (key_of(signed.announcement) for signed in servers)
    evidence = Evidence(limits=limits)
    for key in (a, b, a, c):
        evidence = evidence.used(Shown({key: 1.0}, {(key, key): 1.0}), b"").audited([key], [])
    assert list(evidence.blocks) == list(evidence.confirmed) == [a, c]
    assert list(evidence.trips) == [(c, c)]


def test_a_route_that_shows_nothing_new_is_kept():
    one, other = server(0, 12), server(0, 12)
    evidence = Evidence(salt=b"a").used(shown(1.0, one), b"b")
    assert evidence.salt == b"b"
    assert evidence.used(shown(2.0, one), b"c").salt == b"b"
    assert evidence.used(shown(2.0, one, other), b"c").salt == b"c"


# --- routes of audits


def test_boasts_draw_no_replays():
    honest = [server(0, 12, tps=20) for _ in range(4)]
    liar = server(0, 12, tps=1e6, rtts=[(one, 0.1) for one in honest])
    asked = request(ALL, [*honest, liar], evidence=proven(liar), client_rtts={liar.announcement.public_key: 0.0})
    random = Random("draws")
    drawn = Counter(plan_blindly(asked, random)[0].peer_id for _ in range(300))
    assert all(30 <= drawn[signed.announcement.peer_id] <= 90 for signed in (*honest, liar)), drawn


def test_replays_take_few_hops_and_announcements_as_they_are():
    parts = [server(n, n + 1, tps=400) for n in range(12)]
    halves = [server(0, 6, load=9.0), server(6, 12, load=9.0)]
    for number in range(20):
        route = plan_blindly(request(ALL, [*parts, *halves]), Random(number))
        assert len(route) <= 4
        assert all(any(hop.signed is signed for signed in (*parts, *halves)) for hop in route)


def test_replays_keep_to_the_users_peers():
    mine, others = server(0, 12, tps=1), [server(0, 12, tps=50) for _ in range(5)]
    pinned = ((Blocks(3, 4), frozenset({mine.announcement.peer_id})),)
    for number in range(10):
        route = plan_blindly(request(ALL, [mine, *others], trusted_peers=pinned), Random(number))
        assert next(hop for hop in route if 3 in hop.blocks).signed is mine
        left = others[:2]
        avoided = [process_of(signed.announcement) for signed in (mine, *others[2:])]
        (hop,) = plan_blindly(request(ALL, [mine, *others], avoid=avoided), Random(number))
        assert any(hop.signed is signed for signed in left)


# --- the router, which keeps the latest evidence


@pytest.mark.virtual_clock
async def test_a_session_teaches_how_fast_its_servers_are_when_it_ends():
    ordinary, fast = [server(0, 6, tps=20) for _ in range(3)], server(0, 6, tps=400)
    swarm, directory = membership_of(*ordinary, fast)
    swarm.router.preferences = replace(swarm.router.preferences, allowed_peers=frozenset({fast.announcement.peer_id}))
    swarm.sessions.latency_ms = 1.0
    session = await swarm.open(Blocks(0, 6), PLAN)
    swarm.sessions.ended.set_result(Use(tuple(session.route), 4.0))
    await asyncio.sleep(0)
    swarm.router.preferences = replace(swarm.router.preferences, allowed_peers=None)
    route = await swarm.router.plan(Blocks(0, 6))
    assert route[0].signed is fast
    assert route.estimates[0].compute_ms == pytest.approx(1000 / 400)
    assert "speed shown: " in str(route)
    assert directory.surveys == 1


@pytest.mark.virtual_clock
async def test_a_session_of_few_steps_teaches_nothing():
    swarm, _ = membership_of(server(0, 6))
    await swarm.open(Blocks(0, 6), PLAN)
    before = swarm.router.evidence
    swarm.sessions.ended.set_result(None)
    await asyncio.sleep(0)
    assert swarm.router.evidence is before


@pytest.mark.virtual_clock
async def test_a_router_draws_routes_where_it_is_told_to():
    honest, liar = [server(0, 6, tps=20) for _ in range(3)], server(0, 6, tps=1e6)
    router, *_ = router_of(*honest, liar)
    router.evidence = proven(liar)
    assert (await router.plan(Blocks(0, 6)))[0].signed is liar
    random = Random("draws")
    drawn = [(await router.plan(Blocks(0, 6), draws=random))[0].peer_id for _ in range(40)]
    assert len(set(drawn)) == 4


@pytest.mark.virtual_clock
async def test_the_router_prefers_what_audits_have_confirmed():
    one, other = server(0, 6), server(0, 6)
    router, *_ = router_of(one, other)
    for right, blamed in ((one, other), (other, one)):
        router.audited({process_of(right.announcement)}, {process_of(blamed.announcement)})
        route = await router.plan(Blocks(0, 6))
        assert route[0].signed is right
        assert route.estimates[0].is_confirmed
        assert "audited" in str(route)


def test_a_printed_route_says_why_a_speed_is_not_believed():
    ordinary, boasts = [server(0, 12, tps=20) for _ in range(3)], server(0, 12, tps=400)
    asked = request(ALL, [*ordinary, boasts], evidence=Evidence().audited([key_of(ordinary[0].announcement)], []))
    text = str(estimated(hops_of(boasts), asked))
    assert "speed ordinary: a server claims more, and no session of yours has borne that out" in text
    assert "outputs not audited: such a server counts as slower" in text
    text = str(plan(asked))
    assert "audited" in text
    assert "speed ordinary" not in text
