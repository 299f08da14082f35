"""Sessions that run together get what they would have got alone: any mix of steps, families and histories."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.blocks import Blocks
from swarm.errors import RollbackImpossible
from swarm.model import packed as packed_module
from swarm.model.cache import SpanCache
from swarm.model.checkpoint import open_checkpoint
from swarm.model.growing import GrowingLimits
from swarm.model.loading import load_span
from swarm.model.packed import Segment
from swarm.model.slots import Slots
from swarm.model.span import Span
from tests.families import OFTEN, SPLIT
from tests.model.rings import GROWS
from tests.support.often import rest_is_long

FamilyDir = Callable[[str], Path]

# Those whose blocks look at keys or masks themselves, or that keep states which are no keys and values.
ONE_BY_ONE = {
    "deepseek_v3", "falcon", "falcon+alibi", "bloom", "granitemoehybrid", "qwen3_next", "qwen3_5_text", "minimax",
    "lfm2", "jamba", "mamba2",
}  # fmt: skip
TOGETHER = tuple(name for name in SPLIT if name not in ONE_BY_ONE)
TOLERANCE = 1e-4  # of a step's norm, fp32
ROLLBACK = 4
few = settings(max_examples=3, suppress_health_check=list(HealthCheck), derandomize=True)
many = settings(few, max_examples=20)

# One iteration: for each of four sessions None (it sits out), or how many tokens, what is taken back, and a reordering.
moves = st.none() | st.tuples(st.sampled_from([1, 1, 1, 1, 3, 9]), st.sampled_from([0, 0, 0, 1, 3]), st.booleans())
Schedule = list[tuple[tuple[int, int, bool] | None, ...]]
schedules = st.lists(st.tuples(moves, moves, moves, moves), min_size=3, max_size=10)


@pytest.fixture(scope="module")
def span_of(family_dir: FamilyDir) -> Callable[[str], Span]:
    made: dict[str, Span] = {}

    def get(name: str) -> Span:
        if name not in made:
            made[name] = load_span(open_checkpoint(family_dir(name)), Blocks(1, 6), limits=GROWS)
        return made[name]

    return get


@pytest.mark.long
def test_the_families_that_run_together_are_known(span_of: Callable[[str], Span]) -> None:
    assert {name for name in SPLIT if not span_of(name).packs} == ONE_BY_ONE


any_schedule = given(schedule=schedules, part=st.sampled_from([(1, 6), (2, 4)]), seed=st.integers(0, 99))


@pytest.mark.parametrize("name", rest_is_long(TOGETHER, [name for name in OFTEN if name in TOGETHER]))
@few
@any_schedule
def test_members_come_and_go_roll_back_and_reorder(
    span_of: Callable[[str], Span], name: str, schedule: Schedule, part: tuple[int, int], seed: int
) -> None:
    assert_packs(span_of(name).part(Blocks(*part)), schedule, seed)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@few
@any_schedule
def test_short_pasts_come_and_go_roll_back_and_reorder(
    family_dir: FamilyDir, name: str, schedule: Schedule, part: tuple[int, int], seed: int
) -> None:
    span = load_span(open_checkpoint(family_dir(name)), Blocks(1, 6))  # whose pasts are joined below the usual size
    assert_packs(span.part(Blocks(*part)), schedule, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", TOGETHER)
@many
@any_schedule
def test_members_come_and_go_roll_back_and_reorder_in_many_schedules(
    span_of: Callable[[str], Span], name: str, schedule: Schedule, part: tuple[int, int], seed: int
) -> None:
    assert_packs(span_of(name).part(Blocks(*part)), schedule, seed)


def assert_packs(span: Span, schedule: Schedule, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (1, 2, 1, 3)
    solo = [span.new_cache(ROLLBACK) for _ in rows]
    packed = [span.new_cache(ROLLBACK) for _ in rows]
    with torch.inference_mode():
        for iteration in schedule:
            steps: list[tuple[int, Tensor]] = []
            for number, move in enumerate(iteration):
                if move is None:
                    continue
                tokens, back, reorder = move
                for cache in (solo[number], packed[number]):
                    rewind(cache, back, rows[number], reorder)
                steps.append((number, torch.randn(rows[number], tokens, 64, generator=generator)))
            if not steps:
                continue
            expected = [span.forward(step, cache=solo[number]) for number, step in steps]
            shuffled = torch.randperm(len(steps), generator=generator).tolist()
            outputs = span.forward_packed([Segment(steps[i][1], packed[steps[i][0]]) for i in shuffled])
            for at, i in enumerate(shuffled):
                assert outputs[at].shape == expected[i].shape
                assert (outputs[at] - expected[i]).norm() < TOLERANCE * expected[i].norm()
                assert packed[steps[i][0]].length == solo[steps[i][0]].length


def rewind(cache: SpanCache, back: int, rows: int, reorder: bool) -> None:
    if 0 < back < cache.length:
        with contextlib.suppress(RollbackImpossible):  # too often in a row
            cache.keep(cache.length - back)
    if reorder and cache.length:
        cache.gather(torch.arange(rows - 1, -1, -1))


def test_outputs_do_not_hold_each_others_memory(span_of: Callable[[str], Span]) -> None:
    span = span_of("llama")
    segments = [Segment(torch.randn(1, tokens, 64), span.new_cache()) for tokens in (200, 1)]
    with torch.inference_mode():
        _, small = span.forward_packed(segments)
    assert small.untyped_storage().nbytes() == small.nbytes


SESSIONS = 8


@pytest.fixture
def short_pasts(family_dir: FamilyDir) -> Callable[..., list[SpanCache]]:
    """Steps some sessions in any company, each compared with a twin that steps alone; returns the caches of all."""
    span = load_span(open_checkpoint(family_dir("llama")), Blocks(1, 6))
    caches, twins = [[span.new_cache() for _ in range(SESSIONS)] for _ in range(2)]

    def step(*members: int, tokens: int = 1, inference: bool = True) -> list[SpanCache]:
        hidden = {number: torch.randn(1, tokens, 64) for number in members}
        with torch.no_grad(), torch.inference_mode(inference):
            outputs = span.forward_packed([Segment(hidden[number], caches[number]) for number in members])
            for number, output in zip(members, outputs, strict=True):
                expected = span.forward(hidden[number], cache=twins[number])
                assert (output - expected).norm() < TOLERANCE * expected.norm()
        return caches

    for number in range(SESSIONS):
        step(number, tokens=3 + number)
    return step


def slots_of(cache: SpanCache) -> Slots | None:
    return None if cache.slot is None else cache.slot.slots


def test_a_batch_stays_where_it_is_whoever_sits_out(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(*range(SESSIONS))
    places = [cache.slot for cache in caches]
    for members in ((2, 1), (0, 2, 3), (7, 6, 4), range(SESSIONS), (5, 6, 1, 2, 3)):
        short_pasts(*members)
    caches[3].keep(caches[3].length - 2)
    assert [cache.slot for cache in caches] == places
    assert None not in places


def test_a_newcomer_moves_to_a_free_row_near_by(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(*range(4))
    home = slots_of(caches[0])
    short_pasts(0, 1, 2, 3, 7)  # there is a row to spare
    assert slots_of(caches[7]) is home is not None
    short_pasts(1, tokens=2)  # it leaves with what it has
    assert caches[1].slot is None
    short_pasts(0, 6, 2)
    assert slots_of(caches[6]) is home
    short_pasts(0, 1, 2, 3, 7)  # no row is free any more
    assert len({id(slots_of(caches[number])) for number in (0, 1, 2, 3, 7)}) == 1
    assert slots_of(caches[0]) is not home


def test_a_batch_that_is_spread_too_far_moves(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(*range(SESSIONS))
    home = slots_of(caches[0])
    short_pasts(0, 7)
    assert slots_of(caches[0]) is slots_of(caches[7]) is not home
    assert slots_of(caches[1]) is home


def test_the_last_ones_do_not_keep_the_rows_of_those_that_left(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(*range(SESSIONS))
    short_pasts(0, 7, 1, 5, 6)
    short_pasts(0, 4)
    assert caches[2].slot is None
    for layer in caches[2].layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
    short_pasts(*range(SESSIONS))


def test_a_row_of_an_ended_session_is_clean(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(4, 5, 6, 7)
    home = slots_of(caches[4])
    assert home is not None
    for pair in home.layers.values():
        for side in pair:
            side[4:].fill_(torch.nan)  # the row to spare
    short_pasts(4, 5, 6, 7, 0)  # whose past is shorter than theirs
    assert slots_of(caches[0]) is home
    short_pasts(0, 7)


def test_rows_of_inference_mode_are_not_written_outside_it(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(0, 1)
    home = slots_of(caches[0])
    short_pasts(0, 1, inference=False)
    assert slots_of(caches[0]) is slots_of(caches[1]) is not home


def test_a_past_in_a_row_is_held_once(short_pasts: Callable[..., list[SpanCache]]) -> None:
    a, *_ = short_pasts(0, 1)
    assert a.slot is not None
    assert all(a.bare_layers[number].keys is None for number in a.slot.slots.numbers)


def test_rows_without_room_move(short_pasts: Callable[..., list[SpanCache]]) -> None:
    caches = short_pasts(0, 1, 2)
    home = slots_of(caches[0])
    for _ in range(GrowingLimits().joined_room):
        short_pasts(0, 1, 2)
    assert slots_of(caches[0]) is not home


def test_a_batch_of_short_pasts_that_breaks_leaves_them_where_they_were(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = load_span(open_checkpoint(family_dir("llama")), Blocks(1, 6))
    caches, twins = [[span.new_cache() for _ in range(4)] for _ in range(2)]

    def step(*members: int) -> None:
        segments = [
            Segment(torch.randn(1, 1 if cache.length else 5, 64), cache) for cache in map(caches.__getitem__, members)
        ]
        outputs = span.forward_packed(segments)
        for number, segment, output in zip(members, segments, outputs, strict=True):
            expected = span.forward(segment.hidden, cache=twins[number])
            assert (output - expected).norm() < TOLERANCE * expected.norm()

    def breaks(*_: object, **__: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError

    calls: list[int] = []
    with torch.inference_mode():
        step(0, 1, 2, 3)
        step(0, 1)
        step(2, 3)
        before = [cache.slot for cache in caches]
        monkeypatch.setattr(packed_module, "_sees_all", breaks)  # in the third block, when all have moved
        with pytest.raises(MemoryError):
            step(0, 1, 2, 3)
        monkeypatch.undo()
        assert [cache.slot for cache in caches] == before
        assert None not in before
        step(0, 2)
        step(0, 1, 2, 3)


def test_a_session_that_begins_anew_has_no_row(short_pasts: Callable[..., list[SpanCache]]) -> None:
    a, *_ = short_pasts(0, 1, 2)
    a.keep(0)
    assert a.slot is None
    assert a.length == 0
    short_pasts(1, 2)


@pytest.mark.parametrize("way", ["alone", "several positions", "reordered"])
def test_a_session_takes_its_past_along(way: str, short_pasts: Callable[..., list[SpanCache]]) -> None:
    a, *_ = short_pasts(0, 1, 2)
    if way == "reordered":
        a.gather(torch.tensor([0]))
    else:
        short_pasts(0, tokens=1 if way == "alone" else 4)
    assert a.slot is None
    short_pasts(0, 1, 2)


def test_a_batch_that_breaks_leaves_every_cache_as_it_was(
    span_of: Callable[[str], Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = span_of("gemma3_text")
    real, calls = packed_module._solo_attention, []

    def breaks(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        return real(*arguments)  # type: ignore[arg-type]

    caches, twins = [[span.new_cache() for _ in range(2)] for _ in range(2)]
    prompts = [torch.randn(1, 11, 64) for _ in caches]
    steps = [torch.randn(1, 2, 64) for _ in caches]
    with torch.inference_mode():
        for cache, twin, prompt in zip(caches, twins, prompts, strict=True):
            span.forward(prompt, cache=cache)
            span.forward(prompt, cache=twin)
        monkeypatch.setattr(packed_module, "_solo_attention", breaks)
        with pytest.raises(MemoryError):
            span.forward_packed([Segment(step, cache) for step, cache in zip(steps, caches, strict=True)])
        monkeypatch.undo()
        for cache, twin, step in zip(caches, twins, steps, strict=True):
            assert cache.length == twin.length == 11
            assert torch.equal(span.forward(step, cache=cache), span.forward(step, cache=twin))


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2"])
def test_a_past_that_was_taken_back_too_often_is_refused_not_computed_wrongly(
    family: str, span_of: Callable[[str], Span]
) -> None:
    span = span_of(family)
    cache = span.new_cache(ROLLBACK)
    with torch.inference_mode():
        span.forward(torch.randn(1, 12, 64), cache=cache)
        cache.keep(9)
        span.forward(torch.randn(1, 1, 64), cache=cache)
        with pytest.raises(RollbackImpossible):
            cache.keep(7)
        assert cache.length == 10
