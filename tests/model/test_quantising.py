"""Spans with int8 weights: what they compute, what they take, and who is refused them."""

import copy
import dataclasses
import hashlib
import json
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.errors import BadConfiguration, UnsupportedCheckpoint
from swarm.model import quantising, reading
from swarm.model.checkpoint import open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.eightbits import IntegerMatrix, is_supported, rounded
from swarm.model.hollow import blocks_of
from swarm.model.integer import integers_of, rounded_of, to_integers
from swarm.model.loading import block_bytes, load_span
from swarm.model.quantising import Rounding, quantisation_for
from swarm.model.steady import SteadyWeight
from tests.families import BASE
from tests.support.often import rest_is_long
from tests.support.steps import alone_and_packed, cuts_that_show, random, through
from tests.support.swarms import DEMO_CHECKPOINT

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")

DENSE = ("llama", "qwen3", "gemma3_text", "phi3", "olmo2")
SPARSE = ("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
OFTEN = ("llama", "gemma3_text", "qwen3_moe")
BLOCKS = Blocks(1, 5)


@pytest.fixture(scope="module")
def span_of(family_dir):
    made = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = load_span(open_checkpoint(family_dir(name)), BLOCKS, dtype=dtype, quantize="int8")
        return made[name, dtype]

    return get


def test_the_rounding_is_what_it_always_was():
    integers, scales = rounded(random(64, 96, seed=3))
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest()[:16] for part in (integers, scales)]
    assert digests == ["242f850c32a58306", "6ccd9bb14dc6d0ef"]


def test_halves_go_to_the_even_step_and_rows_of_zeros_stay_zero():
    integers, scales = rounded(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]]))
    assert integers.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scales[0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_the_rounded_weights(dtype):
    linear = nn.Linear(96, 64).to(dtype)
    integers, scales = rounded(linear.weight)
    exact = integers.double() * scales.double()[:, None]
    to_integers(linear, IntegerMatrix)
    rows = random(5, 96, seed=1) * torch.tensor([1e-6, 1.0, 40.0, 0.0, 1e6])[:, None]
    rows[:, 7] *= 30  # an outlier, as real models have
    rows = rows.to(dtype)
    with torch.inference_mode():
        got = linear(rows)
    expected = rows.double() @ exact.t() + linear.bias.double()
    assert got.dtype is dtype
    error = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < (1e-3 if dtype is torch.float32 else 4e-3)


def test_a_row_is_the_same_alone_and_beside_any_other():
    linear = nn.Linear(256, 128, bias=False)
    to_integers(linear, IntegerMatrix)
    rows = random(33, 256, seed=2)
    rows[5] *= 1e4  # a stranger's
    with torch.inference_mode():
        together = linear(rows)
        assert all(torch.equal(linear(rows[index : index + 1])[0], together[index]) for index in range(len(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_kept_multiplies_by_integers_of_many_bits(dtype):
    weight, rows = random(4, 256).to(dtype), random(33, 256, seed=1).to(dtype)
    steady = SteadyWeight.of(weight)
    together = functional.linear(rows, steady)
    assert all(torch.equal(functional.linear(rows[at : at + 1], steady)[0], together[at]) for at in range(len(rows)))
    exact = rows.double() @ weight.double().t()
    assert together.dtype is dtype
    assert ((together - exact).norm() / exact.norm()) < (2e-4 if dtype is torch.float32 else 4e-3)
    cast = functional.linear(rows.float(), steady.type(torch.float32))  # as routers do that add up in float32
    assert ((cast - exact).norm() / exact.norm()) < 2e-4
    assert torch.equal(steady + 0, weight)


@pytest.mark.parametrize("name", rest_is_long(DENSE + SPARSE, OFTEN))
def test_blocks_of_a_family_compute_nearly_the_same(name, span_of, family_dir):
    span, last = span_of(name), Blocks(4, 5)
    plain = load_span(open_checkpoint(family_dir(name)), last, dtype=torch.float32)
    hidden = random(1, 24, span.hidden_size)
    got, expected = through(span.part(last), hidden), through(plain, hidden)
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < errors.median() < 0.02  # now and then another expert is chosen
    assert str(span.numeric_class) == "float32+int8"
    assert integers_of(span.model) == "int8"


@pytest.mark.parametrize("name", rest_is_long([*DENSE, *SPARSE[:-1]], OFTEN))  # deepseek_v3's steps are not packed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_many_sessions_are_the_same_as_alone_to_the_last_bit(name, dtype, span_of):
    assert all(torch.equal(*pair) for pair in alone_and_packed(span_of(name, dtype)))


@pytest.mark.parametrize("name", rest_is_long([*DENSE, "qwen3_moe", "mixtral"], ["gemma3_text", "qwen3_moe"]))
def test_chunks_are_the_same_as_the_whole_to_the_last_bit(name, span_of):
    assert cuts_that_show(span_of(name)) == []


def test_one_thread_and_two_compute_the_same(span_of):
    span = span_of("llama")
    hidden = random(1, 24, span.hidden_size)
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
    span = load_span(checkpoint, Blocks(3, 5), dtype=dtype, quantize="int8")
    assert span.numeric_class == numeric_class_of(checkpoint.config, dtype, "int8")
    assert span.dtype is dtype
    assert span.weight_bytes / 2 == pytest.approx(block_bytes(checkpoint, dtype, "int8"), rel=0.03)
    plain = block_bytes(checkpoint, torch.bfloat16)
    assert block_bytes(checkpoint, torch.bfloat16, "int8") < 0.56 * plain  # a small model: scales weigh more


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16)])
def test_linear_layers_never_take_their_plain_memory(name, dtype, family_dir, monkeypatch):
    taken = []
    finish = Rounding.finish

    def look(self, model, device):
        blocks = [blocks_of(model)[index] for index in BLOCKS]
        linears = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
        taken.extend(linear.weight.untyped_storage().nbytes() for linear in linears)
        finish(self, model, device)

    monkeypatch.setattr(Rounding, "finish", look)
    span = load_span(open_checkpoint(family_dir(name)), BLOCKS, dtype=dtype, quantize="int8")
    assert taken == [dtype.itemsize] * len(taken) != []
    assert span.numeric_class.weights == "int8"


def test_no_more_than_two_tensors_wait_for_rounding(family_dir, monkeypatch):
    """One is rounded while the next is read."""
    real_read, real_of, ahead = reading._Stream.tensor, IntegerMatrix.of, [0]
    most = []

    def read(stream, facts, dtype):
        ahead[0] += len(facts.shape) == 2
        most.append(ahead[0])
        return real_read(stream, facts, dtype)

    def slowly(weight):
        time.sleep(0.02)
        rounded = real_of(weight)
        ahead[0] -= 1
        return rounded

    monkeypatch.setattr(reading._Stream, "tensor", read)
    monkeypatch.setattr(IntegerMatrix, "of", staticmethod(slowly))
    span = load_span(open_checkpoint(family_dir("llama")), BLOCKS, quantize="int8")
    assert integers_of(span.model) == "int8"
    assert max(most) == 2


def test_an_error_of_rounding_ends_the_loading(family_dir, monkeypatch):
    def fail(_weight):
        raise MemoryError("no room for it")

    monkeypatch.setattr(IntegerMatrix, "of", staticmethod(fail))
    with pytest.raises(MemoryError, match="no room for it"):
        load_span(open_checkpoint(family_dir("llama")), BLOCKS, quantize="int8")


def test_no_copy_of_a_weight_stays(span_of):
    for name in ("llama", "mixtral"):
        span = span_of(name)
        left = [weight for weight in span.model.parameters() if weight.dim() > 1 and not weight.isnan().all()]
        assert sum(weight.numel() for weight in left) < 0.02 * span.weight_bytes  # routers
        for weight in span.model.parameters():
            if weight.isnan().all():
                assert weight.untyped_storage().nbytes() == weight.element_size()


@pytest.mark.parametrize(("name", "why"), [("gpt_oss", "int8 is for linear layers"), ("gpt2", "and experts")])
def test_families_whose_weights_are_elsewhere_are_refused(name, why, family_dir):
    with pytest.raises(UnsupportedCheckpoint, match=why):
        load_span(open_checkpoint(family_dir(name)), Blocks(0, 2), quantize="int8")


def test_a_block_that_goes_around_its_layers_is_refused(family_dir, monkeypatch):
    from transformers.models.llama import modeling_llama

    def around(self, hidden):
        return self.down_proj(nn.functional.linear(hidden, self.up_proj.weight))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", around)
    with pytest.raises(UnsupportedCheckpoint, match="reads weights that int8 has taken"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2), quantize="int8")


@pytest.mark.parametrize(("name", "weights"), [("llama", "int8"), ("mixtral", "int8"), ("gpt2", None)])
def test_auto_is_int8_where_the_family_can_have_it(name, weights, family_dir):
    checkpoint = open_checkpoint(family_dir(name))
    chosen = quantisation_for("auto", checkpoint, torch.device("cpu"))
    assert chosen.weights == weights
    assert weights or "int8 is for linear layers" in chosen.why


def test_auto_leaves_the_numbers_of_a_checkpoint_that_is_quantised(family_dir):
    checkpoint = open_checkpoint(family_dir("llama"))
    checkpoint.config.quantization_config = {"quant_method": "fp8"}
    chosen = quantisation_for("auto", checkpoint, torch.device("cpu"))
    assert chosen.weights is None
    assert "quantised already" in chosen.why


def test_auto_is_plain_where_there_are_no_kernels(family_dir, monkeypatch):
    checkpoint = open_checkpoint(family_dir("llama"))
    cpu = torch.device("cpu")
    monkeypatch.setattr(quantising, "is_supported", lambda: False)
    assert quantisation_for("auto", checkpoint, cpu).weights is None
    assert quantisation_for("none", checkpoint, cpu).weights is None
    with pytest.raises(BadConfiguration, match="cpu has no kernels"):
        quantisation_for("int8", checkpoint, cpu)


def test_gates_stay_as_they_are():
    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    assert rounded_of(block) == [block[0]]


def test_fp8_is_announced_as_what_it_becomes(tmp_path):
    config = AutoConfig.for_model("llama", **BASE | {"hidden_size": 128, "intermediate_size": 256}, dtype="bfloat16")
    plain = AutoModelForCausalLM.from_config(config).bfloat16()
    tensors = dict(plain.state_dict())
    for name in [name for name, tensor in tensors.items() if "layers" in name and tensor.dim() == 2]:
        weight = tensors[name].float()
        squares = weight.view(-(-weight.shape[0] // 128), -1, weight.shape[1] // 128, 128)
        scales = squares.abs().amax((1, 3)) / 448
        tensors[name] = (squares / scales[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    plain.save_pretrained(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    changed(tmp_path / "config.json", quantization_config=how)
    checkpoint = open_checkpoint(tmp_path)
    span = load_span(checkpoint, Blocks(0, 3))
    assert span.numeric_class == numeric_class_of(checkpoint.config, torch.bfloat16) == NumericClass("bfloat16")
    assert span.weight_bytes / 3 == pytest.approx(block_bytes(checkpoint), rel=0.03)
    assert str(load_span(checkpoint, Blocks(0, 3), quantize="int8").numeric_class) == "bfloat16+int8"


def test_files_tell_the_size_of_blocks_that_are_quantised():
    checkpoint = open_checkpoint(DEMO_CHECKPOINT)
    plain = block_bytes(checkpoint, "auto")
    config = copy.deepcopy(checkpoint.config)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantised = dataclasses.replace(checkpoint, config=config)
    assert block_bytes(quantised, "auto") == pytest.approx(plain, rel=0.03)  # these files are as large as plain ones
    assert str(numeric_class_of(config, torch.bfloat16)) == "bfloat16+bitsandbytes-4bit"


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
