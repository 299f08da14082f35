"""Layers that grow in place hold what the stock ones hold, whatever is done to them."""

import ctypes
import mmap
import sys

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from swarm.model.cache import _trim
from swarm.model.growing import GrowingLayer, GrowingLimits, GrowingSlidingLayer

HEADS, SIZE = 2, 16
POSITION_BYTES = HEADS * SIZE * 4
SMALL_BYTES = 64 * 1024


@pytest.mark.parametrize("small_bytes", [0, 40 * POSITION_BYTES, SMALL_BYTES])
@pytest.mark.parametrize("window", [None, 24])
def test_a_layer_returns_and_holds_what_the_stock_one_does(window: int | None, small_bytes: int):
    """From copies to a buffer, through a gather that doubles the rows, and with pieces of several positions."""
    limits = GrowingLimits(small_bytes=small_bytes)
    stock = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    ours = GrowingSlidingLayer(window, limits) if window else GrowingLayer(limits)
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


def test_a_long_past_stays_where_it_is_and_a_short_one_takes_no_more_than_it_needs():
    layer, new = GrowingLayer(), torch.randn(1, HEADS, 1, SIZE)
    moves = 0
    layer.update(new, new)
    for _ in range(6000):
        before = layer.keys.data_ptr()
        layer.update(new, new)
        moved = layer.keys.data_ptr() != before
        if layer.keys.nbytes <= SMALL_BYTES:
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
        else:
            moves += moved
    assert 1 <= moves <= 3


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is reserved")
@pytest.mark.parametrize("tokens", [600, 1000, 1500])
def test_what_is_reserved_is_held_when_it_is_used(tokens: int):
    """Of the system's pages, those that positions were written to and no others."""
    layer, new = GrowingLayer(), torch.randn(1, HEADS, tokens, SIZE)
    with torch.inference_mode():
        layer.update(new, new)
    for states in (layer.keys, layer.values):
        reserved = states.untyped_storage()
        assert reserved.nbytes() > 1.5 * states.nbytes
        assert states.nbytes <= resident_bytes(reserved) <= states.nbytes + 2 * HEADS * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is reserved")
@pytest.mark.parametrize("removed", [[1950], [100] * 19])
def test_a_rollback_gives_its_memory_back(removed: list[int]):
    """At once, or in pieces of which none is much."""
    rows, heads, size = 8, 2, 64
    layer, prompt = GrowingLayer(), torch.randn(rows, heads, 2000, size)
    with torch.inference_mode():
        layer.update(prompt, prompt)
        for count in removed:
            layer.crop(-count)
            layer.update(prompt[:, :, :1], prompt[:, :, :1])
    for states in (layer.keys, layer.values):
        edges = 2 * rows * heads * mmap.PAGESIZE
        assert resident_bytes(states.untyped_storage()) <= 4 / 3 * states.nbytes + edges


@pytest.mark.parametrize(("length", "guesses"), [(400, 16), (40, 48)])
def test_a_wrong_guess_copies_nothing(length: int, guesses: int):
    layer, prompt = GrowingLayer(GrowingLimits(small_bytes=0)), torch.randn(1, 8, 400, 64)
    with torch.inference_mode():
        layer.update(prompt[:, :, :length], prompt[:, :, :length])
        layer.update(prompt[:, :, :1], prompt[:, :, :1])
        at = layer.keys.data_ptr()
        for _ in range(50):
            layer.update(prompt[:, :, :guesses], prompt[:, :, :guesses])
            layer.crop(1 - guesses)
    assert layer.keys.data_ptr() == at


@pytest.mark.parametrize("small_bytes", [0, 40 * POSITION_BYTES])
def test_rollbacks_of_any_size_leave_what_the_stock_layer_has(small_bytes: int):
    stock, ours = DynamicLayer(), GrowingLayer(GrowingLimits(small_bytes=small_bytes))
    source = torch.Generator().manual_seed(1)
    for number in range(300):
        new = torch.randn(1, HEADS, 1 + number % 7 * (number % 5), SIZE, generator=source)
        for one, other in zip(stock.update(new, new), ours.update(new, new), strict=True):
            assert torch.equal(one, other)
        if number % 3 == 0:
            removed = int(torch.randint(stock.keys.shape[-2] // (1 + number % 2), (1,), generator=source))
            stock.crop(-removed)
            ours.crop(-removed)
            assert torch.equal(stock.keys, ours.keys)


def test_where_nothing_can_be_reserved_a_past_grows_all_the_same():
    more_than_there_is = GrowingLimits(reserved_tokens_min=1 << 42)
    layer, new = GrowingLayer(more_than_there_is), torch.randn(1, HEADS, 700, SIZE)
    layer.update(new, new)
    keys, _ = layer.update(new, new)
    assert torch.equal(keys, torch.cat([new, new], dim=-2))
    assert keys.untyped_storage().nbytes() <= 1.1 * keys.nbytes


def resident_bytes(storage: torch.UntypedStorage) -> int:
    """How much of it the system holds in memory: see mincore(2)."""
    held = (ctypes.c_ubyte * -(-storage.nbytes() // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), held) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in held)


@pytest.mark.parametrize("records", [False, True])
def test_a_window_lets_the_room_of_a_long_piece_go(records: bool):
    window, piece = 512, torch.randn(1, HEADS, 1820, SIZE)
    stock, ours = DynamicSlidingWindowLayer(window), GrowingSlidingLayer(window)
    ours.record_past = records
    stock.update(piece, piece)
    ours.update(piece, piece)
    if records:
        _trim(ours, 8)
    assert ours.keys.untyped_storage().nbytes() <= 1.3 * window * POSITION_BYTES
    for _ in range(700):
        new = torch.randn(1, HEADS, 1, SIZE)
        expected, got = stock.update(new, new), ours.update(new, new)
        for one, other in zip(expected, got, strict=True):
            assert torch.equal(one, other)
        if records:
            _trim(ours, 8)
        assert ours.keys.untyped_storage().nbytes() <= 1.6 * window * POSITION_BYTES
