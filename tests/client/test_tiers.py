"""Numeric classes in routes: which are mixed, which are taken first, and what a route of them promises."""

import re

import pytest

from swarm.activations import Tier, tier_of
from swarm.blocks import Blocks
from swarm.client.planning.costs import estimated
from swarm.client.planning.eligible import Reason
from swarm.client.planning.explain import ExplainedRoute, explanation
from swarm.client.planning.plan import plan
from swarm.client.planning.promise import Crossing, crossings
from swarm.client.planning.route import Hop
from swarm.errors import NoRoute
from tests.client.test_route import planned, proven, request, server

ALL = Blocks(0, 12)


@pytest.mark.parametrize(
    ("numeric_class", "tier"),
    [
        *((name, Tier.FULL) for name in ("float32", "bfloat16", "float16", "float32+int8", "bfloat16+q8_0")),
        *((name, Tier.FULL) for name in ("bfloat16+bitsandbytes-8bit", "float16+gptq-8bit", "float32++int8")),
        *((name, Tier.FOUR_BITS) for name in ("float32+int4", "bfloat16+nf4", "bfloat16+mxfp4", "float32+q4_0")),
        *((name, Tier.FOUR_BITS) for name in ("bfloat16+bitsandbytes-4bit", "float16+gptq-4bit")),
        ("bfloat16+int4-0123456789ab", Tier.FOUR_BITS),
        ("bfloat16+fp8", Tier.FLOAT8),
    ],
)
def test_classes_have_a_tier(numeric_class, tier):
    assert tier_of(numeric_class) == tier


@pytest.mark.parametrize("name", ["float32+q2_k", "float64", "full", "fp8", "4 bits", "a+b+c+d", "", "float32+full"])
def test_a_class_without_a_tier_is_alone(name):
    """Whatever it calls itself, it joins no tier that others are in."""
    assert tier_of(name) not in set(Tier)
    assert tier_of(name) != tier_of(f"{name}x")


def test_a_route_mixes_classes_of_one_tier():
    parts = [server(0, 4), server(4, 8, dtype="bfloat16+int8"), server(8, 12, dtype="bfloat16")]
    route = planned(ALL, [*parts, server(0, 12, tps=1), server(0, 12, tps=1e6, dtype="float32+q4_0")])
    assert [hop.signed for hop in route] == parts
    assert route.numeric_classes == ("float32", "bfloat16+int8", "bfloat16")


def test_an_exact_route_mixes_none():
    ours, other, rest = server(0, 6), server(6, 12, dtype="float32+int8", tps=1e6), server(6, 12, tps=1)
    with pytest.raises(NoRoute, match=r"exact mixes none \(float32, float32\+int8\)"):
        planned(ALL, [ours, other], exact=True)
    assert [hop.signed for hop in planned(ALL, [ours, other, rest], exact=True)] == [ours, rest]
    assert [hop.signed for hop in planned(ALL, [ours, other, rest])] == [ours, other]


def test_tiers_are_never_mixed():
    ours, theirs = server(0, 6), server(6, 12, dtype="float32+q4_0")
    with pytest.raises(NoRoute, match="no single tier covers them"):
        planned(ALL, [ours, theirs], quality="any")
    with pytest.raises(NoRoute, match="no server has them") as caught:  # the other tier alone would not help
        planned(ALL, [ours, theirs])
    assert caught.value.missing == tuple(range(6, 12))


def test_any_quality_takes_the_tier_with_the_better_route():
    ours, theirs = server(0, 12, tps=10), server(0, 12, tps=30, dtype="float32+q4_0")
    assert planned(ALL, [ours, theirs])[0].signed is ours
    assert planned(ALL, [ours, theirs], quality="any")[0].signed is theirs
    faster = server(0, 12, tps=100, dtype="bfloat16+int8")
    shown = proven(theirs, faster)
    assert planned(ALL, [ours, theirs, faster], quality="any", evidence=shown)[0].signed is faster


def test_full_quality_says_that_there_are_servers_of_fewer_bits():
    servers = [server(0, 6, dtype="float32+q4_0"), server(6, 12, dtype="bfloat16+nf4"), server(0, 5)]
    with pytest.raises(
        NoRoute, match=r"only in another tier's classes, bfloat16\+nf4, float32\+q4_0: pass quality="
    ) as caught:
        planned(ALL, servers)
    assert caught.value.missing == tuple(range(5, 12))
    assert len(planned(ALL, servers, quality="any")) == 2


def test_a_class_that_cannot_be_asked_for_is_not_used():
    liar = server(0, 12, tps=1e6, dtype="float32++int8")  # how activations travel is the client's choice
    for exact in (True, False):
        with pytest.raises(NoRoute):
            planned(ALL, [liar], quality="any", exact=exact)


# --- repairs

HELD = ((Blocks(0, 4), "float32"), (Blocks(4, 8), "float32+int8"), (Blocks(8, 12), "float32"))


def test_a_repair_takes_the_same_class_first():
    same, faster = server(2, 10, dtype="float32+int8", tps=1), server(4, 8, tps=1e6)
    (hop,) = planned(Blocks(4, 8), [faster, same], held=HELD)
    assert hop.signed is same
    (hop,) = planned(Blocks(4, 8), [faster, server(0, 12, dtype="bfloat16", tps=1)], held=HELD)
    assert hop.signed is faster


def test_a_repair_of_several_classes_keeps_the_class_of_each_block():
    plain, rounded, other = server(0, 12, tps=1e6), server(0, 12, dtype="float32+int8"), server(0, 12)
    route = planned(Blocks(0, 8), [plain, rounded], held=HELD)
    assert [(hop.signed, str(hop.blocks)) for hop in route] == [(plain, "0:4"), (rounded, "4:8")]
    route = planned(ALL, [plain, rounded, other], held=HELD)
    assert [hop.numeric_class for hop in route] == ["float32", "float32+int8", "float32"]
    (hop,) = planned(ALL, [plain, rounded], held=HELD)  # a peer holds one part, so there is no such route
    assert hop.signed is plain


def test_a_repair_takes_another_class_where_the_same_has_no_room():
    full, other = server(4, 8, dtype="float32+int8", free_tokens=9), server(4, 8, free_tokens=1000)
    assert planned(Blocks(4, 8), [full, other], held=HELD, positions_needed=9)[0].signed is full
    assert planned(Blocks(4, 8), [full, other], held=HELD, positions_needed=10)[0].signed is other
    assert planned(Blocks(4, 8), [full], held=HELD, positions_needed=10)[0].signed is full  # it may have some soon


@pytest.mark.parametrize("quality", ["full", "any"])
def test_a_repair_stays_in_its_tier(quality):
    four = tuple((blocks, "float32+q4_0") for blocks, _ in HELD)
    for held, other in ((HELD, "float32+q4_0"), (four, "float32")):
        with pytest.raises(NoRoute, match=f"only in another tier's classes, {re.escape(other)}$"):
            planned(Blocks(4, 8), [server(4, 8, dtype=other)], held=held, quality=quality)


def test_an_exact_repair_stays_in_its_class():
    held = ((ALL, "float32+int8"),)
    with pytest.raises(NoRoute, match=r"nobody serves them in float32\+int8, but in float32"):
        planned(Blocks(4, 8), [server(4, 8)], held=held, exact=True)
    assert len(planned(Blocks(4, 8), [server(4, 8), server(4, 8, dtype="float32+int8")], held=held, exact=True)) == 1


# --- the promise

CPU, OTHER_CPU = "Some Processor 9, AVX2, torch 2.13.0", "Some Processor 7, AVX2, torch 2.13.0"


@pytest.mark.parametrize(
    ("hops", "options", "exactness"),
    [
        ([("float32+int8", CPU)] * 2, {}, "bits"),
        ([("bfloat16+int8", CPU)] * 2, {}, "bits"),
        ([("float32+int4", CPU)] * 2, {}, "bits"),
        ([("bfloat16+int4", CPU)] * 2, {}, "bits"),
        ([("float32+int4-0123456789ab", CPU)] * 2, {}, "bits"),
        ([("float32+int4-0123456789ab", CPU), ("float32+int4", CPU)], {}, "tier"),
        ([("float32+int4", CPU), ("float32+int4", OTHER_CPU)], {}, "tier"),  # it was not measured
        ([("float32+int8", CPU)] * 2, {"coding": "int8"}, "tier"),
        ([("float32+int8", CPU), ("float32+int8", OTHER_CPU)], {}, "tokens"),
        ([("bfloat16+int8", CPU), ("bfloat16+int8", OTHER_CPU)], {}, "tier"),
        ([("float32+int8", "cpu")] * 2, {}, "tokens"),  # of which kind is not known
        ([("bfloat16+int8", "cpu")] * 2, {}, "tier"),
        ([("float32+int8", CPU), ("float32", CPU)], {}, "tokens"),
        ([("float32", CPU)] * 2, {}, "tokens"),  # other sessions' steps beside a step change its bits
        ([("float32", CPU), ("bfloat16", CPU)], {}, "tier"),
        ([("bfloat16", CPU)] * 2, {}, "tier"),
        ([("float16", CPU)] * 2, {}, "tier"),
        ([("float32+q4_0", CPU)] * 2, {}, "tier"),
        ([("float64", CPU)] * 2, {}, "tier"),
    ],
)
def test_a_route_promises_what_was_measured_of_its_classes(hops, options, exactness):
    servers = [server(at, at + 6, dtype=name, device=kind) for at, (name, kind) in zip((0, 6), hops, strict=True)]
    asked = request(ALL, servers, **options)
    route = estimated([Hop(signed, signed.announcement.span) for signed in servers], asked)
    assert route.exactness == exactness
    assert f"exactness {exactness!r}: " in str(route)
    assert all(name in str(route) for name, _ in hops)


def test_crossings_are_blocks_whose_class_has_changed():
    now = ((Blocks(0, 6), "float32"), (Blocks(6, 12), "float32+int8"))
    found = crossings(HELD, now, 40)
    assert found == (
        Crossing(Blocks(4, 6), "float32+int8", "float32", 40),
        Crossing(Blocks(8, 12), "float32", "float32+int8", 40),
    )
    assert crossings(HELD, HELD, 40) == ()


def test_a_session_repaired_in_another_class_promises_its_tier_and_says_so():
    asked = request(ALL, [server(0, 12)])
    found = crossings(((ALL, "float32+int8"),), ((ALL, "float32"),), 17)
    assert ExplainedRoute.of(plan(asked), asked).exactness == "tokens"
    route = ExplainedRoute.of(plan(asked), asked, found)
    assert route.exactness == "tier"
    said = "repaired in another class: blocks 0:12 were in float32+int8 until position 17, and are in float32"
    assert said in route.explain()


def test_an_explanation_compares_with_all_classes_that_may_be_mixed():
    best, other, quantised = server(0, 12, tps=30), server(0, 12, dtype="bfloat16"), server(0, 12, dtype="float32+q4_0")
    for options, reasons in [
        ({}, [Reason.SLOWER, Reason.OTHER_TIER]),
        ({"quality": "any"}, [Reason.SLOWER, Reason.OTHER_TIER]),
        ({"exact": True, "quality": "any"}, [Reason.OTHER_CLASS, Reason.OTHER_CLASS]),
    ]:
        asked = request(ALL, [best, other, quantised], evidence=proven(best), **options)
        rejected = {one.peer_id: one.reason for one in explanation(plan(asked), asked).rejected}
        assert [rejected[signed.announcement.peer_id] for signed in (other, quantised)] == reasons
