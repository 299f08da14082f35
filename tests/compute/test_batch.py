"""What runs together, how much prefill runs beside it, and who is waited for: all without a model."""

import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.compute.batch import (
    ABSENT_REMEMBERED,
    LENT_MAX,
    LINGER_MAX_S,
    PIECE_TOKENS_MIN,
    PREFILL_TOKENS_MIN,
    SINGLE_ROWS_MAX,
    Company,
    Loan,
    Pace,
    Ready,
    form_batch,
)


def decode(peer: str = "a", group: object = 0, rows: int = 1) -> Ready:
    return Ready(peer, group, rows, 1)


def prefill(tokens: int, peer: str = "a", group: object = 0) -> Ready:
    return Ready(peer, group, 1, tokens)


works = st.builds(
    Ready,
    peer=st.sampled_from("abc"),
    group=st.sampled_from([0, 1]),
    rows=st.integers(1, 4),
    tokens=st.sampled_from([1, 1, 1, 5, 300, 4000]),
    packs=st.sampled_from([True, True, True, False]),
    cuts=st.booleans(),
)


@given(ready=st.lists(works, max_size=30), budget=st.integers(1, 3000))
def test_a_batch_goes_forward_stays_within_its_kind_and_its_budget(ready: list[Ready], budget: int) -> None:
    batch = form_batch(ready, budget)
    assert bool(batch) == bool(ready)
    chosen = [ready[each.index] for each in batch]
    assert len({each.index for each in batch}) == len(batch)
    assert all(1 <= each.tokens <= work.tokens for each, work in zip(batch, chosen, strict=True))
    assert all(work.cuts or each.tokens == work.tokens for each, work in zip(batch, chosen, strict=True))
    if len(batch) > 1:
        assert all(work.packs for work in chosen)
        assert len({work.group for work in chosen}) == 1
        spent = [
            each.tokens * work.rows for each, work in zip(batch, chosen, strict=True) if not work.decodes and work.cuts
        ]
        assert sum(spent) <= max(budget, PREFILL_TOKENS_MIN * 4)


def test_single_steps_of_all_sessions_run_together_and_a_prefill_fills_up_the_budget() -> None:
    batch = form_batch([prefill(2048, "b"), *[decode("a")] * 8], 64)
    assert [(each.index, each.tokens) for each in batch] == [*((i, 1) for i in range(1, 9)), (0, 64)]


def test_one_position_of_many_rows_is_no_single_step() -> None:
    wide, steps = decode("wide", rows=SINGLE_ROWS_MAX + 1), [decode("a", rows=SINGLE_ROWS_MAX), decode("b")]
    assert [each.index for each in form_batch([wide, *steps], 0)] == [1, 2]
    assert [each.index for each in form_batch([wide, *steps], 100)] == [1, 2, 0]


def test_work_whose_smallest_piece_is_more_than_the_budget_goes_on_beside_steps() -> None:
    """Prompts of eight rows waited until nobody decoded any more, where a step can carry but three tokens."""
    ready = [Ready("rows", 0, 8, 100), decode("a"), prefill(50, "b")]
    assert [(each.index, each.tokens) for each in form_batch(ready, 3)] == [(1, 1), (0, 1)]
    assert [each.index for each in form_batch(ready, 0)] == [1]


def test_what_a_piece_takes_beyond_its_budget_is_paid_back_while_somebody_decodes() -> None:
    loan, ran = Loan(), 0
    for _ in range(1000):
        budget = loan.budget(4, decoding=True)
        if budget:
            loan.lend(64, budget)
            ran += 64
    assert 3900 <= ran <= 4100
    assert loan.budget(4, decoding=False) == 4
    assert loan.budget(4, decoding=True) == 4  # nobody minded


def test_a_loan_is_bounded() -> None:
    loan = Loan()
    loan.lend(100_000, 0)
    assert sum(loan.budget(4, decoding=True) == 0 for _ in range(10_000)) * 4 == LENT_MAX


def test_what_others_cannot_use_of_their_share_goes_to_those_who_can() -> None:
    ready = [prefill(500, "narrow"), Ready("wide", 0, 200, 1), prefill(10, "short"), decode("a")]
    assert [(each.index, each.tokens) for each in form_batch(ready, 128)] == [(3, 1), (0, 118), (2, 10)]
    assert [(each.index, each.tokens) for each in form_batch(ready, 512)] == [(3, 1), (0, 302), (1, 1), (2, 10)]


def test_peers_share_the_prefill_whatever_number_of_sessions_they_have() -> None:
    ready = [*[prefill(500, "greedy")] * 7, prefill(500, "modest")]
    given_to = {"greedy": 0, "modest": 0}
    for each in form_batch(ready, 256):
        given_to[ready[each.index].peer] += each.tokens
    assert given_to == {"greedy": 128, "modest": 128}


def test_a_peer_with_many_sessions_does_not_push_anothers_step_out(monkeypatch) -> None:
    monkeypatch.setattr("swarm.compute.batch.DECODE_TOKENS_MAX", 4)
    ready = [*[decode("greedy")] * 9, decode("modest")]
    assert 9 in {each.index for each in form_batch(ready, 64)}


def test_what_cannot_run_with_others_runs_when_it_is_its_turn_and_is_cut_too() -> None:
    alone = Ready("a", 0, 1, 300, packs=False)
    assert [(each.index, each.tokens) for each in form_batch([alone, decode()], 100)] == [(0, 100)]
    assert [(each.index, each.tokens) for each in form_batch([decode(), alone], 100)] == [(0, 1)]


def test_parts_of_the_span_take_turns() -> None:
    assert {each.index for each in form_batch([decode(group=1), decode(group=2), decode(group=1)], 64)} == {0, 2}


def test_a_small_budget_goes_to_one_piece() -> None:
    """Else it is spent on what every piece costs, however small it is."""
    ready = [decode(), *(Ready(f"peer {number}", 0, 1, 100) for number in range(8))]
    assert [(each.index, each.tokens) for each in form_batch(ready, PIECE_TOKENS_MIN)] == [
        (0, 1),
        (1, PIECE_TOKENS_MIN),
    ]
    assert len(form_batch(ready, 8 * PIECE_TOKENS_MIN)) == 9


def test_prefill_beside_decode_adds_a_quarter_of_an_iteration_at_most() -> None:
    pace, sizes = Pace(), []
    for _ in range(100):
        tokens = pace.prefill_tokens(8, decoding=True)
        pace.observe(8, tokens, 0.040 + 0.001 * tokens)
        sizes.append(tokens)
    assert 8 <= median(sizes[50:]) <= 10
    assert 5 <= sizes.count(0) <= 10  # now and then none, to see what decode takes
    for _ in range(30):
        pace.observe(0, tokens := pace.prefill_tokens(0, decoding=False), 0.020 + 0.001 * tokens)
    assert 128 <= pace.prefill_tokens(0, decoding=False) <= 192


def test_what_makes_the_kernels_others_is_left_alone() -> None:
    """One or two tokens beside a step cost little, three and more as much as the step: seen with real ones."""
    pace, sizes = Pace(), []
    for _ in range(600):
        tokens = pace.prefill_tokens(1, decoding=True)
        pace.observe(1, tokens, 0.045 + 0.005 * tokens + (0.03 if tokens > 2 else 0.0))
        sizes.append(tokens)
    assert sum(tokens > 2 for tokens in sizes) <= 6
    assert sum(tokens == 2 for tokens in sizes) > 500


def test_what_prefill_takes_beside_many_says_nothing_of_what_it_takes_beside_one() -> None:
    pace = Pace()

    def run(decodes: int, seconds: Callable[[int], float]) -> int:
        for _ in range(60):
            pace.observe(decodes, tokens := pace.prefill_tokens(decodes, decoding=True), seconds(tokens))
        return max(pace.prefill_tokens(decodes, decoding=True) for _ in range(2))

    assert run(8, lambda tokens: 0.080 + 0.001 * tokens) >= 16
    assert run(1, lambda tokens: 0.045 + (0.035 if tokens > 2 else 0.005)) <= 2
    assert run(8, lambda tokens: 0.080 + 0.001 * tokens) >= 16


def test_while_who_decodes_is_expected_prefill_takes_no_longer_than_beside_it() -> None:
    packs, runs_alone = Pace(), Pace()
    for _ in range(40):
        packs.observe(0, 64, 0.160)
        packs.observe(1, tokens := packs.prefill_tokens(1, decoding=True), 0.045 + (0.035 if tokens > 2 else 0.005))
        runs_alone.observe(1, 0, 0.045)
        runs_alone.observe(0, tokens := runs_alone.prefill_tokens(0, decoding=True), 0.040 + 0.001 * tokens)
    assert packs.prefill_tokens(0, decoding=True) <= 2
    assert packs.prefill_tokens(0, decoding=False) >= 64
    assert 16 <= runs_alone.prefill_tokens(0, decoding=True) <= 32  # 45 ms, and a quarter


@pytest.mark.parametrize(("noise", "least"), [(0.0, 8), (0.3, 4)])
def test_pieces_stay_as_large_as_they_can_be_where_any_piece_costs_much(noise: float, least: int) -> None:
    """A piece takes 20 ms and 0.5 ms a token, decode 30: taken for the tokens' cost, that would leave no tokens."""
    usual, seldom = zip(*(sizes_where_pieces_cost_much(noise, seed) for seed in range(9)), strict=True)
    assert least <= median(usual) < 40
    assert median(seldom) < 80


def sizes_where_pieces_cost_much(noise: float, seed: int) -> tuple[float, int]:
    """Pieces' median size, and what 98 % do not exceed, after the first hundred."""
    draw, pace, sizes = random.Random(seed), Pace(), []
    for _ in range(300):
        tokens = pace.prefill_tokens(1, decoding=True)
        takes_s = 0.030 + (0.020 + 0.0005 * tokens if tokens else 0.0)
        pace.observe(1, tokens, takes_s * draw.lognormvariate(0, noise))
        sizes.append(tokens)
    return median(sizes[100:]), sorted(sizes[100:])[-4]


@pytest.mark.parametrize("every", [0, 8])
@pytest.mark.parametrize("piece_s", [0.001, 0.004])
def test_hiccups_do_not_make_a_prompt_take_ten_times_as_long(every: int, piece_s: float) -> None:
    """The first two pieces of a fresh process take long, and now and then the machine does something else."""

    def iterations(draw: random.Random) -> int:
        pace, left, count = Pace(), 512, 0

        def takes(seconds: float, hiccup_s: float) -> float:
            return seconds * draw.lognormvariate(0, 0.15) + (hiccup_s if every and draw.random() < 1 / every else 0.0)

        for _ in range(5):
            pace.observe(1, 0, takes(0.006, 0.03))
        while left > 0:
            tokens = min(left, pace.prefill_tokens(1, decoding=True))
            first_s = 0.2 if count < 2 else 0.0
            takes_s = 0.006 + (piece_s + 0.0002 * tokens if tokens else 0.0)
            pace.observe(1, tokens, takes(takes_s, 0.03) + first_s)
            left, count = left - tokens, count + 1
        return count

    counts = [iterations(random.Random(seed)) for seed in range(40)]
    assert median(counts) < 60
    assert max(counts) < 110  # a fifth of what it would be token by token


@pytest.mark.parametrize("noise", [0.15, 0.5])
def test_a_prompt_does_not_go_in_token_by_token_where_steps_are_quick(noise: float) -> None:
    """A step takes 3 ms, any piece 2.5 and 0.08 a token, as measured with a small model; half a step pays for none."""

    def iterations(draw: random.Random) -> int:
        pace, left, count = Pace(), 512, 0
        pace.observe(0, 64, 0.008)
        for _ in range(10):
            pace.observe(1, 0, 0.003 * draw.lognormvariate(0, noise))
        while left > 0:
            decodes = 1 if count % 8 == 0 else 0  # who decodes is elsewhere most of the time
            tokens = min(left, pace.prefill_tokens(decodes, decoding=True))
            takes_s = 0.003 * decodes + (0.0025 + 0.00008 * tokens if tokens else 0.0)
            pace.observe(decodes, tokens, takes_s * draw.lognormvariate(0, noise))
            left, count = left - tokens, count + 1
        return count

    counts = [iterations(random.Random(seed)) for seed in range(40)]
    assert median(counts) < 8
    assert max(counts) < 20


@pytest.mark.parametrize("decoding", [False, True])
def test_one_hiccup_at_the_start_is_forgotten(decoding: bool) -> None:
    pace, sizes = Pace(), []
    for count in range(200):
        tokens = pace.prefill_tokens(1 if decoding else 0, decoding=decoding)
        pace.observe(1 if decoding else 0, tokens, 0.030 + 0.0006 * tokens + (3.0 if count < 2 else 0.0))
        sizes.append(tokens)
    least, most = (8, 16) if decoding else (128, 384)
    assert least <= median(sizes[100:]) <= most


def test_companions_are_waited_for_a_moment_and_strangers_are_not() -> None:
    company = Company()
    company.delivered(["a", "b"], now=0.0, took_s=0.02)
    company.arrived("a", now=0.5)
    assert 0 < company.wait_s(["a"], since=0.5, now=0.5) <= LINGER_MAX_S
    assert company.wait_s(["a"], since=0.5, now=0.5 + LINGER_MAX_S) == 0
    assert company.wait_s(["stranger"], since=0.5, now=0.5) == 0
    company.arrived("b", now=0.501)
    assert company.wait_s(["a", "b"], since=0.5, now=0.501) == 0


def test_who_is_back_at_once_is_waited_for_by_another_group() -> None:
    company = Company()
    for turn in range(5):
        company.delivered(["near"], now=turn * 0.1, took_s=0.05)
        company.arrived("near", now=turn * 0.1 + 0.001)
    company.delivered(["near"], now=1.0, took_s=0.05)
    assert company.wait_s(["other"], since=1.0, now=1.0) > 0
    assert company.wait_s(["other"], since=1.0, now=1.003) == 0
    assert company.wait_s(["other"], since=3.0, now=3.0) == 0


def test_prefill_waits_longer_for_who_decodes_than_another_step_would() -> None:
    """Else whoever decodes waits for most of an iteration that does not concern it."""
    company = Company()
    for turn in range(5):
        company.delivered(["near"], now=turn * 0.1, took_s=0.02)
        company.arrived("near", now=turn * 0.1 + 0.005)
    company.delivered(["near"], now=1.0, took_s=0.02)
    assert company.wait_s([], since=1.009, now=1.009, decoding=True) == 0
    assert company.wait_s([], since=1.009, now=1.009, decoding=False) > 0
    assert company.wait_s([], since=1.009, now=1.021, decoding=False) == 0


def test_who_was_away_for_long_once_is_waited_for_again() -> None:
    """Else prefill begins just before each of its next ten steps, which wait for it."""
    company = Company()
    for turn in range(20):
        company.delivered(["near"], now=turn * 1.0, took_s=0.02)
        company.arrived("near", now=turn * 1.0 + (0.5 if turn == 17 else 0.002))
    company.delivered(["near"], now=20.0, took_s=0.02)
    assert company.wait_s([], since=20.0, now=20.0, decoding=False) > 0


def test_who_takes_longer_from_now_on_is_waited_for_soon() -> None:
    company, missed, now = Company(), 0, 0.0
    for turn in range(40):
        away_s = 0.002 if turn < 20 else 0.012
        company.delivered(["near"], now=now, took_s=0.02)
        missed += company.wait_s([], since=now, now=now, decoding=False) < away_s
        company.arrived("near", now=now + away_s)
        now += 1.0
    assert missed <= 3  # the first of all, and few when it changes


def test_one_session_alone_is_never_kept_waiting() -> None:
    company = Company()
    company.delivered(["a"], now=0.0, took_s=0.02)
    company.arrived("a", now=0.001)
    assert company.wait_s(["a"], since=0.001, now=0.001) == 0


def test_who_came_back_and_ended_is_not_remembered_for_ever() -> None:
    company = Company()
    for number in range(2 * ABSENT_REMEMBERED):
        company.delivered([number], now=number / 1000, took_s=0.01)
        company.arrived(number, now=number / 1000)
    assert len(company._away_s) <= len(company._batch_of) <= ABSENT_REMEMBERED + 1
