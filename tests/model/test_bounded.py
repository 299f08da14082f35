"""Bounds of a head's logits hold what torch computes, however the weights and hidden states are made."""

import pytest
import torch
from torch.nn.functional import linear

from swarm.model import bounded
from swarm.model.bounded import BoundedHead, unfit
from swarm.model.eightbits import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no int8 products on this processor")

ROWS = 700  # several of the pieces in which rows are computed
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("plain", "outliers", "near zero", "aligned", "one of one sign", "zeros", "exact weights")


def made(kind, width, dtype, seed=0):
    """Return a weight [ROWS, width] and hidden states [8, width]."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, width, generator=rng)
    hidden = torch.randn(8, width, generator=rng)
    match kind:
        case "outliers":
            weight[:, 3] *= 60
            hidden[:, 5] *= 200
        case "near zero":
            weight, hidden = weight * 1e-12, hidden * 1e-10
        case "aligned":  # rounding errors of a row all point the same way as the hidden state
            weight[:] = (torch.arange(width) % 7 - 3.49) / 127
            weight[:, 0] = 1.0
            steps = weight * 127
            hidden[:] = (steps - steps.round())[0] * 9
        case "one of one sign":
            weight, hidden = weight.abs(), hidden.abs()
        case "exact weights":  # all that is lost is of the hidden state: nearly half a step of each number, one way
            weight[:], weight[:, 0] = 127.0, 0.0
            hidden[:] = hidden.sign().clamp(min=0) + 0.49
            hidden[:, 0] = 63 * 126
        case "zeros":
            weight[::2], hidden[::2] = 0.0, 0.0
    return weight.to(dtype), hidden.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_the_exact_logits(kind, dtype):
    for width in (48, 576):
        weight, hidden = made(kind, width, dtype)
        head = BoundedHead(weight)
        together = linear(hidden, weight).float()
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:600]
        for row, beside in zip(hidden.split(1), together, strict=True):
            alone = linear(row[None], weight)[0, 0].float()
            bounds, narrow = head.bounds(row), head.narrow(row, rows)
            for exact in (alone, beside):
                assert bool(((bounds.low <= exact) & (exact <= bounds.high)).all())
                assert bool(((narrow.low <= exact[rows]) & (exact[rows] <= narrow.high)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_are_as_narrow_as_their_use_asks(dtype):
    weight, hidden = made("plain", 576, dtype)
    head, row = BoundedHead(weight), hidden[:1]
    bounds, spread = head.bounds(row), linear(row, weight).float().std()
    assert (bounds.high - bounds.low).max() < 2 * spread
    narrow = head.narrow(row, torch.arange(ROWS))
    near = spread * 2e-3 + linear(row, weight).float().abs()[0] * (2.0**-6 if dtype == torch.bfloat16 else 0)
    assert bool((narrow.high - narrow.low <= near).all())


def test_a_hidden_state_that_is_not_finite_has_no_bounds():
    weight, hidden = made("plain", 48, torch.float32)
    for value in (torch.nan, torch.inf, 1e31):
        hidden[0, 2] = value
        assert BoundedHead(weight).bounds(hidden[:1]) is None
        assert BoundedHead(weight).bounds(hidden[1:2]) is not None
    weight[5, 5] = torch.nan
    assert BoundedHead(weight).bounds(hidden[1:2]) is None


def test_weights_without_proven_products_have_no_bounds(monkeypatch):
    assert unfit(torch.zeros(4, 4)) is None
    assert "float16" in unfit(torch.zeros(4, 4, dtype=torch.float16))
    assert "meta" in unfit(torch.zeros(4, 4, device="meta"))
    assert "wide" in unfit(torch.zeros(1, 1 << 17))
    monkeypatch.setattr(bounded, "is_supported", lambda: False)
    assert "int8 products" in unfit(torch.zeros(4, 4))
