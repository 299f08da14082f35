"""The sampler chooses as the processors of `transformers` do, and as OpenAI defines penalties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.gateway.generation import Sampling
from swarm.gateway.sampler import Sampler, choose, cut

VOCABULARY = 50
often = settings(max_examples=60)
SEEDS = st.integers(0, 1 << 30)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


def drawn(seed: int, rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def of_transformers(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One row through the warpers that `generate()` makes of these settings."""
    row = TemperatureLogitsWarper(sampling.temperature)(None, scores[None])
    if sampling.top_k:
        row = TopKLogitsWarper(sampling.top_k)(None, row)
    if sampling.top_p < 1:
        row = TopPLogitsWarper(sampling.top_p)(None, row)
    if sampling.min_p:
        row = MinPLogitsWarper(sampling.min_p)(None, row)
    return row[0]


@often
@given(SEEDS, st.lists(SAMPLINGS, min_size=1, max_size=5))
def test_cuts_are_those_of_transformers_in_any_batch(seed, samplings):
    scores = drawn(seed, len(samplings))
    temperatures = torch.tensor([sampling.temperature for sampling in samplings])
    ours = cut(scores / temperatures[:, None], samplings)
    for row, sampling, given_row in zip(ours, samplings, scores, strict=True):
        torch.testing.assert_close(row, of_transformers(given_row, sampling))


@often
@given(SEEDS, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), st.sampled_from([0.5, 1.3, 2.0]))
def test_repetition_penalty_is_that_of_transformers(seed, prompt, penalty):
    scores = drawn(seed, 1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt]), scores.clone())
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=penalty), prompt)
    assert choose(scores, [sampler])[0].id == int(expected.argmax())


@often
@given(SEEDS, SAMPLINGS)
def test_samples_follow_the_distribution_that_is_left(seed, sampling):
    scores = drawn(seed, 1)
    left = torch.isfinite(of_transformers(scores[0], sampling))
    sampler = Sampler(Sampling(**{**fields(sampling), "seed": seed}), [])
    for _ in range(20):
        assert left[choose(scores, [sampler])[0].id]


def fields(sampling: Sampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}


def test_frequencies_are_the_probabilities():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    sampler, counts = Sampler(Sampling(seed=1), []), [0, 0, 0]
    for _ in range(4000):
        counts[choose(scores, [sampler])[0].id] += 1
    assert counts == pytest.approx([2000, 1200, 800], rel=0.1)


@often
@given(SEEDS, st.integers(1, 6))
def test_seeded_rows_choose_the_same_alone_and_together(seed, rows):
    scores = drawn(seed, rows)
    samplings = [Sampling(temperature=(0.0, 0.8, 1.5)[i % 3], top_p=0.9, seed=i) for i in range(rows)]
    together = choose(scores, [Sampler(sampling, []) for sampling in samplings])
    alone = [choose(scores[i : i + 1], [Sampler(sampling, [])])[0] for i, sampling in enumerate(samplings)]
    assert together == alone


def test_penalties_count_the_output_alone():
    scores = torch.zeros(1, 4)
    scores[0, 2] = 1.0
    sampler = Sampler(Sampling(temperature=0, presence_penalty=0.4, frequency_penalty=0.3), [2, 2, 2])
    assert choose(scores, [sampler])[0].id == 2  # the prompt's tokens are not counted
    assert choose(scores, [sampler])[0].id == 2  # 1 - 0.4 - 0.3 is still the most
    assert choose(scores, [sampler])[0].id != 2  # 1 - 0.4 - 0.6 is not


def test_bias_decides_and_ids_beyond_the_vocabulary_are_left_out():
    sampler = Sampler(Sampling(temperature=0, logit_bias={3: 100.0, 99: 100.0}), [])
    assert choose(torch.zeros(1, 4), [sampler])[0].id == 3


def test_probabilities_are_those_of_the_model_whatever_is_done_to_the_logits():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    sampler = Sampler(Sampling(temperature=0, logit_bias={2: 9.0}, logprobs=2), [])
    (token,) = choose(scores, [sampler])
    assert token.id == 2
    assert token.logprob == pytest.approx(float(torch.log(torch.tensor(0.2))))
    assert [likely.id for likely in token.top] == [0, 1]
    assert choose(scores, [Sampler(Sampling(logprobs=0, seed=0), [])])[0].top == ()


@pytest.mark.parametrize("temperature", [1e-4, 1e-40, 1e-300])
def test_lowest_temperatures_take_the_likeliest_token(temperature):
    scores = drawn(3, 2)
    samplers = [Sampler(Sampling(temperature=temperature, seed=seed), []) for seed in range(2)]
    assert [token.id for token in choose(scores, samplers)] == scores.argmax(-1).tolist()
