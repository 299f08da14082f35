"""The client's part calls one placeholder a step where the family permits it, and computes the same as with all."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.model.ends import OneStepBlocks, replace_blocks
from swarm.model.hollow import Placeholder, blocks_of, decoder_of
from swarm.model.loading import load_ends
from tests.families import OFTEN, SPLIT
from tests.model.rings import Pair, tokens
from tests.support.often import rest_is_long

PairOf = Callable[[str], Pair]


def halved(hidden: Tensor) -> Tensor:
    """In place of all blocks."""
    return hidden * 0.5


def placeholders_called(model: PreTrainedModel, ids: Tensor) -> tuple[int, Tensor]:
    """How many blocks one forward calls, and its logits."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        called = frame.f_locals.get("self")
        if event == "call" and frame.f_code.co_name == "forward" and isinstance(called, Placeholder):
            calls["forward"] += 1

    sys.setprofile(count)
    try:
        logits: Tensor = model(ids, use_cache=False).logits
    finally:
        sys.setprofile(None)
    return calls["forward"], logits


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", rest_is_long(SPLIT, OFTEN))
def test_a_step_calls_one_placeholder_and_computes_the_same(pair_of: PairOf, name: str) -> None:
    checkpoint = pair_of(name).checkpoint
    ends, ids = load_ends(checkpoint, dtype=torch.float32), tokens(2, 5)
    replace_blocks(ends, checkpoint.traits, halved)
    assert len(blocks_of(ends)) == checkpoint.traits.n_blocks
    calls, logits = placeholders_called(ends, ids)
    assert calls == 1
    decoder, list_name = decoder_of(ends)
    setattr(decoder, list_name, nn.ModuleList(blocks_of(ends).children()))  # the slow twin
    calls, expected = placeholders_called(ends, ids)
    assert calls == checkpoint.traits.n_blocks
    assert torch.equal(logits, expected)


def test_a_parent_that_does_something_for_each_block_walks_them(pair_of: PairOf) -> None:
    checkpoint = pair_of("llama").checkpoint
    ends, ids = load_ends(checkpoint, dtype=torch.float32), tokens(1, 3)
    decoder, list_name = decoder_of(ends)
    forward = type(decoder).forward

    def counting(self: PreTrainedModel, **arguments: object) -> object:
        output = forward(self, **arguments)
        output.last_hidden_state = output.last_hidden_state + sum(1 for _ in getattr(self, list_name))
        return output

    decoder.__class__ = type(
        "Counting", (type(decoder),), {"forward": counting, "__module__": type(decoder).__module__}
    )
    replace_blocks(ends, checkpoint.traits, halved)
    assert placeholders_called(ends, ids)[0] == checkpoint.traits.n_blocks


def test_a_parent_that_breaks_without_its_blocks_walks_them(pair_of: PairOf) -> None:
    checkpoint = pair_of("llama").checkpoint
    ends = load_ends(checkpoint, dtype=torch.float32)
    decoder, list_name = decoder_of(ends)
    forward = type(decoder).forward

    def needy(self: PreTrainedModel, **arguments: object) -> object:
        assert len(list(getattr(self, list_name))) == checkpoint.traits.n_blocks
        return forward(self, **arguments)

    decoder.__class__ = type("Needy", (type(decoder),), {"forward": needy, "__module__": type(decoder).__module__})
    replace_blocks(ends, checkpoint.traits, halved)
    assert placeholders_called(ends, tokens(1, 3))[0] == checkpoint.traits.n_blocks


def test_another_remote_replaces_the_first(pair_of: PairOf) -> None:
    checkpoint = pair_of("llama").checkpoint
    ends, ids = load_ends(checkpoint, dtype=torch.float32), tokens(1, 3)
    replace_blocks(ends, checkpoint.traits, lambda hidden: hidden)
    other = ends(ids, use_cache=False).logits
    replace_blocks(ends, checkpoint.traits, halved)
    assert isinstance(blocks_of(ends), OneStepBlocks)
    assert not torch.equal(ends(ids, use_cache=False).logits, other)


def test_blocks_are_reached_by_index_and_by_ranges() -> None:
    blocks = OneStepBlocks([nn.Linear(1, 1) for _ in range(3)])
    assert (len(blocks), list(blocks)) == (3, [blocks[0]])
    assert blocks[-1] is list(blocks.children())[2]
    assert [list(blocks[part]) for part in (slice(3), slice(0, 2), slice(0), slice(1, None))] == [
        [blocks[0]],
        [blocks[0]],
        [],
        [],
    ]
