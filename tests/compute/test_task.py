"""What tasks compute, and what the scheduler sees of them."""

import pytest
import torch

from swarm.activations import Activations
from swarm.compute.task import Forward, Place, Probe, Tenure, is_gone
from tests.compute.support import Doubling


@pytest.fixture
def span() -> Doubling:
    return Doubling()


@pytest.fixture
def tenure(span: Doubling) -> Tenure:
    return Tenure("peer", span, 0)


def activations(tokens: int, rows: int = 1, *, mask: bool = False, dtype: torch.dtype = torch.float32) -> Activations:
    hidden = torch.arange(rows * tokens * 2, dtype=dtype).view(rows, tokens, 2)
    return Activations(hidden, mask=torch.ones(rows, tokens, dtype=torch.uint8) if mask else None)


def test_a_task_in_pieces_returns_all_its_positions(tenure: Tenure, span: Doubling):
    new = activations(5)
    task = Forward(tenure, new, Place(0))
    for tokens in (2, 2, 1):
        task.run(tokens)
    assert (task.done, span.calls) == (5, [[2], [2], [1]])
    assert task.result().equal(2 * new.hidden)


def test_only_wanted_positions_are_returned(tenure: Tenure):
    new = activations(5)
    assert Forward(tenure, new, Place(0, want=2)).complete().equal(2 * new.hidden[:, 3:])
    assert Forward(tenure, new, Place(5, want=9)).complete().equal(2 * new.hidden)


def test_tasks_continue_their_tenures_past(tenure: Tenure, span: Doubling):
    Forward(tenure, activations(5), Place(0)).complete()
    Forward(tenure, activations(1), Place(5)).complete()
    assert (tenure.past.cache.length, span.n_caches) == (6, 1)


def test_a_task_of_an_ended_tenure_computes_nothing(tenure: Tenure, span: Doubling):
    task = Forward(tenure, activations(2), Place(0))
    assert not is_gone(task)
    tenure.over = True
    assert is_gone(task)
    assert task.segment(1) is None
    assert task.complete() is None
    assert (span.calls, span.n_caches) == ([], 0)


def test_a_result_does_not_count_once_the_tenure_is_over(tenure: Tenure):
    task = Forward(tenure, activations(1), Place(0))
    task.run(1)
    tenure.over = True
    assert task.result() is None


def test_packed_segments_carry_the_next_positions(tenure: Tenure, span: Doubling):
    new = activations(3)
    task = Forward(tenure, new, Place(0))
    for tokens in (2, 1):
        (output,) = task.forward_packed([task.segment(tokens)])
        task.take(output)
    assert span.calls == [[2], [1]]
    assert task.result().equal(2 * new.hidden)


def test_facts_of_a_task_are_its_activations_and_its_spans(tenure: Tenure):
    task = Forward(tenure, activations(3, rows=2), Place(0))
    assert (task.owner, task.cost, task.rows, task.tokens, task.done) == ("peer", 3, 2, 3, 0)
    task.run(1)
    ready = task.ready(decodes=False)
    assert (ready.rows, ready.tokens, ready.cuts) == (2, 2, True)


@pytest.mark.parametrize("is_wide", [True, False], ids=["wide", "narrow"])
def test_looking_at_a_task_makes_no_cache_and_keeps_apart_the_dtypes_that_blocks_take(
    tenure: Tenure, span: Doubling, is_wide
):
    span.dtype, span.traits.has_wide_residual = torch.bfloat16, is_wide
    dtypes = torch.float32, torch.bfloat16, torch.float32
    tasks = [Forward(tenure, activations(1, dtype=dtype), Place(0)) for dtype in dtypes]
    first, second, third = (task.ready(decodes=False).group for task in tasks)
    assert first == third
    assert (first == second) == (not is_wide)
    assert span.n_caches == 0


def test_padding_does_not_pack_even_in_the_past(tenure: Tenure, span: Doubling):
    assert Forward(tenure, activations(1), Place(0)).ready(decodes=False).packs
    masked = Forward(tenure, activations(1, mask=True), Place(0))
    assert not masked.ready(decodes=False).packs
    masked.complete()
    assert not Forward(tenure, activations(1), Place(1)).ready(decodes=False).packs
    span.packs = False
    assert not Forward(Tenure("peer", span, 0), activations(1), Place(0)).ready(decodes=False).packs


def test_a_probe_runs_once_alone_and_teaches_nothing():
    calls: list[int] = []
    probe = Probe(lambda: calls.append(1) or "measured")
    assert not probe.ready(decodes=False).packs
    assert (probe.tenure, probe.cost) == (None, None)
    probe.run(1)
    assert (probe.result(), probe.done, calls) == ("measured", probe.tokens, [1])
    assert Probe(lambda: "again").complete() == "again"


@pytest.mark.parametrize(("keep", "skips"), [(4, True), (5, True), (6, False), (9, False)])
def test_step_is_skipped_if_none_of_its_positions_stays(tenure: Tenure, keep: int, skips: bool) -> None:
    task = Forward(tenure, activations(3), Place(5))
    assert task.skip(keep) == task.is_skipped == skips


def test_steps_that_were_begun_or_gather_are_not_skipped(tenure: Tenure) -> None:
    begun, gathers = Forward(tenure, activations(3), Place(0)), Forward(tenure, activations(1), Place(0, rows=[0]))
    begun.run(1)
    assert not begun.skip(0)
    assert not gathers.skip(0)
