"""How much prefill an iteration may carry, learned from the iterations before."""

import random
from collections.abc import Callable
from statistics import median

import pytest

from swarm.compute.costs import Costs
from swarm.compute.limits import CostLimits

LIMITS = CostLimits()


def test_prefill_adds_a_quarter_of_an_iteration_at_most() -> None:
    costs, sizes = Costs(LIMITS), []
    for _ in range(100):
        tokens = costs.prefill_tokens(8, decoding=True)
        costs.observe(8, tokens, 0.040 + 0.001 * tokens)
        sizes.append(tokens)
    assert 8 <= median(sizes[50:]) <= 10
    assert 5 <= sizes.count(0) <= 10  # now and then none, to see what decode takes
    for _ in range(30):
        costs.observe(0, tokens := costs.prefill_tokens(0, decoding=False), 0.020 + 0.001 * tokens)
    assert 128 <= costs.prefill_tokens(0, decoding=False) <= 192


def test_sizes_that_change_the_kernels_are_avoided() -> None:
    """One or two tokens beside a step cost little, three and more as much as the step: seen with real ones."""
    costs, sizes = Costs(LIMITS), []
    for _ in range(600):
        tokens = costs.prefill_tokens(1, decoding=True)
        costs.observe(1, tokens, 0.045 + 0.005 * tokens + (0.03 if tokens > 2 else 0.0))
        sizes.append(tokens)
    assert sum(tokens > 2 for tokens in sizes) <= 6
    assert sum(tokens == 2 for tokens in sizes) > 500


def test_costs_beside_many_steps_say_nothing_about_one() -> None:
    costs = Costs(LIMITS)

    def run(decodes: int, seconds: Callable[[int], float]) -> int:
        for _ in range(60):
            costs.observe(decodes, tokens := costs.prefill_tokens(decodes, decoding=True), seconds(tokens))
        return max(costs.prefill_tokens(decodes, decoding=True) for _ in range(2))

    assert run(8, lambda tokens: 0.080 + 0.001 * tokens) >= 16
    assert run(1, lambda tokens: 0.045 + (0.035 if tokens > 2 else 0.005)) <= 2
    assert run(8, lambda tokens: 0.080 + 0.001 * tokens) >= 16


def test_prefill_alone_stays_short_while_a_step_is_expected() -> None:
    packs, runs_alone = Costs(LIMITS), Costs(LIMITS)
    for _ in range(40):
        packs.observe(0, 64, 0.160)
        packs.observe(1, tokens := packs.prefill_tokens(1, decoding=True), 0.045 + (0.035 if tokens > 2 else 0.005))
        runs_alone.observe(1, 0, 0.045)
        runs_alone.observe(0, tokens := runs_alone.prefill_tokens(0, decoding=True), 0.040 + 0.001 * tokens)
    assert packs.prefill_tokens(0, decoding=True) <= 2
    assert packs.prefill_tokens(0, decoding=False) >= 64
    assert 16 <= runs_alone.prefill_tokens(0, decoding=True) <= 32  # 45 ms, and a quarter


@pytest.mark.parametrize(("noise", "least"), [(0.0, 8), (0.3, 4)])
def test_pieces_stay_large_where_any_piece_costs_much(noise: float, least: int) -> None:
    """A piece takes 20 ms and 0.5 ms a token, decode 30: taken for the tokens' cost, that would leave no tokens."""
    usual, seldom = zip(*(sizes_where_pieces_cost_much(noise, seed) for seed in range(9)), strict=True)
    assert least <= median(usual) < 40
    assert median(seldom) < 80


def sizes_where_pieces_cost_much(noise: float, seed: int) -> tuple[float, int]:
    """Pieces' median size, and what 98 % do not exceed, after the first hundred."""
    draw, costs, sizes = random.Random(seed), Costs(LIMITS), []
    for _ in range(300):
        tokens = costs.prefill_tokens(1, decoding=True)
        takes_s = 0.030 + (0.020 + 0.0005 * tokens if tokens else 0.0)
        costs.observe(1, tokens, takes_s * draw.lognormvariate(0, noise))
        sizes.append(tokens)
    return median(sizes[100:]), sorted(sizes[100:])[-4]


@pytest.mark.parametrize("every", [0, 8])
@pytest.mark.parametrize("piece_s", [0.001, 0.004])
def test_hiccups_do_not_shrink_pieces_for_long(every: int, piece_s: float) -> None:
    """The first two pieces of a fresh process take long, and now and then the machine does something else."""

    def iterations(draw: random.Random) -> int:
        costs, left, count = Costs(LIMITS), 512, 0

        def takes(seconds: float, hiccup_s: float) -> float:
            return seconds * draw.lognormvariate(0, 0.15) + (hiccup_s if every and draw.random() < 1 / every else 0.0)

        for _ in range(5):
            costs.observe(1, 0, takes(0.006, 0.03))
        while left > 0:
            tokens = min(left, costs.prefill_tokens(1, decoding=True))
            first_s = 0.2 if count < 2 else 0.0
            takes_s = 0.006 + (piece_s + 0.0002 * tokens if tokens else 0.0)
            costs.observe(1, tokens, takes(takes_s, 0.03) + first_s)
            left, count = left - tokens, count + 1
        return count

    counts = [iterations(random.Random(seed)) for seed in range(40)]
    assert median(counts) < 60
    assert max(counts) < 110  # a fifth of what it would be token by token


@pytest.mark.parametrize("noise", [0.15, 0.5])
def test_quick_steps_do_not_cut_prompts_into_single_tokens(noise: float) -> None:
    """A step takes 3 ms, any piece 2.5 and 0.08 a token, as measured with a small model; half a step pays for none."""

    def iterations(draw: random.Random) -> int:
        costs, left, count = Costs(LIMITS), 512, 0
        costs.observe(0, 64, 0.008)
        for _ in range(10):
            costs.observe(1, 0, 0.003 * draw.lognormvariate(0, noise))
        while left > 0:
            decodes = 1 if count % 8 == 0 else 0  # its step is elsewhere most of the time
            tokens = min(left, costs.prefill_tokens(decodes, decoding=True))
            takes_s = 0.003 * decodes + (0.0025 + 0.00008 * tokens if tokens else 0.0)
            costs.observe(decodes, tokens, takes_s * draw.lognormvariate(0, noise))
            left, count = left - tokens, count + 1
        return count

    counts = [iterations(random.Random(seed)) for seed in range(40)]
    assert median(counts) < 8
    assert max(counts) < 20


@pytest.mark.parametrize("decoding", [False, True])
def test_one_hiccup_at_the_start_is_forgotten(decoding: bool) -> None:
    costs, sizes = Costs(LIMITS), []
    for count in range(200):
        tokens = costs.prefill_tokens(1 if decoding else 0, decoding=decoding)
        costs.observe(1 if decoding else 0, tokens, 0.030 + 0.0006 * tokens + (3.0 if count < 2 else 0.0))
        sizes.append(tokens)
    least, most = (8, 16) if decoding else (128, 384)
    assert least <= median(sizes[100:]) <= most


def test_one_hiccup_later_changes_little() -> None:
    costs = Costs(LIMITS)
    for _ in range(20):
        costs.observe(0, 512, 0.1)
    costs.observe(0, 512, 10.0)
    assert costs.prefill_tokens(0, decoding=False) >= 512


def test_waiting_prompts_lengthen_an_iteration_up_to_its_limit():
    costs = Costs(LIMITS)
    for _ in range(50):
        costs.observe(8, 0, 0.040)
        for tokens in (16, 32, 64, 256, 1024):
            costs.observe(8, tokens, 0.040 + 0.001 * tokens)

    def granted(stretch: float) -> int:
        return max(costs.prefill_tokens(8, decoding=True, stretch=stretch) for _ in range(2))

    assert granted(0.0) <= 16  # a quarter of 40 ms is 10
    assert 24 <= granted(1.0) <= 48  # 40 ms
    assert 48 <= granted(100.0) <= 64  # up to 100 in all
