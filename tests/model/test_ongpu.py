"""Products with integer weights on a GPU, by Triton's interpreter: the numbers of the CPU's, to the bit."""

from importlib.util import find_spec

import pytest
import torch

from swarm.blocks import Blocks
from swarm.errors import BadConfiguration
from swarm.model import quantising
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import IntegerMatrix
from swarm.model.fourbits import FourBitMatrix
from swarm.model.integer import IntegerLinear, place, split
from swarm.model.loading import load_span
from swarm.model.probe import outputs_of
from swarm.model.quantising import on_device, quantisation_for

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel for this platform")

CPU = torch.device("cpu")
KINDS = {"int8": IntegerMatrix, "int4": FourBitMatrix}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_outputs", "n_inputs"), [(48, 64), (33, 200), (20, 4100)])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_product_has_the_bits_of_the_cpus(rows, n_outputs, n_inputs, kind, dtype):
    generator = torch.Generator().manual_seed(rows * n_inputs)
    host = KINDS[kind].of(torch.randn(n_outputs, n_inputs, generator=generator))
    hidden = (torch.randn(rows, n_inputs, generator=generator) * 5).to(dtype)
    assert torch.equal(on_device(CPU)(host).multiply(hidden), host.multiply(hidden))


def test_activations_are_rounded_as_on_the_cpu():
    from swarm.model.ongpu import split as split_there

    rows = torch.randn(9, 100) * torch.logspace(-30, 30, 9)[:, None]
    rows[3] = 0
    parts, peaks = split(rows)
    parts_there, peaks_there = split_there(rows)
    assert torch.equal(parts_there.flatten(0, 1).float(), parts)
    assert torch.equal(peaks_there[:, None], peaks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, by which Triton interprets
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_number_that_is_none_gives_none(kind, bad):
    matrix = on_device(CPU)(KINDS[kind].of(torch.randn(32, 64)))
    hidden = torch.randn(3, 64)
    alone = matrix.multiply(hidden)
    hidden[1, 7] = bad
    got = matrix.multiply(hidden)
    assert not got[1].isfinite().any()
    assert torch.equal(got[::2], alone[::2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_span_computes_the_same_with_matrices_that_were_moved(family, kind, family_dir):
    span = load_span(open_checkpoint(family_dir(family)), Blocks(0, 2), dtype=torch.float32, quantize=kind)
    before = outputs_of(span)
    place(span.model, CPU, on_device(CPU))
    assert all(torch.equal(after, other) for after, other in zip(outputs_of(span), before, strict=True))
    linears = [module for module in span.model.modules() if isinstance(module, IntegerLinear)]
    assert all(type(each.integers[0]).__name__.startswith("Gpu") for each in linears)
    assert all(each.weight.untyped_storage().nbytes() == each.weight.element_size() for each in linears)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_on_a_gpu_has_the_parts_that_it_was_made_of(kind):
    host = KINDS[kind].of(torch.randn(40, 96))
    moved = on_device(CPU)(host)
    assert [torch.equal(a, b) for a, b in zip(moved.parts, host.parts, strict=True)] == [True] * len(host.parts)
    assert moved.weights == host.weights
    restored = type(moved).restored((40, 96), moved.parts)
    hidden = torch.randn(2, 96)
    assert torch.equal(restored.multiply(hidden), host.multiply(hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_tried_by_a_product(kind):
    quantising.try_kernels(kind, CPU)


def test_a_gpu_has_kernels_where_triton_runs(family_dir, monkeypatch):
    checkpoint, gpu = open_checkpoint(family_dir("llama")), torch.device("cuda:3")
    with pytest.raises(BadConfiguration, match=r"cuda:3 cannot run kernels for int8 \(.*\), which take a C compiler"):
        quantisation_for("int8", checkpoint, gpu)  # torch is built without CUDA, or there is no such GPU
    monkeypatch.setattr(quantising, "try_kernels", lambda *_: None)
    for kind in KINDS:
        assert quantisation_for(kind, checkpoint, gpu).weights == kind
    assert quantisation_for("auto", checkpoint, gpu).weights is None
    with pytest.raises(BadConfiguration, match="xpu has no kernels for int8 here, which take a GPU with CUDA"):
        quantisation_for("int8", checkpoint, torch.device("xpu"))
    monkeypatch.setattr(quantising, "find_spec", lambda _: None)
    with pytest.raises(BadConfiguration, match="which take a GPU with CUDA and the package triton"):
        quantisation_for("int4", checkpoint, gpu)
