"""What records weigh: as much as their servers have shown."""

import math
from dataclasses import replace

import pytest

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.dht.records import Announcement
from swarm.identity import Identity
from swarm.server.placement import candidates, served
from swarm.server.weights import Claim, WeightLimits, holders_of, weighed
from tests.dht.support import announcement

LIMITS = WeightLimits()


def record(name: bytes, start: int, stop: int, tps: float | None, **more) -> Announcement:
    return announcement(Identity(name * 32), start, stop, n_blocks=32, decode_tps=tps, **more)


def key_of(name: bytes) -> str:
    return Identity(name * 32).public_key.hex()


def believing(records) -> dict[str, float]:
    return {record.public_key: math.inf for record in records}


def honest(count: int, tps: float = 10.0) -> list[Claim]:
    """So many servers of four blocks, side by side over 32."""
    return [Claim(f"honest{i}", Blocks(i % 8 * 4, i % 8 * 4 + 4), tps, automatic=True) for i in range(count)]


def shown(claims: list[Claim]) -> dict[str, float]:
    return {claim.key: claim.power for claim in claims}


def test_servers_that_leave_or_compute_in_another_tier_do_not_count():
    records = [
        announcement(Identity(b"a" * 32), 0, 4, state="draining"),
        announcement(Identity(b"b" * 32), 0, 4, numeric_class="bfloat16+nf4"),
        announcement(Identity(b"c" * 32), 4, 8, state="joining"),
        announcement(Identity(b"d" * 32), 2, 6, numeric_class="bfloat16+int8"),
    ]
    full, four = NumericClass("float32"), NumericClass("float32", "int4")
    assert {held.blocks for held in holders_of(records, {}, full)} == {Blocks(4, 8), Blocks(2, 6)}
    assert [held.blocks for held in holders_of(records, {}, four)] == [Blocks(0, 4)]


def test_a_claim_of_boundless_speed_counts_as_a_bounded_multiple_of_the_usual():
    records = [record(name, 0, 4, tps) for name, tps in ((b"a", 10.0), (b"b", 10.0), (b"c", 1e9))]
    assert max(held.tps for held in holders_of(records, believing(records))) == 10.0 * LIMITS.spread_max


def test_a_server_that_has_not_measured_yet_counts_with_the_usual_power():
    records = [record(b"a", 0, 4, 10.0), record(b"b", 0, 8, None)]
    assert sorted(held.tps for held in holders_of(records, believing(records))) == [5.0, 10.0]


@pytest.mark.parametrize(("claimed", "counts"), [(5.0, 5.0), (10.0, 10.0), (20.0, 20.0), (20.5, 10.0), (1e9, 10.0)])
def test_a_claim_far_above_what_a_probe_has_shown_counts_as_what_was_shown(claimed, counts):
    claims = [*honest(8), Claim("claims", Blocks(0, 4), claimed)]
    (*_, held) = weighed(32, claims, {**shown(honest(8)), "claims": 40.0})
    assert (held.tps, held.proven) == (counts, True)


def test_a_server_without_a_claim_counts_with_no_more_than_it_has_shown():
    (*_, held) = weighed(32, [*honest(8), Claim("claims", Blocks(0, 4), None)], {**shown(honest(8)), "claims": 2.0})
    assert held.power == 2.0


def test_a_server_that_has_shown_nothing_counts_for_less_than_a_proven_one_and_a_silent_one_for_less_still():
    claims = [*honest(8), Claim("unproven", Blocks(0, 4), 1e9), Claim("silent", Blocks(4, 8), 1e9)]
    held = {h.key: h for h in weighed(32, claims, {**shown(honest(8)), "silent": 0.0})}
    assert held["unproven"].tps == pytest.approx(10.0 * LIMITS.unproven_share)
    assert held["silent"].tps == pytest.approx(10.0 * LIMITS.silent_share)
    assert {held["unproven"].proven, held["silent"].proven} == {False}


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("blocks", [Blocks(0, 1), Blocks(0, 16), Blocks(5, 30)], ids=str)
def test_however_many_claims_of_nobody_add_little_to_any_block(silent, blocks):
    lies = [Claim(f"lie{i}", blocks, 1e6) for i in range(5000)]
    proven = shown(honest(16)) | (dict.fromkeys([lie.key for lie in lies], 0.0) if silent else {})
    holders = weighed(32, [*honest(16), *lies], proven)
    fair = sum(claim.power for claim in honest(16)) / 32
    added = served(32, [holder for holder in holders if not holder.proven])
    assert added.max() <= fair * LIMITS.unproven_share * 1.0001
    assert served(32, [holder for holder in holders if holder.proven]).min() == 20.0


def test_claims_that_overlap_add_little_to_the_block_that_they_share():
    lies = [Claim(f"lie{i}", Blocks(0, 1 if i % 2 else 16), 1e6) for i in range(200)]
    holders = weighed(32, [*honest(16), *lies], shown(honest(16)))
    fair = sum(claim.power for claim in honest(16)) / 32
    added = served(32, [holder for holder in holders if not holder.proven])
    assert added.max() <= fair * LIMITS.unproven_share * 1.0001


def test_claims_of_nobody_do_not_change_the_median():
    lies = [Claim(f"lie{i}", Blocks(0, 4), 1e6) for i in range(50)]
    proven = {**shown(honest(8)), "strong": math.inf}
    (*_, held) = weighed(32, [*honest(8), *lies, Claim("strong", Blocks(0, 4), 1e9)], proven)
    assert held.tps == 10.0 * LIMITS.spread_max


def test_a_swarm_of_which_nothing_is_known_counts_as_it_claims():
    assert [held.tps for held in weighed(32, honest(8, 7.0), {})] == [7.0] * 8


def test_the_records_of_one_identity_share_what_it_has_shown():
    several = [Claim("many", Blocks(at, at + 4), 10.0) for at in range(0, 32, 4)]
    held = [h for h in weighed(32, [*honest(8), *several], {**shown(honest(8)), "many": 40.0}) if h.key == "many"]
    assert sum(holder.power for holder in held) == pytest.approx(40.0)


@pytest.mark.parametrize("proven", [math.inf, 0.0, None], ids=["strong and there", "silent", "not probed"])
def test_one_strong_server_does_not_draw_all_others_from_its_blocks(proven):
    claims = [Claim(f"{i}", Blocks(at, at + 8), 10.0, True) for i, at in enumerate([0, 0, 8, 8, 16, 16, 24, 24])]
    known = shown(claims) | ({} if proven is None else {"strong": proven})
    holders = weighed(32, [*claims, Claim("strong", Blocks(0, 16), 200.0)], known)
    for _ in range(50):
        queue = candidates(32, holders)
        if not queue:
            break
        key, blocks = queue[0]
        holders = tuple(replace(h, blocks=blocks) if h.key == key else h for h in holders)
    assert served(32, [h for h in holders if h.key != "strong"]).min() > 0, "a block without an honest holder"


def test_claims_of_nobody_are_no_holders_that_a_block_may_be_left_to():
    """Two servers hold each block; one could go to a gap that is worth more."""
    honest = [Claim("a", Blocks(0, 4), 10.0, True), Claim("b", Blocks(0, 4), 10.0, True)]
    others = [Claim(name, Blocks(4, 8), 0.1, False) for name in "cd"]
    lies = [Claim(f"lie{i}", Blocks(0, 4), 10.0) for i in range(9)]
    claims = [*honest, *others, *lies]
    proven = shown([*honest, *others])
    assert candidates(8, weighed(8, claims, {**proven, **dict.fromkeys([lie.key for lie in lies], math.inf)}))
    assert not candidates(8, weighed(8, claims, proven))
