"""Embeddings and head as two functions, with spans between them, compute what the stock model does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds
from tests.families import FEW, OFTEN, SPLIT
from tests.model.rings import CUTS, Pair, difference, tokens
from tests.support.often import rest_is_long

PairOf = Callable[[str], Pair]


def ends_of(pair: Pair) -> TokenEnds:
    return TokenEnds(load_ends(pair.checkpoint), pair.checkpoint.traits)


def outputs(pair: Pair, embedded: list[Tensor]) -> list[Tensor]:
    """What the last block makes of each of these, one behind the other."""
    spans = pair.spans(*CUTS)
    caches = [span.new_cache() for span in spans]
    made = []
    for given in embedded:
        hidden = given
        for span, cache in zip(spans, caches, strict=True):
            hidden = span.forward(hidden, cache=cache)
        made.append(hidden)
    return made


@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
def test_ends_of_a_family_compute_the_stock_models_logits(pair_of: PairOf, name: str) -> None:
    pair = pair_of(name)
    ends, ids = ends_of(pair), tokens(1, 9)
    prompt, more = outputs(pair, [ends.embed(ids[:, :7], 0), ends.embed(ids[:, 7:8], 7)])
    expected = pair.stock().step(ids)
    assert difference(ends.logits(prompt[0]), expected[0, :7].float()) < 1e-4
    assert difference(ends.logits(more[0]), expected[0, 7:8].float()) < 1e-4


@pytest.mark.parametrize("name", rest_is_long(SPLIT, OFTEN))
def test_rows_at_different_positions_embed_as_each_alone(pair_of: PairOf, name: str) -> None:
    ends, ids, starts = ends_of(pair_of(name)), tokens(3, 2), torch.tensor([0, 4, 9])
    together = ends.embed(ids, starts)
    for row, start in enumerate(starts.tolist()):
        alone = ends.embed(ids[row : row + 1], start)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-6, atol=1e-6)  # OPT projects its embeddings


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mamba2"])
def test_head_gives_a_row_the_same_logits_among_others(pair_of: PairOf, name: str) -> None:
    ends = ends_of(pair_of(name))
    hidden = torch.randn(5, ends.traits.hidden_size)
    together = ends.logits(hidden)
    for row in range(5):
        torch.testing.assert_close(together[row], ends.logits(hidden[row : row + 1])[0], rtol=1e-4, atol=1e-5)


def test_llama_is_called_directly_and_gpt2_by_its_own_forward(pair_of: PairOf) -> None:
    """Learned positions are a part of what block 0 gets."""
    assert ends_of(pair_of("llama")).is_direct == (True, True)
    assert not ends_of(pair_of("gpt2")).is_direct[0]


def test_a_token_behind_the_last_position_is_embedded_as_if_it_were_there(pair_of: PairOf) -> None:
    ends = ends_of(pair_of("gpt2"))
    last = ends.traits.positions_max
    assert last is not None
    ids = tokens(1, 3)
    embedded = ends.embed(ids, last - 1)
    assert torch.equal(embedded[:, :1], ends.embed(ids[:, :1], last - 1))
    assert torch.equal(embedded[:, 2:], ends.embed(ids[:, 2:], last - 1))
