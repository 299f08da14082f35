"""Servers choose the span that the swarm needs most, move when that wins enough, and stop moving."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.placement_simulation import (
    DELAY_S,
    KINDS,
    anneal,
    honest_members,
    liars,
    random_swarm,
    simulate,
    simulate_among_liars,
)
from swarm.blocks import Blocks
from swarm.server.placement import (
    Holder,
    PlacementLimits,
    candidates,
    choose_span,
    power_bound,
    served,
    should_move,
)
from tests.support.often import rest_is_long


def holder(name: str, start: int, stop: int, tps: float = 10.0, automatic: bool = True) -> Holder:
    return Holder(name, Blocks(start, stop), tps, automatic)


# Choosing


def test_the_first_server_takes_the_first_blocks():
    assert choose_span(12, 5, [], "me") == Blocks(0, 5)


def test_a_server_that_has_room_for_more_than_the_model_takes_all_of_it():
    assert choose_span(12, 50, [], "me") == Blocks(0, 12)


def test_blocks_that_nobody_serves_come_first():
    assert choose_span(12, 4, [holder("a", 0, 4, 1.0), holder("b", 8, 12, 1.0)], "me") == Blocks(4, 8)


def test_the_lowest_throughput_counts_not_the_number_of_holders():
    slow = [holder(f"slow{i}", 0, 6, 1.0) for i in range(3)]
    assert choose_span(12, 6, [*slow, holder("fast", 6, 12, 50.0)], "me") == Blocks(0, 6)


def test_among_blocks_that_are_served_alike_those_with_fewest_holders_are_taken():
    assert choose_span(8, 4, [holder("a", 0, 4, 5.0), holder("b", 0, 4, 5.0), holder("c", 4, 8, 10.0)], "me") == Blocks(
        4, 8
    )


def test_what_the_server_itself_announced_before_does_not_count():
    assert choose_span(8, 4, [holder("me", 0, 4), holder("a", 4, 8)], "me") == Blocks(0, 4)


# Moving


def test_a_server_moves_to_a_gap():
    crowd = [holder("a", 0, 4), holder("b", 0, 4), holder("c", 4, 8)]
    moving = [should_move(candidates(12, crowd), name, patience=0)[0] for name in "abc"]
    assert [blocks for blocks in moving if blocks] == [Blocks(8, 12)], "one of the two that crowd, and only one"


def test_a_server_whose_span_was_chosen_by_hand_never_moves_nor_keeps_others_from_moving():
    crowd = [holder("a", 0, 4, 20.0, automatic=False), holder("b", 0, 4), holder("c", 4, 8)]
    assert should_move(candidates(12, crowd), "a", patience=9) == (None, 0)
    assert should_move(candidates(12, crowd), "b", patience=0) == (Blocks(8, 12), 0)


def test_the_last_holder_of_a_block_stays():
    assert candidates(8, [holder("a", 0, 4), holder("b", 4, 8)]) == ()


def test_a_gain_too_small_for_the_move_is_left_alone():
    even = [holder("a", 0, 4, 10.0), holder("b", 4, 8, 9.9), holder("c", 0, 4, 10.0), holder("d", 4, 8, 10.0)]
    assert candidates(8, even) == ()


def test_whoever_is_second_waits_and_moves_when_the_first_does_not():
    crowd = [holder("a", 0, 4), holder("b", 0, 4), holder("c", 4, 8)]
    (first, _), (second, goal) = candidates(12, crowd)[:2]
    assert first != second
    assert should_move(candidates(12, crowd), second, patience=0) == (None, 1)
    assert should_move(candidates(12, crowd), second, patience=PlacementLimits().looks_per_rank) == (goal, 0)


def test_the_fast_evaluation_of_moves_agrees_with_carrying_them_out():
    holders = random_swarm(5, 20, 12, "spread")

    def level(those):
        x = served(20, those)
        return float(
            np.prod([np.mean(x**-p) ** (-1 / p) for p in PlacementLimits().sharpness])
            ** (1 / len(PlacementLimits().sharpness))
        )

    holders.append(holder("everywhere", 0, 20, 30.0, automatic=False))

    def after(index, blocks):
        return level([*holders[:index], replace(holders[index], blocks=blocks), *holders[index + 1 :]])

    found = candidates(20, holders)
    assert found
    keys = [held.key for held in holders]
    reached = [after(keys.index(key), blocks) for key, blocks in found]
    assert reached == pytest.approx(sorted(reached, reverse=True))
    assert reached[0] > level(holders)
    for (key, blocks), value in zip(found, reached, strict=True):
        spans = [Blocks(start, start + len(blocks)) for start in range(20 - len(blocks) + 1)]
        assert value == pytest.approx(max(after(keys.index(key), span) for span in spans))


# Many


@pytest.mark.parametrize(("speeds", "n_blocks"), rest_is_long([("lognormal", 80), ("spread", 32)], [("spread", 32)]))
@pytest.mark.parametrize("delay_s", [pytest.param((0.0, 0.0), marks=pytest.mark.long), DELAY_S], ids=["true", "stale"])
def test_a_hundred_servers_come_within_a_tenth_of_an_annealer_and_stop(speeds, n_blocks, delay_s):
    holders = random_swarm(1, n_blocks, 100, speeds)
    settled = simulate(n_blocks, holders, 1, delay_s=delay_s, moves_max=300)
    assert settled.quiet, f"still moving after {settled.moves} moves"
    bottleneck = served(n_blocks, settled.holders).min()
    assert bottleneck >= 0.9 * anneal(n_blocks, holders, 1, 60_000)
    assert bottleneck <= power_bound(n_blocks, holders)


@pytest.mark.slow("hours of two swarms, in which every server looks every five minutes")
@pytest.mark.parametrize("kind", rest_is_long(KINDS, ["slow"]))
def test_one_fifth_of_liars_takes_little_from_the_bottleneck(kind):
    """All of them are in one half of the model. Their claims draw honest servers to the other half, as far as these
    believe them.
    """
    holders = random_swarm(100, 16, 24, "lognormal")
    honest = honest_members(holders)
    alone = simulate_among_liars(16, honest, (), 1, hours_max=4.0)
    among = simulate_among_liars(16, honest, liars(kind, 6, 16, 1, holders), 1, hours_max=4.0)
    assert among.bottleneck >= 0.8 * alone.bottleneck > 0


def test_servers_that_join_one_after_the_other_are_well_placed_at_once():
    holders: list[Holder] = []
    for wanted in random_swarm(2, 40, 60, "spread"):
        blocks = choose_span(40, len(wanted.blocks), holders, wanted.key)
        holders.append(replace(wanted, blocks=blocks))
    assert served(40, holders).min() > 0.6 * power_bound(40, holders)
