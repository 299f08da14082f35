"""Attention in blocks of fixed positions: a prompt's bits do not depend on its pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.blocks import Blocks
from swarm.model import aligned
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import is_supported
from swarm.model.growing import BLOCK_TOKENS, GrowingSlidingLayer
from swarm.model.loading import load_span
from swarm.server import measure
from swarm.server.measure import MeasureLimits, cache_prices, tokens_that_fit
from tests.support.often import rest_is_long
from tests.support.steps import cuts_that_show, random, through

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")

WINDOW = 8  # of the tiny checkpoints
FAMILIES = ("llama", "gemma3_text", "gemma2")  # all of the past, windows, and windows with a soft cap of scores


@pytest.fixture(scope="module")
def span_of(family_dir):
    made = {}

    def get(name):
        if name not in made:
            checkpoint = open_checkpoint(family_dir(name))
            made[name] = load_span(checkpoint, Blocks(1, 5), dtype=torch.float32, quantize="int8")
        return made[name]

    return get


pieces = st.lists(st.integers(2, 70), min_size=2, max_size=6)  # single positions behind a past attend otherwise


@pytest.mark.parametrize("name", rest_is_long(FAMILIES, FAMILIES[1:2]))
@settings(max_examples=10, derandomize=True)
@given(pieces)
def test_no_cut_of_a_prompt_shows(name, span_of, sizes):
    cuts = torch.tensor(sizes).cumsum(0).tolist()
    assert cuts_that_show(span_of(name), [(cuts[-1], cuts[:-1])]) == []


def test_without_blocks_a_cut_shows(span_of, monkeypatch):
    """Else the test above would prove nothing."""
    span = span_of("llama")
    span.shared.change_attention(aligned.ALIGNED, "sdpa")
    try:
        assert cuts_that_show(span, [(90, (33,)), (150, (41, 90))]) != []
    finally:
        span.shared.change_attention("sdpa", aligned.ALIGNED)


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_the_stock_attention(name, family_dir):
    """In float32, where nothing makes more of a last bit."""
    span = load_span(open_checkpoint(family_dir(name)), Blocks(1, 5), dtype=torch.float32)
    hidden = random(1, 100, span.hidden_size)
    expected = through(span, hidden)
    span.shared.aligned = True
    changed = [
        span.shared.change_attention(*pair) for pair in (("sdpa", "swarm_aligned"), ("eager", "swarm_aligned_eager"))
    ]
    assert any(changed)
    assert torch.allclose(through(span, hidden[:, :37], hidden[:, 37:38], hidden[:, 38:]), expected, atol=1e-4)


@pytest.mark.parametrize("tokens", [2, 36, 100])
def test_heads_that_share_keys_get_no_copies_of_them(tokens, monkeypatch):
    real, largest = torch.nn.functional.scaled_dot_product_attention, 0

    def noted(query, key, value, **kwargs):
        nonlocal largest
        largest = max(largest, *(states.untyped_storage().nbytes() for states in (key, value)))
        return real(query, key, value, **kwargs)

    query, key, value = torch.randn(2, 8, tokens, 16), torch.randn(2, 2, 100, 16), torch.randn(2, 2, 100, 16)
    copies = (states.repeat_interleave(4, dim=1) for states in (key, value))
    shown = torch.ones(tokens, 100, dtype=torch.bool).tril(100 - tokens)
    expected = real(query, *copies, attn_mask=shown).transpose(1, 2)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    output, _ = aligned.aligned_attention(torch.nn.Module(), query, key, value, None)
    assert torch.allclose(output, expected, atol=1e-5)
    assert largest <= 1.5 * key.nbytes


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_kv_pool_leaves_room_for_what_attention_copies(quantize, family_dir, monkeypatch):
    free, copies = 10_000_000, 2 if quantize is None else 1  # two heads share keys
    monkeypatch.setattr(measure, "free_bytes", lambda device: free)
    for blocks in (Blocks(0, 1), Blocks(0, 6)):
        span = load_span(open_checkpoint(family_dir("llama")), blocks, dtype=torch.float32, quantize=quantize)
        with torch.inference_mode():
            prices = cache_prices(span)
        past = tokens_that_fit(span, prices, None) * prices.token_bytes
        assert past * (1 + copies / len(blocks)) <= free
        assert past >= 0.9 * min(MeasureLimits().host_share, 1 / (1 + copies / len(blocks))) * free
        assert tokens_that_fit(span, prices, 5_000_000) * prices.token_bytes > 4_500_000  # as it is told


@pytest.mark.parametrize("rollback", [0, 20])
def test_rolled_back_positions_leave_no_trace(rollback, span_of):
    span = span_of("gemma3_text")
    hidden, other = random(1, 90, span.hidden_size), random(1, 20, span.hidden_size, seed=5)
    cache = span.new_cache(rollback_max=rollback)
    with torch.inference_mode():
        outputs = [span.forward(hidden[:, :50], cache=cache)]
        if rollback:
            span.forward(other, cache=cache)
            cache.keep(50)
        outputs += [span.forward(hidden[:, 50:], cache=cache)]
    assert torch.equal(torch.cat(outputs, dim=1), through(span, hidden))


def test_padded_rows_compute_what_they_do_alone(span_of):
    """About: padding moves positions to other blocks."""
    span = span_of("llama")
    one, two = random(1, 40, span.hidden_size), random(1, 29, span.hidden_size, seed=3)
    batch = torch.cat([one, torch.nn.functional.pad(two, (0, 0, 11, 0))])
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :11] = 0
    positions = torch.stack([torch.arange(40), (torch.arange(40) - 11).clamp(min=0)])
    with torch.inference_mode():
        output = span.forward(batch, cache=span.new_cache(), positions=positions, mask=mask)
    assert torch.equal(output[:1], through(span, one))
    distance = (output[1:, 11:] - through(span, two)).norm() / output[1:, 11:].norm()
    assert distance < 0.02


@given(st.lists(st.integers(1, 90), max_size=8), st.integers(1, 90))
def test_a_window_shows_what_it_has_from_a_multiple_on(pasts, new):
    layer = GrowingSlidingLayer(WINDOW, aligned=True)
    for past in pasts:
        layer.update(*torch.zeros(2, 1, 1, past, 4))
    past = layer.cumulative_length
    length, first = layer.get_mask_sizes(new)
    keys, _ = layer.update(*torch.zeros(2, 1, 1, new, 4))
    assert keys.shape[-2] == length == past + new - first
    assert first <= max(0, past - WINDOW + 1)
    if new == 1:
        assert first == max(0, past - WINDOW + 1)
    else:
        assert first % BLOCK_TOKENS == 0
        assert length < WINDOW + 2 * BLOCK_TOKENS + new


@pytest.mark.parametrize("rollback", [0, 20])
def test_what_a_window_keeps_is_charged(rollback, span_of):
    span = span_of("gemma3_text")
    prices, cache = cache_prices(span), span.new_cache(rollback_max=rollback)
    with torch.inference_mode():
        for piece in random(1, 400, span.hidden_size).split(50, dim=1):
            span.forward(piece, cache=cache)
    charged = prices.tokens(1, 400, rollback) * prices.token_bytes
    assert cache.nbytes <= charged < 1.2 * cache.nbytes
