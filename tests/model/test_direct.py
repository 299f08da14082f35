"""Decode steps that go past the parent give the bits that it would, for any schedule of steps."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.blocks import Blocks
from swarm.model import direct as direct_module
from swarm.model.checkpoint import open_checkpoint
from swarm.model.direct import DirectLimits
from swarm.model.loading import load_span
from swarm.model.probe import learn_direct_path
from swarm.model.span import Span, SpanLimits
from tests.families import FEW, SPLIT, make
from tests.model.rings import GROWS, save_model
from tests.support.often import rest_is_long

FamilyDir = Callable[[str], Path]
Schedule = list[int]

# Mostly single tokens, some chunks; long enough to fill sliding windows of 8.
schedules = st.lists(st.sampled_from([1, 1, 1, 1, 1, 2, 5]), min_size=2, max_size=16)
few = settings(max_examples=3, suppress_health_check=list(HealthCheck), derandomize=True)
many = settings(few, max_examples=20)


@pytest.fixture(scope="module")
def span_of(family_dir: FamilyDir) -> Callable[[str], Span]:
    made: dict[str, Span] = {}

    def get(name: str) -> Span:
        if name not in made:
            made[name] = load_span(open_checkpoint(family_dir(name)), Blocks(1, 6), limits=GROWS)
        return made[name]

    return get


def hidden_states(batch: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, tokens, 64, generator=torch.Generator().manual_seed(seed))


any_session = given(
    schedule=schedules, batch=st.integers(1, 3), part=st.sampled_from([(1, 6), (2, 4), (3, 4)]), seed=st.integers(0, 9)
)


@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
@few
@any_session
def test_both_ways_give_the_same_bits(
    span_of: Callable[[str], Span], name: str, schedule: Schedule, batch: int, part: tuple[int, int], seed: int
) -> None:
    assert_same_bits(span_of(name).part(Blocks(*part)), schedule, batch, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", SPLIT)
@many
@any_session
def test_both_ways_give_the_same_bits_in_many_sessions(
    span_of: Callable[[str], Span], name: str, schedule: Schedule, batch: int, part: tuple[int, int], seed: int
) -> None:
    assert_same_bits(span_of(name).part(Blocks(*part)), schedule, batch, seed)


def assert_same_bits(span: Span, schedule: Schedule, batch: int, seed: int) -> None:
    short, long = span.new_cache(), span.new_cache()
    with torch.inference_mode():
        for number, tokens in enumerate([3, *schedule]):
            step = hidden_states(batch, tokens, seed + number)
            got, expected = span.forward(step, cache=short), span.forward_through_parent(step, cache=long)
            assert torch.equal(got, expected), (number, tokens, short.length)


# Llama 4's masks start anew with every chunk of positions, 8 here and 8192 in its checkpoints.
@pytest.mark.parametrize("name", rest_is_long([name for name in SPLIT if name != "llama4_text"], FEW))
def test_every_family_goes_the_short_way_before_in_and_beyond_its_windows(
    span_of: Callable[[str], Span], name: str
) -> None:
    span, cache = span_of(name), span_of(name).new_cache()
    span.forward(hidden_states(2, 4, 0), cache=cache)
    for number in range(9):
        assert span.forward_directly(hidden_states(2, 1, number), cache) is not None, cache.length


@pytest.mark.long
def test_the_short_way_goes_on_over_the_edges_of_stretches(family_dir: FamilyDir) -> None:
    limits = SpanLimits(direct=DirectLimits(stretch_positions=5, stretches_max=2))
    for name in ("llama", "gemma3_text", "bloom"):
        span = load_span(open_checkpoint(family_dir(name)), Blocks(1, 6), limits=limits)
        assert span.is_direct
        short, long = span.new_cache(), span.new_cache()
        for number, tokens in enumerate((3, *[1] * 20)):
            step = hidden_states(1, tokens, number)
            assert torch.equal(span.forward(step, cache=short), span.forward_through_parent(step, cache=long))


def test_a_stretch_of_positions_leaves_few_tensors(span_of: Callable[[str], Span]) -> None:
    """Each small one would keep a page of a server's heap."""
    span = span_of("llama")
    cache = span.new_cache()

    def tensors() -> int:
        gc.collect()
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    span.forward(hidden_states(1, 3, 0), cache=cache)
    before = tensors()
    for batch in (2, 3, 4):  # a stretch for each
        other = span.new_cache()
        span.forward(hidden_states(batch, 3, 0), cache=other)
        assert span.forward_directly(hidden_states(batch, 1, 1), other) is not None
        del other
    assert tensors() - before < 60


def test_tables_are_bounded(family_dir: FamilyDir) -> None:
    limits = SpanLimits(direct=DirectLimits(tables_bytes_max=100))
    span = load_span(open_checkpoint(family_dir("llama")), Blocks(1, 6), limits=limits)
    cache = span.new_cache()
    span.forward(hidden_states(1, 4, 0), cache=cache)
    assert span.forward_directly(hidden_states(1, 1, 1), cache) is None
    assert cache.length == 4
    assert span.forward(hidden_states(1, 1, 1), cache=cache).shape == (1, 1, 64)


def test_what_is_no_plain_decode_step_goes_through_the_parent(span_of: Callable[[str], Span]) -> None:
    span, cache = span_of("llama"), span_of("llama").new_cache()
    learn_direct_path(span)
    step = hidden_states(2, 1, 0)
    assert span.forward_directly(step, cache) is None  # no past
    span.forward(hidden_states(2, 3, 1), cache=cache)
    assert span.forward_directly(step, cache, torch.tensor([[3], [2]])) is None  # left-padded rows
    with torch.inference_mode(mode=False), torch.enable_grad():
        assert span.forward_directly(step, cache) is None  # the tables are no part of a graph
    assert cache.length == 3
    assert span.forward_directly(step, cache, torch.tensor([[3], [3]])) is not None


def test_longrope_goes_through_the_parent_where_its_tables_switch(tmp_path: Path) -> None:
    config = make("phi3")
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **factors}
    config.original_max_position_embeddings = 20
    config.max_position_embeddings = 80
    span = load_span(open_checkpoint(save_model(config, tmp_path)), Blocks(0, 2))
    short, long = span.new_cache(), span.new_cache()
    for number, tokens in enumerate((15, *[1] * 10)):
        step = hidden_states(1, tokens, number)
        assert torch.equal(span.forward(step, cache=short), span.forward_through_parent(step, cache=long))


def test_a_stretch_that_cannot_be_tabulated_goes_through_the_parent(
    span_of: Callable[[str], Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    span, cache, twin = span_of("qwen3"), span_of("qwen3").new_cache(), span_of("qwen3").new_cache()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    learn_direct_path(span)
    monkeypatch.setattr(direct_module.DirectPath, "_tabulate", broken)
    for number, tokens in enumerate((3, 1, 1)):
        step = hidden_states(1, tokens, number)
        assert torch.equal(span.forward(step, cache=cache), span.forward_through_parent(step, cache=twin))
    assert cache.length == 5


def test_a_family_whose_blocks_disagree_keeps_to_its_parent(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = direct_module.DirectPath.step
    monkeypatch.setattr(direct_module.DirectPath, "step", lambda self, *a: real(self, *a) * 1.0001)
    span = load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2))
    assert not span.is_direct
    assert not span.part(Blocks(0, 1)).is_direct
