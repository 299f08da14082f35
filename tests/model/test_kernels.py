"""Other ways to multiply by weights: taken where measuring says so, and only if they compute the same."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from swarm.blocks import Blocks
from swarm.model.checkpoint import open_checkpoint
from swarm.model.compiled import kernels
from swarm.model.kernels import KernelLimits, choose_kernels, leave_out_planned_attention
from swarm.model.linears import CompiledLinear, LinearLimits, PackedLinear, WidenedLinear
from swarm.model.loading import load_span

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


@pytest.fixture
def span(family_dir):
    return load_span(open_checkpoint(family_dir("llama")), Blocks(1, 3))


def chosen(span, *gains: float):
    """Choose kernels where a trial finds these gains at one token and at eight, of each way in turn."""
    results = iter([[gain, 1.0] for gain in gains])
    return choose_kernels(span, KernelLimits(pack_bytes_min=0), lambda *_: next(results))


def without_packing(monkeypatch):
    """Let the processor be one for which oneDNN has nothing in half precision."""

    def prepared(weight):
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or")

    monkeypatch.setattr(PackedLinear, "prepared", prepared)


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
    assert chosen(span, *gains) is (PackedLinear if packs else None)
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


@pytest.mark.parametrize(
    ("packed", "compiled", "widened", "expected"),
    [
        ((0.9, 1.3), None, (1.0, 1.9), PackedLinear),
        ((0.7, 1.3), (1.0, 1.9), (1.0, 1.9), CompiledLinear),
        (None, (1.0, 1.9), (1.0, 2.9), CompiledLinear),
        (None, (1.0, 1.05), (1.0, 1.9), WidenedLinear),
        (None, None, (1.0, 1.9), WidenedLinear),
        ((1.0, 1.0), (1.0, 1.0), (1.0, 1.05), None),
        (None, None, (1.0, 1.05), None),
    ],
)
def test_the_first_better_way_is_taken_of_those_that_the_processor_has(
    family_dir, monkeypatch, packed, compiled, widened, expected
):
    if packed is None:
        without_packing(monkeypatch)
    elif not torch.backends.mkldnn.is_available():
        pytest.skip("torch is built without oneDNN")
    span = load_span(open_checkpoint(family_dir("llama")), Blocks(1, 3), dtype=torch.bfloat16)
    monkeypatch.setattr(PackedLinear, "take", classmethod(lambda cls, linear: setattr(linear, "__class__", cls)))
    monkeypatch.setattr(PackedLinear, "forward", nn.Linear.forward)  # whether the kernel is there is another matter
    if packed is not None:
        monkeypatch.setattr(PackedLinear, "prepared", lambda weight: weight)
    if compiled is None:
        monkeypatch.setattr("swarm.model.linears.kernels", lambda _: None)
    gains = [1.0, *(packed or ()), *(compiled or ()), *widened]
    assert chosen(span, *gains) is expected
    assert {type(linear) for linear in linears_of(span)} == {expected or nn.Linear}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("outputs", [7, 64])
@pytest.mark.parametrize("kind", [WidenedLinear, CompiledLinear])
def test_a_widened_product_is_the_exact_one_rounded_once(monkeypatch, dtype, rows, outputs, kind):
    few = LinearLimits(tile_bytes=4 * 96 * 5, compiled_below=40)  # five rows of the weight
    monkeypatch.setattr(kind, "limits", few)
    generator = torch.Generator().manual_seed(rows)
    linear = nn.Linear(96, outputs, dtype=dtype)
    input = torch.randn(2, rows, 96, generator=generator).to(dtype)[:1]
    exact = nn.functional.linear(input.double(), linear.weight.double(), linear.bias.double())
    kind.prepared(linear.weight)
    kind.take(linear)
    with torch.inference_mode():
        output = linear(input)
    assert output.dtype is dtype
    assert output.shape == (1, rows, outputs)
    assert output.is_contiguous()
    assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (7, 72), (64, 96), (65, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_product_of_halves_has_the_same_bits_in_any_batch(dtype, outputs, inputs, threads):
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    input = torch.randn(15, inputs, generator=generator).to(dtype)
    torch.set_num_threads(threads)
    try:
        batches = [CompiledLinear.multiply(input[:count], weight, None) for count in range(2, 16)]
    finally:
        torch.set_num_threads(1)
    for batch in batches:
        assert torch.equal(batch, batches[-1][: len(batch)])
    assert_close(batches[-1].double(), input.double() @ weight.double().T, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("kind", [WidenedLinear, CompiledLinear])
def test_a_widened_layer_has_gradients(kind):
    with torch.inference_mode(mode=False), torch.enable_grad():
        linear = nn.Linear(16, 8, dtype=torch.bfloat16)
        kind.take(linear)
        input = torch.ones(3, 16, dtype=torch.bfloat16, requires_grad=True)
        linear(input).sum().backward()
    assert_close(input.grad, linear.weight.detach().sum(0).expand(3, 16))


def test_inputs_in_other_numbers_than_eights_are_left_to_others():
    with pytest.raises(RuntimeError, match="no compiled products"):
        CompiledLinear.prepared(torch.ones(8, 12, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="not 12"):
        kernels("bfloat16").widened(torch.ones(1, 12), torch.ones(8, 12, dtype=torch.bfloat16))


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the latter with biases
@pytest.mark.parametrize("kind", [WidenedLinear, CompiledLinear])
def test_a_widened_span_computes_the_same(family_dir, monkeypatch, family, kind):
    without_packing(monkeypatch)
    if kind is WidenedLinear:
        monkeypatch.setattr("swarm.model.linears.kernels", lambda _: None)
    span = load_span(open_checkpoint(family_dir(family)), Blocks(1, 3), dtype=torch.bfloat16)
    steps = [torch.randn(1, tokens, span.hidden_size, generator=torch.Generator().manual_seed(1)) for tokens in (20, 4)]
    outputs = []
    for expected in (None, kind):
        assert expected is None or chosen(span, 1.0, 1.0, 2.0) is expected
        cache = span.new_cache()
        with torch.inference_mode():
            outputs.append([span.forward(step.bfloat16(), cache=cache) for step in steps])
    for stock, widened in zip(*outputs, strict=True):
        assert float((widened - stock).float().norm() / stock.float().norm()) < 0.02
    assert any(type(linear) is kind for linear in linears_of(span))


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
