"""Pieces of a past: cut out of one cache and put into another, and held so that a heap gets no holes."""

import mmap
import sys

import pytest
import torch

from swarm.blocks import Blocks
from swarm.model import growing, prefix
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from swarm.model.prefix import Cutting, refill
from tests.support.steps import random


@pytest.fixture(scope="module")
def span(family_dir):
    return load_span(open_checkpoint(family_dir("llama")), Blocks(1, 5), dtype=torch.bfloat16)


@pytest.fixture(params=["pages", "no pages"])
def pages(request, monkeypatch):
    if request.param == "no pages":
        monkeypatch.setattr(prefix, "reserve", lambda *_: None)
    return request.param == "pages"


@torch.inference_mode()
def test_a_past_of_pieces_is_the_past_that_they_were_cut_from(span, pages):
    hidden, cache, other = random(1, 50, span.hidden_size).bfloat16(), span.new_cache(), span.new_cache()
    span.forward(hidden[:, :48], cache=cache)
    cutting = Cutting(((0, 16), (16, 32), (32, 48)))
    cutting.cut(cache)
    refill(other, cutting.blocks)
    assert [block.positions for block in cutting.blocks] == [16, 16, 16]
    assert other.length == 48
    assert torch.equal(span.forward(hidden[:, 48:], cache=other), span.forward(hidden[:, 48:], cache=cache))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is reserved")
@torch.inference_mode()
def test_a_kept_piece_holds_pages_and_no_tensor(span):
    cache = span.new_cache()
    span.forward(random(1, 48, span.hidden_size).bfloat16(), cache=cache)
    cutting = Cutting(((0, 16), (16, 32)))
    cutting.cut(cache)
    one, other = cutting.blocks
    assert isinstance(one.data, mmap.mmap)
    assert one.shapes is other.shapes
    assert growing.reserve(4, torch.ones(1)) is not None
