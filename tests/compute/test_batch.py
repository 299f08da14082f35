"""Which slices form a batch, from what is ready and a budget."""

from collections import Counter
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from swarm.compute.batch import Ready, form_batch
from swarm.compute.limits import BatchLimits

LIMITS = BatchLimits()


def decode(owner: str = "a", group: object = 0, rows: int = 1) -> Ready:
    return Ready(owner, group, rows, 1, decodes=LIMITS.decodes(rows, 1, has_past=False))


def window(tokens: int, owner: str = "a", rows: int = 1) -> Ready:
    return Ready(owner, 0, rows, tokens, decodes=LIMITS.decodes(rows, tokens, has_past=True))


def prefill(tokens: int, owner: str = "a", group: object = 0, rows: int = 1) -> Ready:
    return Ready(owner, group, rows, tokens)


def chosen(ready: list[Ready], budget: int, limits: BatchLimits = LIMITS) -> list[tuple[int, int]]:
    return [(each.index, each.tokens) for each in form_batch(ready, budget, limits)]


tasks = st.builds(
    Ready,
    owner=st.sampled_from("abc"),
    group=st.sampled_from([0, 1]),
    rows=st.integers(1, 4),
    tokens=st.sampled_from([1, 1, 1, 5, 300, 4000]),
    packs=st.sampled_from([True, True, True, False]),
    cuts=st.booleans(),
).map(lambda task: replace(task, decodes=LIMITS.decodes(task.rows, task.tokens, has_past=task.rows == 1)))


@example(ready=[prefill(5, "a"), prefill(5, "b")], budget=0)
@given(ready=st.lists(tasks, max_size=30), budget=st.integers(0, 3000))
def test_a_batch_stays_within_its_group_and_budget(ready: list[Ready], budget: int) -> None:
    batch = form_batch(ready, budget, LIMITS)
    assert bool(batch) == bool(ready)
    of_batch = [(each.tokens, ready[each.index]) for each in batch]
    assert len({each.index for each in batch}) == len(batch)
    assert all(1 <= tokens <= task.tokens for tokens, task in of_batch)
    assert all((task.cuts and not task.decodes) or tokens == task.tokens for tokens, task in of_batch)
    if len(batch) > 1:
        assert all(task.packs for _, task in of_batch)
        assert len({task.group for _, task in of_batch}) == 1
        spent = [tokens * task.rows for tokens, task in of_batch if not task.decodes and task.cuts]
        assert sum(spent) <= max(budget, 4)


def test_single_steps_run_together_and_prefill_fills_the_budget() -> None:
    assert chosen([prefill(2048, "b"), *[decode()] * 8], 64) == [*((i, 1) for i in range(1, 9)), (0, 64)]


def test_a_window_behind_a_past_is_a_decode_step_and_runs_whole() -> None:
    ready = [prefill(2048, "b"), window(16), window(4), decode()]
    assert chosen(ready, 0) == [(1, 16), (2, 4), (3, 1)]
    assert chosen(ready, 64) == [(1, 16), (2, 4), (3, 1), (0, 64)]
    assert chosen([window(16)], 0) == [(0, 16)]


def test_a_longer_window_or_one_of_many_rows_is_prefill() -> None:
    assert LIMITS.decodes(1, 16, has_past=True)
    assert LIMITS.decodes(2, 16, has_past=True)
    assert not LIMITS.decodes(1, 17, has_past=True)
    assert not LIMITS.decodes(3, 16, has_past=True)
    assert not LIMITS.decodes(1, 2, has_past=False)


def test_a_peers_windows_take_its_turns_by_their_tokens() -> None:
    """Else windows would bring more than single steps do, where a batch is full."""
    ready = [*[window(16, "windows")] * 4, *[decode("single")] * 20]
    full = replace(LIMITS, decode_tokens_max=32)
    assert Counter(ready[index].owner for index, _ in chosen(ready, 0, full)) == {"windows": 1, "single": 16}


def test_one_position_of_many_rows_is_no_single_step() -> None:
    ready = [decode("wide", rows=33), decode(rows=32), decode("b")]
    assert chosen(ready, 0) == [(1, 1), (2, 1)]
    assert chosen(ready, 100) == [(1, 1), (2, 1), (0, 1)]


def test_one_piece_larger_than_the_budget_runs_beside_steps() -> None:
    """Else prompts of eight rows would wait until no session decodes any more."""
    ready = [prefill(100, "rows", rows=8), decode(), prefill(50, "b")]
    assert chosen(ready, 3) == [(1, 1), (0, 1)]
    assert chosen(ready, 0) == [(1, 1)]


def test_unused_shares_go_to_other_peers() -> None:
    ready = [prefill(500, "narrow"), prefill(1, "wide", rows=200), prefill(10, "short"), decode()]
    assert chosen(ready, 128) == [(3, 1), (0, 118), (2, 10)]
    assert chosen(ready, 512) == [(3, 1), (0, 302), (1, 1), (2, 10)]


def test_peers_share_prefill_evenly_whatever_their_number_of_sessions() -> None:
    ready = [*[prefill(500, "greedy")] * 7, prefill(500, "modest")]
    given_to = {"greedy": 0, "modest": 0}
    for index, tokens in chosen(ready, 256):
        given_to[ready[index].owner] += tokens
    assert given_to == {"greedy": 128, "modest": 128}


def test_a_peer_with_many_sessions_pushes_no_other_step_out() -> None:
    ready = [*[decode("greedy")] * 9, decode("modest")]
    assert 9 in {index for index, _ in chosen(ready, 64, replace(LIMITS, decode_tokens_max=4))}


def test_decode_steps_of_a_batch_are_bounded() -> None:
    assert len(chosen([decode(str(number)) for number in range(9)], 64, replace(LIMITS, decode_tokens_max=4))) == 4


def test_a_task_that_does_not_pack_runs_alone_in_its_turn() -> None:
    alone = Ready("a", 0, 1, 300, packs=False)
    assert chosen([alone, decode()], 100) == [(0, 100)]
    assert chosen([decode(), alone], 100) == [(0, 1)]


def test_only_tasks_of_one_group_run_together() -> None:
    assert chosen([decode(group=1), decode(group=2), decode(group=1)], 64) == [(0, 1), (2, 1)]


def test_a_small_budget_goes_to_one_piece() -> None:
    """Else it is spent on the cost that every piece has, however small."""
    ready = [decode(), *(prefill(100, f"peer {number}") for number in range(8))]
    assert chosen(ready, 16) == [(0, 1), (1, 16)]
    assert len(chosen(ready, 8 * 16)) == 9
