"""Planning is pure: announcements in, hops out."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.blocks import Blocks
from swarm.client.route import Hop, _cost_ms, plan_route
from swarm.config import PROTOCOL_VERSION
from swarm.dht.records import Announcement, SignedAnnouncement, Span
from swarm.errors import NoRoute
from swarm.identity import Identity


def server(start, stop, *, tps=None, dtype="float32", state="online", load=0.0):
    identity = Identity.generate()
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
            load=load,
            state=state,
            sequence=1,
            issued=now,
            expires=now + 60,
        ),
        b"",
    )


def plan(*servers, wanted="0:12", **options):
    return [str(hop.blocks) for hop in plan_route("m", Blocks.parse(wanted), servers, **options)]


def test_spans_are_joined_in_order():
    assert plan(server(8, 12), server(0, 4), server(4, 8)) == ["0:4", "4:8", "8:12"]


def test_one_server_of_everything_beats_three_as_fast_ones():
    assert plan(server(0, 4, tps=30), server(4, 8, tps=30), server(8, 12, tps=30), server(0, 12, tps=10)) == ["0:12"]


def test_a_slow_server_of_everything_loses_to_fast_ones():
    spans = [server(0, 6, tps=200), server(6, 12, tps=200), server(0, 12, tps=0.5)]
    assert plan(*spans) == ["0:6", "6:12"]


def test_a_span_is_entered_and_left_in_the_middle():
    assert plan(server(0, 7), server(3, 12)) in (["0:3", "3:12"], ["0:7", "7:12"])
    assert plan(server(0, 12), wanted="5:6") == ["5:6"]


def test_a_busy_server_is_left_to_others():
    busy, idle = server(0, 12, tps=10, load=5.0), server(0, 12, tps=10)
    assert plan_route("m", Blocks(0, 12), [busy, idle])[0].signed is idle


def test_numeric_classes_are_never_mixed():
    with pytest.raises(NoRoute, match="no single numeric class"):
        plan(server(0, 6), server(6, 12, dtype="bfloat16"))
    assert plan(server(0, 6), server(6, 12, dtype="bfloat16"), server(6, 12)) == ["0:6", "6:12"]


def test_only_classes_of_the_wanted_dtype_are_used():
    quantised = server(0, 12, dtype="bfloat16+nf4")
    assert plan(quantised, server(0, 12), dtype="bfloat16") == ["0:12"]
    with pytest.raises(NoRoute, match="bfloat16"):
        plan(quantised, dtype="float32")


def test_who_leaves_or_joins_is_not_used():
    with pytest.raises(NoRoute):
        plan(server(0, 12, state="draining"), server(0, 12, state="joining"))


def test_missing_blocks_are_named():
    with pytest.raises(NoRoute) as caught:
        plan(server(0, 4), server(7, 12))
    assert caught.value.missing == (4, 5, 6)


def test_avoided_peers_are_left_out():
    bad, good = server(0, 12, tps=100), server(0, 12, tps=1)
    assert plan_route("m", Blocks(0, 12), [bad, good], avoid=[bad.announcement.peer_id])[0].signed is good


def test_who_announces_anothers_channel_key_does_not_have_him_avoided():
    honest, mallory = server(0, 12), server(0, 12, tps=1e6)
    assert honest.announcement.channel_key == mallory.announcement.channel_key
    (hop,) = plan_route("m", Blocks(0, 12), [honest, mallory])
    assert hop.signed is mallory
    (hop,) = plan_route("m", Blocks(0, 12), [honest, mallory], avoid=[hop.process])
    assert hop.signed is honest


def test_a_plan_is_repeatable():
    servers = [server(0, 12) for _ in range(20)]
    first = plan_route("m", Blocks(0, 12), servers)
    assert all(plan_route("m", Blocks(0, 12), servers[i:] + servers[:i]) == first for i in range(20))


def test_a_route_never_comes_back_to_a_peer():
    """A hop holds one part of a session: coming back to it would be refused."""
    slow, fast = server(0, 12, tps=5), server(4, 8, tps=1000)
    hops = plan_route("m", Blocks(0, 12), [slow, fast])
    assert [(hop.peer_id, str(hop.blocks)) for hop in hops] == [(slow.announcement.peer_id, "0:12")]


@settings(max_examples=200, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 12), st.sampled_from([5.0, 20.0, 80.0, 1000.0])), max_size=6
    )
)
def test_a_plan_costs_no_more_than_any_other(spans):
    """Against the slow twin: every way from boundary to boundary."""
    servers = [server(a, min(a + n, 12), tps=tps) for a, n, tps in spans]

    def every_way(at, used):
        if at == 12:
            yield 0.0
        for s in servers:
            if at in s.announcement.span and s not in used:
                for to in range(at + 1, s.announcement.span.stop + 1):
                    for rest in every_way(to, (*used, s)):
                        yield _cost_ms(Hop(s, Blocks(at, to))) + rest

    least = min(every_way(0, ()), default=None)
    if least is None:
        with pytest.raises(NoRoute):
            plan_route("m", Blocks(0, 12), servers)
        return
    route = plan_route("m", Blocks(0, 12), servers)
    assert len({hop.peer_id for hop in route}) == len(route)
    assert [b for hop in route for b in hop.blocks] == list(range(12))
    ranges = [s.announcement.span for s in servers]
    nested = any(outer.start < inner.start and inner.stop < outer.stop for outer in ranges for inner in ranges)
    assert nested or sum(map(_cost_ms, route)) == pytest.approx(least)


def test_a_directory_full_of_servers_is_planned_in_a_moment():
    servers = [server(n % 125, n % 125 + 1 + n % 3) for n in range(500)] * 8
    began = time.monotonic()
    with pytest.raises(NoRoute):
        plan_route("m", Blocks(0, 200), servers)
    plan_route("m", Blocks(0, 125), servers)
    assert time.monotonic() - began < 2
