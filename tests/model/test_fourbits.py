"""Spans with int4 weights: the rounding, bits that depend on nothing but the step, what they take, and refusals."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from swarm.blocks import Blocks
from swarm.errors import BadConfiguration, UnsupportedCheckpoint
from swarm.model import quantising
from swarm.model.checkpoint import open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.fourbits import FourBitFormat, FourBitLimits, FourBitMatrix, packed
from swarm.model.integer import integers_of, split, to_integers
from swarm.model.loading import block_bytes, load_span
from swarm.model.packed import Segment
from swarm.model.quantising import quantisation_for
from tests.families import FAMILIES
from tests.support.swarms import DEMO_CHECKPOINT

DENSE = ("llama", "qwen3", "gemma3_text", "phi3", "olmo2")
SPARSE = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
BLOCKS = Blocks(1, 5)
OLD_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def span_of(family_dir):
    made = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = load_span(open_checkpoint(family_dir(name)), BLOCKS, dtype=dtype, quantize="int4")
        return made[name, dtype]

    return get


def through(span, *chunks):
    cache = span.new_cache()
    with torch.inference_mode():
        return torch.cat([span.forward(chunk, cache=cache) for chunk in chunks], dim=1)


# --- the rounding


def test_the_rounding_is_what_it_always_was():
    parts = packed(random(64, 96, seed=3))
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest()[:16] for part in parts]
    assert digests == ["b2023e4d55ca8724", "25fb38d7173ac233", "6ccd9bb14dc6d0ef"]


def test_a_blocks_extreme_is_a_step_of_int8_and_the_lowest_code():
    weight = torch.zeros(2, 64)
    weight[0, 0], weight[0, 1], weight[0, 40] = 127.0, -31.75, -8.0
    weight[1, 3], weight[1, 5] = -2.0, 2.0  # equally far
    codes, extremes, scales = packed(weight)
    assert extremes.tolist() == [[127, -8], [127, 0]]
    assert scales.tolist() == [1.0, 2.0 / 127]
    low, high = codes & 15, codes >> 4
    assert (int(low[0, 0]), int(low[0, 1]), int(high[0, 0]), int(low[0, 24])) == (0, 10, 8, 0)
    steps = FourBitMatrix(64, codes, extremes, scales).steps(0, 2)
    assert (steps[0, 0], steps[0, 1], steps[0, 40]) == (127, -32, -8)
    assert (steps[1, 3], steps[1, 5]) == (-111, 127)  # 7/8 of the extreme is the farthest on its other side
    assert steps[1, 32:].count_nonzero() == 0


@pytest.mark.parametrize("n_inputs", [1, 31, 32, 33, 100])
def test_a_row_need_not_fill_its_blocks(n_inputs):
    weight = random(20, n_inputs)
    matrix = FourBitMatrix.of(weight)
    again = FourBitMatrix.restored((20, n_inputs), matrix.parts)
    rounded = again.steps(0, 20) * again.parts[2][:, None]
    assert rounded.shape == weight.shape
    assert (rounded - weight).norm() < 0.12 * weight.norm()
    assert matrix.n_bytes == sum(part.nbytes for part in matrix.parts)


# --- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_the_rounded_weights(dtype):
    linear = nn.Linear(96, 64).to(dtype)
    matrix = FourBitMatrix.of(linear.weight)
    exact = matrix.steps(0, 64).double() * matrix.parts[2].double()[:, None]
    to_integers(linear, FourBitMatrix)
    rows = random(5, 96, seed=1) * torch.tensor([1e-6, 1.0, 40.0, 0.0, 1e6])[:, None]
    rows[:, 7] *= 30  # an outlier, as real models have
    rows = rows.to(dtype)
    with torch.inference_mode():
        got = linear(rows)
    expected = rows.double() @ exact.t() + linear.bias.double()
    assert got.dtype is dtype
    error = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-3 if dtype is torch.float32 else 4e-3)


def widest(n_inputs=3 * FourBitFormat.inputs_max - 7):
    """Rows and weights whose sums are as large as can be."""
    rows, weight = torch.ones(3, n_inputs), torch.ones(40, n_inputs)
    rows[1] = random(n_inputs)
    weight[1:] = random(39, n_inputs, seed=1)
    return rows, weight


def test_sums_in_float32_are_exact():
    rows, weight = widest(FourBitFormat.inputs_max)
    parts, _ = split(rows)
    steps = FourBitMatrix.of(weight).steps(0, len(weight))
    assert (parts @ steps.t()).max() == 63 * 127 * FourBitFormat.inputs_max
    assert torch.equal((parts @ steps.t()).double(), parts.double() @ steps.double().t())


def test_a_row_is_the_same_alone_and_beside_any_other():
    rows, weight = widest()
    rows = torch.cat([rows, random(30, rows.shape[1], seed=2)])
    rows[5] *= 1e4  # a stranger's
    matrix = FourBitMatrix.of(weight)
    together = matrix.multiply(rows)
    assert all(torch.equal(matrix.multiply(rows[index : index + 1])[0], together[index]) for index in range(len(rows)))


def test_it_does_not_matter_how_much_is_unpacked_at_once():
    rows, weight = widest()
    parts = packed(weight)
    results = [
        FourBitMatrix(rows.shape[1], *parts, FourBitLimits(unpacked)).multiply(rows)
        for unpacked in (1, 50_000, 1 << 20)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


PRODUCT = """
import hashlib, torch
from tests.model.test_fourbits import FourBitMatrix, widest
rows, weight = widest()
print(hashlib.sha256(FourBitMatrix.of(weight).multiply(rows).numpy().tobytes()).hexdigest())
"""


def test_other_kernels_compute_the_same_bits():
    rows, weight = widest()
    here = hashlib.sha256(FourBitMatrix.of(weight).multiply(rows).numpy().tobytes()).hexdigest()
    line = [sys.executable, "-c", PRODUCT]
    other = subprocess.run(line, env={**os.environ, **OLD_KERNELS}, capture_output=True, text=True, check=True)
    assert other.stdout.split() == [here]


# --- spans


@pytest.mark.parametrize("name", DENSE + SPARSE)
def test_blocks_of_a_family_compute_about_the_same(name, span_of, family_dir):
    span, last = span_of(name), Blocks(4, 5)
    plain = load_span(open_checkpoint(family_dir(name)), last, dtype=torch.float32)
    hidden = random(1, 24, span.hidden_size)
    got, expected = through(span.part(last), hidden), through(plain, hidden)
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < errors.median() < 0.3
    assert str(span.numeric_class) == "float32+int4"
    assert integers_of(span.model) == "int4"


def alone_and_packed(span):
    """The outputs of some sessions' steps, each alone and as one."""
    assert span.packs
    prompts = [random(1, tokens, span.hidden_size, seed=tokens) for tokens in (7, 3, 11)]
    steps = [random(1, 1, span.hidden_size, seed=tokens + 50) for tokens in (7, 3, 11)]
    alone, caches = [], []
    with torch.inference_mode():
        for prompt, step in zip(prompts, steps, strict=True):
            cache = span.new_cache()
            span.forward(prompt, cache=cache)
            alone.append(span.forward(step, cache=cache))
            caches.append(span.new_cache())
            span.forward(prompt, cache=caches[-1])
        packed = span.forward_packed([Segment(step, cache) for step, cache in zip(steps, caches, strict=True)])
    return list(zip(alone, packed, strict=True))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_look(name, span_of):
    try:
        span = span_of(name)
    except UnsupportedCheckpoint as error:
        print("REFUSED", name, error)
        return
    if not span.packs:
        print("NOPACK", name)
        return
    hidden = random(1, 24, span.hidden_size)
    pk = all(torch.equal(*pair) for pair in alone_and_packed(span))
    ch = torch.equal(through(span, hidden[:, :16], hidden[:, 16:]), through(span, hidden))
    print("LOOK", name, "packed", pk, "chunks", ch)
