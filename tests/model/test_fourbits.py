"""Spans with int4 weights: the rounding, bits that depend on nothing but the step, what they take, and refusals."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swarm.activations import Tier, tier_of
from swarm.blocks import Blocks
from swarm.errors import BadConfiguration, UnsupportedCheckpoint
from swarm.model import eightbits, quantising
from swarm.model.checkpoint import open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.eightbits import IntegerMatrix, is_supported
from swarm.model.fourbits import FourBitFormat, FourBitLimits, FourBitMatrix, packed, tables
from swarm.model.hollow import blocks_of, class_for, skeleton
from swarm.model.integer import IntegerFormat, integers_of, matrices_in, matrices_of, split, to_integers
from swarm.model.kinds import kinds_in
from swarm.model.loading import block_bytes, load_span
from swarm.model.quantising import quantisation_for
from swarm.model.steady import steady_bytes
from swarm.model.weightcache import WeightCache, WeightCacheLimits
from tests.support.often import rest_is_long
from tests.support.steps import alone_and_packed, cuts_that_show, random, through
from tests.support.swarms import DEMO_CHECKPOINT

WHOLE = ("llama", "qwen2", "qwen3", "phi3", "olmo2", "glm4", "gpt_neox", "granite", "nemotron", "opt", "smollm3")
WINDOWS = ("cohere2", "gemma2", "gemma3_text", "gemma4_text", "mistral", "olmo3")
DENSE = ("llama", "gemma3_text", "phi3")
SPARSE = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
BLOCKS = Blocks(1, 5)
OLD_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}


@pytest.fixture(scope="module")
def span_of(family_dir):
    made = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = load_span(open_checkpoint(family_dir(name)), BLOCKS, dtype=dtype, quantize="int4")
        return made[name, dtype]

    return get


# --- the rounding


def test_the_rounding_is_what_it_always_was():
    parts = packed(random(64, 96, seed=3))
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest()[:16] for part in parts]
    assert digests == ["87630bd7ddf177a1", "b750c03d81b0238b", "6ccd9bb14dc6d0ef"]


def test_each_half_block_has_the_table_and_the_codes_of_least_error():
    weight = random(3, 50, seed=4)
    codes, numbers, scales = packed(weight)
    assert torch.equal(scales, weight.abs().amax(1) / 127)
    quarters = (weight / scales[:, None]).mul_(4).round_()
    steps = FourBitMatrix(50, codes, numbers, scales).steps(0, 3)
    for row, first in ((0, 0), (1, 16), (2, 32), (2, 48)):
        mine, got = quarters[row, first : first + 16], steps[row, first : first + 16]
        filled = torch.zeros(16)
        filled[: len(mine)] = mine
        errors = (filled[None, :, None] - 4 * tables().float()[:, None]).square()
        tops = tables().short().abs().amax(-1).view(32, 8).amax(-1) * 4
        start = min(max(int((tops > filled.abs().max()).sum()) - 7, 0), 24)
        of_table = errors.amin(-1).sum(-1)[8 * start : 8 * start + 64]
        number = int(numbers[row, first // 16])
        assert number == 8 * start + int((of_table == of_table.min()).nonzero()[0])
        assert torch.equal((mine - 4 * got).square(), errors[number, : len(mine)].amin(-1))


def test_the_table_is_sought_among_the_size_within_the_largest_weight_and_seven_larger_ones():
    weight = random(16, 2048, seed=6)
    _, numbers, scales = packed(weight)
    halves = (weight / scales[:, None]).mul_(4).round_().view(-1, 16)
    of_table = [(halves[:, :, None] - 4 * table.float()).square().amin(-1).sum(-1) for table in tables()]
    tops = tables().short().abs().amax(-1).view(32, 8).amax(-1)
    sizes = torch.tensor(FourBitFormat.sizes) // 4
    assert torch.equal(tops, (torch.tensor(FourBitFormat.sizes) / 16).round().short())
    starts = ((sizes > halves.abs().amax(-1, keepdim=True)).sum(-1) - 7).clamp(0, 24)
    errors, order = torch.stack(of_table, -1), torch.arange(256) // 8
    is_sought = (order >= starts[:, None]) & (order < starts[:, None] + 8)
    errors[~is_sought] = torch.inf
    first = torch.where(errors == errors.amin(-1, keepdim=True), torch.arange(256), 256).amin(-1)
    assert torch.equal(numbers.flatten().long(), first)


def test_tables_are_steps_of_int8_and_a_zero_stays_one():
    assert tables().abs().max() == 127
    weight = torch.zeros(16, 64)
    weight[:, 0] = 1.0
    assert FourBitMatrix.of(weight).steps(0, 16)[:, 16:].count_nonzero() == 0


def test_it_does_not_matter_how_much_is_rounded_at_once():
    weight = random(40, 100, seed=5)
    for other in (1, 700, 1 << 20):
        assert all(map(torch.equal, packed(weight), packed(weight, FourBitLimits(rounded_max=other))))


@pytest.mark.parametrize("n_inputs", [1, 31, 32, 33, 100])
def test_a_row_need_not_fill_its_blocks(n_inputs):
    weight = random(20, n_inputs)
    matrix = FourBitMatrix.of(weight)
    again = FourBitMatrix.restored((20, n_inputs), matrix.parts)
    rounded = again.steps(0, 20) * again.parts[2][:, None]
    assert rounded.shape == weight.shape
    assert (rounded - weight).norm() < 0.09 * weight.norm()
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


def widest(n_inputs=3 * IntegerFormat.inputs_max - 7):
    """Rows and weights whose sums are as large as can be."""
    rows, weight = torch.ones(3, n_inputs), torch.ones(40, n_inputs)
    rows[1] = random(n_inputs)
    weight[1:] = random(39, n_inputs, seed=1)
    return rows, weight


def test_sums_in_float32_are_exact():
    rows, weight = widest(IntegerFormat.inputs_max)
    parts, _ = split(rows)
    steps = FourBitMatrix.of(weight).steps(0, len(weight))
    assert (parts @ steps.t()).max() == 63 * 127 * IntegerFormat.inputs_max
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
        FourBitMatrix(rows.shape[1], *parts, FourBitLimits(unpacked_max=unpacked)).multiply(rows)
        for unpacked in (1, 50_000, 1 << 20)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


PRODUCT = """
import hashlib, sys
from safetensors.torch import load_file
from swarm.model.fourbits import FourBitMatrix
drawn = load_file(sys.argv[1])
rows, weight = drawn["rows"], drawn["weight"]
print(hashlib.sha256(FourBitMatrix.of(weight).multiply(rows).numpy().tobytes()).hexdigest())
"""


@pytest.mark.long
def test_other_kernels_compute_the_same_bits(tmp_path):
    rows, weight = widest()
    save_file({"rows": rows, "weight": weight}, tmp_path / "drawn.safetensors")  # others would draw other numbers
    here = hashlib.sha256(FourBitMatrix.of(weight).multiply(rows).numpy().tobytes()).hexdigest()
    line = [sys.executable, "-c", PRODUCT, tmp_path / "drawn.safetensors"]
    other = subprocess.run(line, env={**os.environ, **OLD_KERNELS}, capture_output=True, text=True, check=True)
    assert other.stdout.split() == [here]


# --- spans


@pytest.mark.parametrize("name", rest_is_long(DENSE + SPARSE, ("llama", "deepseek_v3")))
def test_blocks_of_a_family_compute_about_the_same(name, span_of, family_dir):
    span, last = span_of(name), Blocks(4, 5)
    plain = load_span(open_checkpoint(family_dir(name)), last, dtype=torch.float32)
    hidden = random(1, 24, span.hidden_size)
    got, expected = through(span.part(last), hidden), through(plain, hidden)
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < errors.median() < 0.3
    assert str(span.numeric_class) == "float32+int4"
    assert integers_of(span.model) == "int4"


@pytest.mark.parametrize("name", rest_is_long([*WHOLE, *WINDOWS], ("llama", "opt", "gemma3_text")))
def test_steps_of_many_sessions_are_the_same_as_alone_to_the_last_bit(name, span_of):
    assert all(torch.equal(*pair) for pair in alone_and_packed(span_of(name)))


@pytest.mark.parametrize("name", rest_is_long([*WHOLE, *WINDOWS], ["llama", "gemma2"]))
def test_chunks_are_the_same_as_the_whole_to_the_last_bit(name, span_of):
    assert cuts_that_show(span_of(name)) == []


@pytest.mark.parametrize(
    "name", rest_is_long([name for name in SPARSE if name != "deepseek_v3"], ["qwen3_moe"])
)  # its steps are not packed
def test_steps_of_experts_are_nearly_the_same_as_alone(name, span_of):
    """The choice of experts is in float32, and is added up otherwise in a batch."""
    errors = [float((one - other).norm() / one.norm()) for one, other in alone_and_packed(span_of(name).part(BLOCKS))]
    assert sorted(errors)[1] < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_thread_and_two_compute_the_same(dtype, span_of):
    span = span_of("llama", dtype)
    hidden = random(1, 24, span.hidden_size).to(dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(through(span, hidden))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_and_size_are_known_before_anything_is_loaded(dtype):
    checkpoint = open_checkpoint(DEMO_CHECKPOINT)
    span = load_span(checkpoint, Blocks(3, 5), dtype=dtype, quantize="int4")
    assert span.numeric_class == numeric_class_of(checkpoint.config, dtype, "int4")
    assert tier_of(str(span.numeric_class)) == Tier.FOUR_BITS
    assert span.weight_bytes / 2 == pytest.approx(block_bytes(checkpoint, dtype, "int4"), rel=0.03)
    assert block_bytes(checkpoint, torch.bfloat16, "int4") <= 0.31 * block_bytes(checkpoint, torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_all_memory_of_a_span_is_counted(name, span_of):
    """Nothing but the matrices' parts and small tensors is there, and the linear layers' are about 0.3."""
    span = span_of(name)
    matrices = matrices_in(span.model).values()
    parts = sum(part.untyped_storage().nbytes() for matrix in matrices for part in matrix.parts)
    plain = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in span.model.state_dict().values()}
    beside = sum(plain.values()) + steady_bytes(span.model)
    assert span.weight_bytes == pytest.approx(parts + beside, rel=0.03)
    numbers = sum(each.n_outputs * each.n_inputs for each in matrices)
    assert parts <= 0.33 * 2 * numbers  # a tenth is scales: rows are short
    assert sum(plain.values()) < 0.05 * parts


@pytest.mark.parametrize("name", ["demo", "qwen2", "qwen3_moe", "deepseek_v3"])
def test_the_smallest_layers_of_a_block_are_int8_up_to_a_sixteenth_of_its_weights(name, family_dir):
    checkpoint = open_checkpoint(DEMO_CHECKPOINT if name == "demo" else family_dir(name))
    span = load_span(checkpoint, Blocks(1, 3), quantize="int4")
    matrices = matrices_in(span.model)
    for index in span.blocks:
        block = blocks_of(skeleton(class_for(checkpoint.config), checkpoint.config))[index]
        kinds = kinds_in(block, FourBitMatrix)
        sizes = {each: sum(a * b for a, b in matrices_of(each).values()) for each in kinds}
        finer = [sizes[each] for each, kind in kinds.items() if kind is IntegerMatrix]
        others = [size for each, size in sizes.items() if kinds[each] is FourBitMatrix and isinstance(each, nn.Linear)]
        assert 16 * sum(finer) <= sum(sizes.values()) < 16 * (sum(finer) + min(others))
        assert max(finer, default=0) <= min(others)
        for path, module in block.named_modules():
            mine = [matrix for whole, matrix in matrices.items() if f".{index}.{path}." in whole]
            assert module not in kinds or {type(each) for each in mine} == {kinds[module]}


def test_layers_of_one_size_stay_int4_where_they_are_more_than_a_sixteenth():
    block = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    assert set(kinds_in(block, FourBitMatrix).values()) == {FourBitMatrix}
    assert set(kinds_in(block, IntegerMatrix).values()) == {IntegerMatrix}
    block.append(nn.Linear(64, 16))
    assert list(kinds_in(block, FourBitMatrix).values()) == [FourBitMatrix] * 12 + [IntegerMatrix]


def test_a_processor_without_kernels_for_int8_computes_the_same_bits(monkeypatch):
    checkpoint = open_checkpoint(DEMO_CHECKPOINT)
    outputs = []
    for kind in (eightbits._product_kind(), eightbits._PlainMatrix):
        monkeypatch.setattr(eightbits, "_product_kind", lambda kind=kind: kind)
        span = load_span(checkpoint, BLOCKS, dtype=torch.float32, quantize="int4")
        fine = [matrix for matrix in matrices_in(span.model).values() if type(matrix) is IntegerMatrix]
        assert {type(matrix._matrix) for matrix in fine} == {kind}
        outputs.append(through(span, random(1, 24, span.hidden_size)))
    assert torch.equal(*outputs)


def test_int8_without_kernels_has_the_same_bits_in_long_rows(monkeypatch):
    rows, weight = random(3, 20_000).abs(), random(40, 20_000, seed=1).abs()  # float32 cannot hold their sums
    expected = IntegerMatrix.of(weight).multiply(rows)
    monkeypatch.setattr(eightbits, "_product_kind", lambda: eightbits._PlainMatrix)
    assert torch.equal(IntegerMatrix.of(weight).multiply(rows), expected)


# --- the cache, and refusals


def test_a_second_start_has_the_same_bits_and_notices_a_flipped_one(family_dir, tmp_path, caplog, monkeypatch):
    def load():
        cache = WeightCache(tmp_path, WeightCacheLimits(free_bytes_min=0))
        span = load_span(open_checkpoint(family_dir("phi3")), Blocks(1, 3), quantize="int4", rounded=cache)
        cache.write()
        return through(span, random(1, 24, span.hidden_size).to(span.dtype))

    def refuse(_weight):
        raise AssertionError("it is in the cache")

    first = load()
    path = sorted(tmp_path.rglob("*.safetensors"))[1]
    with monkeypatch.context() as patch:
        patch.setattr(FourBitMatrix, "of", refuse)
        assert torch.equal(load(), first)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(load(), first)
    assert f"{path} is damaged" in caplog.text


@pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")
def test_a_cache_of_int8_is_never_read_as_int4(family_dir, tmp_path):
    """One folder has both. A file of the one in the place of the other is rounded anew."""

    def load(quantize):
        cache = WeightCache(tmp_path, WeightCacheLimits(free_bytes_min=0))
        span = load_span(open_checkpoint(family_dir("llama")), Blocks(1, 2), quantize=quantize, rounded=cache)
        cache.write()
        assert integers_of(span.model) == quantize
        return through(span, random(1, 24, span.hidden_size).to(span.dtype))

    expected = {weights: load(weights) for weights in ("int8", "int4")}
    assert not torch.equal(*expected.values())
    assert all(torch.equal(load(weights), output) for weights, output in expected.items())
    eight, four = sorted(tmp_path.rglob("*.safetensors"), key=lambda path: path.parent.name, reverse=True)
    assert (eight.parent.name, four.parent.name) == ("float32+int8", "float32+int4")
    four.unlink()
    shutil.copy(eight, four.parent)
    assert torch.equal(load("int4"), expected["int4"])
    assert list(four.parent.iterdir()) == [four]


@pytest.mark.parametrize("name", ["gpt_oss", "gpt2"])
def test_families_whose_weights_are_elsewhere_are_refused(name, family_dir):
    with pytest.raises(UnsupportedCheckpoint, match="int4 is for linear layers and experts"):
        load_span(open_checkpoint(family_dir(name)), Blocks(0, 2), quantize="int4")


def test_a_checkpoint_that_is_quantised_is_refused(family_dir):
    checkpoint = open_checkpoint(family_dir("llama"))
    checkpoint.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedCheckpoint, match="quantised already"):
        load_span(checkpoint, Blocks(0, 2), quantize="int4")


def test_a_block_that_goes_around_its_layers_is_refused(family_dir, monkeypatch):
    from transformers.models.llama import modeling_llama

    def around(self, hidden):
        return self.down_proj(nn.functional.linear(hidden, self.up_proj.weight))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", around)
    with pytest.raises(UnsupportedCheckpoint, match="reads weights that int4 has taken"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2), quantize="int4")


def test_every_cpu_can_have_int4(family_dir, monkeypatch):
    checkpoint = open_checkpoint(family_dir("llama"))
    monkeypatch.setattr(quantising, "is_supported", lambda: False)  # for int8
    assert quantisation_for("int4", checkpoint, torch.device("cpu")).weights == "int4"


def test_auto_never_takes_fewer_bits_than_int8(family_dir, monkeypatch):
    checkpoint = open_checkpoint(family_dir("llama"))
    monkeypatch.setattr(quantising, "is_supported", lambda: False)
    assert quantisation_for("auto", checkpoint, torch.device("cpu")).weights is None


@pytest.mark.parametrize("weights", ["int3", "none", ""])
def test_weights_of_another_name_are_refused(weights, family_dir):
    with pytest.raises(BadConfiguration, match="neither int8 nor int4"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2), quantize=weights)
