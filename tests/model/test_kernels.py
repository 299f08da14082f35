"""Weights in oneDNN's order: taken where measuring says so, and only if they compute the same."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from swarm.blocks import Blocks
from swarm.model.checkpoint import open_checkpoint
from swarm.model.kernels import KernelLimits, PackedLinear, choose_kernels, leave_out_planned_attention
from swarm.model.loading import load_span

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


@pytest.fixture
def span(family_dir):
    return load_span(open_checkpoint(family_dir("llama")), Blocks(1, 3))


def chosen(span, *gains: float) -> bool:
    """Choose kernels where a trial finds these gains at one token and at eight."""
    results = iter([[gain, 1.0] for gain in gains])
    return choose_kernels(span, KernelLimits(pack_bytes_min=0), lambda *_: next(results))


def linears_of(span):
    return [module for module in span.model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("gains", "packs"),
    [
        ((1.5, 2.0), True),
        ((1.03, 1.7), True),  # an EPYC: a step alone takes as long, eight together take little more than half
        ((0.91, 1.25), True),  # an older one
        ((0.81, 1.3), True),  # the same on a bad day: what is chosen is no matter of luck
        ((1.3, 1.0), True),
        ((1.03, 1.04), False),  # noise
        ((0.9, 1.1), False),  # batches gain no more than a step alone loses
        ((0.7, 2.0), False),  # whoever decodes alone would pay too much for it
    ],
)
def test_weights_are_packed_where_more_is_gained_than_lost(span, gains, packs):
    assert chosen(span, *gains) is packs
    assert any(isinstance(linear, PackedLinear) for linear in linears_of(span)) is packs


def test_packed_weights_compute_the_same_and_leave_no_copy(span):
    steps = [torch.randn(1, tokens, span.hidden_size, generator=torch.Generator().manual_seed(1)) for tokens in (20, 1)]
    outputs = []
    for choose in (lambda: True, lambda: chosen(span, 2.0, 2.0)):
        assert choose()
        cache = span.new_cache()
        with torch.inference_mode():
            outputs.append([span.forward(step, cache=cache) for step in steps])
    for stock, packed in zip(*outputs, strict=True):
        assert_close(packed, stock, rtol=1e-4, atol=1e-4)
    packed_ones = [linear for linear in linears_of(span) if isinstance(linear, PackedLinear)]
    assert packed_ones
    for linear in packed_ones:
        assert linear.weight.untyped_storage().nbytes() == linear.weight.element_size()
        assert linear.weight.isnan().all()


def test_weights_stay_as_they_were_where_packed_ones_compute_something_else(span, monkeypatch):
    before = [linear.weight.clone() for linear in linears_of(span)]
    monkeypatch.setattr(
        PackedLinear, "forward", lambda self, input: 1.01 * nn.functional.linear(input, self.packed.to_dense())
    )
    assert not chosen(span, 2.0, 2.0)
    assert not any(isinstance(linear, PackedLinear) for linear in linears_of(span))
    for linear, weight in zip(linears_of(span), before, strict=True):
        assert torch.equal(linear.weight, weight)


def test_a_gpu_attends_without_plans_that_every_new_length_needs():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        leave_out_planned_attention(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        leave_out_planned_attention(torch.device("cuda", 0))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
