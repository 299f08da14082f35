"""Layers that grow in place hold what the stock ones hold, whatever is done to them."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from swarm.model import growing
from swarm.model.growing import GrowingLayer, GrowingSlidingLayer

HEADS, SIZE = 2, 16
POSITION_BYTES = HEADS * SIZE * 4
SMALL_BYTES = 64 * 1024


@pytest.mark.parametrize("small_bytes", [0, 40 * POSITION_BYTES, SMALL_BYTES])
@pytest.mark.parametrize("window", [None, 24])
def test_a_layer_returns_and_holds_what_the_stock_one_does(
    window: int | None, small_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """From copies to a buffer, through a gather that doubles the rows, and with pieces of several positions."""
    monkeypatch.setattr(growing, "SMALL_BYTES", small_bytes)
    stock = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    ours = GrowingSlidingLayer(window) if window else GrowingLayer()
    source, rows = torch.Generator().manual_seed(1), 1
    for number in range(200):
        tokens = 7 if number % 23 == 5 else 1
        keys, values = (torch.randn(rows, HEADS, tokens, SIZE, generator=source) for _ in range(2))
        for one, other in zip(stock.update(keys, values), ours.update(keys, values), strict=True):
            assert torch.equal(one, other)
        if number == 90:
            stock.reorder_cache(torch.tensor([0, 0]))
            ours.reorder_cache(torch.tensor([0, 0]))
            rows = 2
        assert torch.equal(stock.keys, ours.keys)
        assert torch.equal(stock.values, ours.values)


def test_a_long_past_stays_where_it_is_and_a_short_one_takes_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growing, "SMALL_BYTES", SMALL_BYTES)
    layer, new = GrowingLayer(), torch.randn(1, HEADS, 1, SIZE)
    moves = 0
    layer.update(new, new)
    for _ in range(3000):
        before = layer.keys.data_ptr()
        layer.update(new, new)
        moved = layer.keys.data_ptr() != before
        if layer.keys.nbytes <= SMALL_BYTES:
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
        else:
            moves += moved
    assert 1 <= moves <= 40
    assert layer.keys.untyped_storage().nbytes() <= 1.1 * layer.keys.nbytes
