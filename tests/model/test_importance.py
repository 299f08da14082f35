"""int4 that regards how large inputs are: how that is measured and kept, and what becomes of weights and classes."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn
from transformers import AutoModelForCausalLM

from swarm.activations import NumericClass, Tier, tier_of
from swarm.blocks import Blocks
from swarm.errors import BadConfiguration, ChecksumMismatch, UnsupportedCheckpoint
from swarm.model import fourbits
from swarm.model.checkpoint import open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.fourbits import FourBitLimits, FourBitMatrix, packed, shares_of, tables
from swarm.model.importance import IMPORTANCE_NAME, write_importance
from swarm.model.integer import matrices_in
from swarm.model.loading import block_bytes, load_span
from swarm.model.quantising import quantisation_for
from swarm.model.weighing import measured
from swarm.model.weightcache import WeightCache, WeightCacheLimits
from tests.support.hub import Hub
from tests.support.often import rest_is_long
from tests.support.steps import cuts_that_show, random, through
from tests.support.swarms import DEMO_CHECKPOINT, environment

CPU = torch.device("cpu")
WINDOWS = torch.arange(3 * 24, dtype=torch.int32).view(3, 24) % 61
OLD_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
FAMILIES = ("llama", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v3", "gpt_neox", "granite", "opt", "cohere2", "glm4")


def squares_of(n_inputs, seed=0):
    """Mean squares as real layers have them: a few are many times as large as the others, and some are nothing."""
    found = (3 * random(n_inputs, seed=seed)).exp()
    found[n_inputs // 3] = 0.0
    return found


# --- the rounding


@pytest.mark.parametrize("n_inputs", [16, 100])
def test_each_half_block_has_the_table_of_least_weighed_error(n_inputs):
    weight, squares = random(5, n_inputs, seed=4), squares_of(n_inputs)
    codes, numbers, scales = packed(weight, squares=squares)
    assert torch.equal(scales, packed(weight)[2])
    quarters = nn.functional.pad((weight / scales[:, None]).mul_(4).round_(), (0, -n_inputs % 32)).view(5, -1, 16)
    halves = nn.functional.pad(squares.double(), (0, -n_inputs % 32)).view(-1, 16)
    tops = tables().short().abs().amax(-1).view(32, 8).amax(-1) * 4
    for row in range(5):
        for place, (mine, counts) in enumerate(zip(quarters[row], halves, strict=True)):
            start = min(max(int((tops > mine.abs().max()).sum()) - 7, 0), 24)
            errors = (
                (mine[:, None, None] - 4 * tables()[8 * start : 8 * start + 64].float())
                .square()
                .amin(-1)
                .clamp(max=8191)
            )
            shares = (counts / counts.max().clamp(min=1e-30) * 65535).round().clamp(min=1)
            shares[max(0, n_inputs - 16 * place) :] = 0
            sums = (errors.double() * 8 * shares[:, None] / 65536).floor().sum(0)
            assert int(numbers[row, place]) == 8 * start + int((sums == sums.min()).nonzero()[0])
    steps = FourBitMatrix(n_inputs, codes, numbers, scales).steps(0, 5)
    nearest = (quarters[..., None] - 4 * tables().float()[numbers.long()][:, :, None]).square().amin(-1)
    assert torch.equal((quarters.flatten(1)[:, :n_inputs] - 4 * steps).square(), nearest.flatten(1)[:, :n_inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_inputs", [33, 576])
def test_compiled_code_rounds_to_the_same_bits(n_inputs, dtype, monkeypatch):
    weight, squares = random(70, n_inputs).to(dtype), squares_of(n_inputs)
    weight[3] = 0.0
    weight[4, 5] = torch.nan
    compiled = packed(weight, squares=squares)
    monkeypatch.setattr(fourbits, "kernels", lambda _weights: None)
    for got, expected in zip(compiled, packed(weight, FourBitLimits(rounded_max=700), squares), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(compiled[1], packed(weight)[1])


def test_weights_of_large_inputs_lose_less():
    weight, squares = random(64, 1024), squares_of(1024)
    even, weighed = (FourBitMatrix.of(weight, each) for each in (None, squares))
    losses = [
        float(((each.steps(0, 64) * each.parts[2][:, None] - weight).square() * squares).sum())
        for each in (even, weighed)
    ]
    assert losses[1] < 0.4 * losses[0]
    assert weighed.n_bytes == even.n_bytes


def test_inputs_of_zeros_count_alike_and_what_fills_up_a_block_does_not():
    assert shares_of(torch.zeros(20)).tolist() == [65535] * 20 + [0] * 12
    assert shares_of(torch.tensor([1e-30, 1e30] * 16)).tolist() == [1, 65535] * 16


# --- measuring


@pytest.mark.parametrize("name", rest_is_long(FAMILIES, ("llama", "gemma3_text", "qwen3_moe")))
def test_it_is_what_the_layers_of_the_whole_model_get(name, family_dir, monkeypatch):
    checkpoint = open_checkpoint(family_dir(name))
    monkeypatch.setattr("swarm.model.weighing.block_bytes", lambda *_: 1 << 60)  # one block at a time
    found = measured(checkpoint, WINDOWS)
    whole = AutoModelForCausalLM.from_pretrained(family_dir(name), dtype=torch.float32).eval()
    sums: dict[str, torch.Tensor] = {}
    for path, module in whole.named_modules():
        if f"{path}.weight" in found:
            module.register_forward_pre_hook(
                lambda _, inputs, path=path: sums.__setitem__(
                    f"{path}.weight", sums.get(f"{path}.weight", 0) + inputs[0].double().square().flatten(0, -2).sum(0)
                )
            )
    with torch.inference_mode():
        for window in WINDOWS:
            whole(input_ids=window[None].long())
    assert found.keys() == sums.keys()
    assert len(found) >= 2 * checkpoint.n_blocks
    for path, squares in found.items():
        assert squares.dtype is torch.float32
        torch.testing.assert_close(squares.double(), sums[path] / WINDOWS.numel(), rtol=1e-3, atol=1e-9)


def test_a_family_that_int4_is_not_for_is_refused_before_anything_is_read(family_dir):
    with pytest.raises(UnsupportedCheckpoint, match="int4 is for linear layers and experts"):
        measured(open_checkpoint(family_dir("gpt2")), WINDOWS)


# --- the file, and the class


@pytest.fixture
def weighed(family_dir, tmp_path):
    """A checkpoint with a file."""
    folder = tmp_path / "model"
    shutil.copytree(family_dir("llama"), folder)
    checkpoint = open_checkpoint(folder)
    write_importance(str(folder), folder / IMPORTANCE_NAME, checkpoint.root, measured(checkpoint, WINDOWS))
    return folder


def test_servers_of_int4_round_by_it_and_say_so(weighed, family_dir):
    checkpoint = open_checkpoint(weighed)
    assert checkpoint.root == open_checkpoint(family_dir("llama")).root
    chosen = quantisation_for("int4", checkpoint, CPU)
    assert chosen.weights == checkpoint.importance().named("int4")
    assert IMPORTANCE_NAME in chosen.why
    assert quantisation_for("int8", checkpoint, CPU).weights == "int8"
    announced = numeric_class_of(checkpoint.config, torch.bfloat16, chosen.weights)
    span = load_span(checkpoint, Blocks(1, 3), dtype=torch.bfloat16, quantize=chosen.weights)
    assert span.numeric_class == announced == NumericClass.parse(str(announced))
    assert (announced.integers, tier_of(str(announced))) == ("int4", Tier.FOUR_BITS)
    assert len(str(announced)) <= 32  # of a record
    assert block_bytes(checkpoint, torch.bfloat16, chosen.weights) == block_bytes(checkpoint, torch.bfloat16, "int4")
    even = load_span(checkpoint, Blocks(1, 3), dtype=torch.bfloat16, quantize="int4")
    assert str(even.numeric_class) == "bfloat16+int4"
    squares, plain = checkpoint.importance().squares, matrices_in(even.model)
    for name, matrix in matrices_in(span.model).items():
        same = all(map(torch.equal, matrix.parts, plain[name].parts))
        assert same is not (name in squares)


def test_steps_have_the_same_bits_in_any_pieces(weighed):
    checkpoint = open_checkpoint(weighed)
    span = load_span(checkpoint, Blocks(1, 5), quantize=checkpoint.importance().named("int4"))
    assert cuts_that_show(span) == []


@pytest.mark.slow("another process loads a span")
def test_a_processor_with_older_kernels_rounds_to_the_same_bits(weighed, tmp_path):
    checkpoint = open_checkpoint(weighed)
    weights = checkpoint.importance().named("int4")
    code = (
        "import sys\nfrom safetensors.torch import save_file\nfrom swarm.blocks import Blocks\n"
        "from swarm.model.checkpoint import open_checkpoint\nfrom swarm.model.integer import matrices_in\n"
        "from swarm.model.loading import load_span\n"
        "span = load_span(open_checkpoint(sys.argv[1]), Blocks(0, 2), quantize=sys.argv[2])\n"
        "save_file({f'{name}.{i}': part.clone() for name, each in matrices_in(span.model).items()"
        " for i, part in enumerate(each.parts)}, sys.argv[3])\n"
    )
    out = tmp_path / "parts.safetensors"
    line = [sys.executable, "-c", code, str(weighed), weights, str(out)]
    subprocess.run(line, env={**os.environ, **OLD_KERNELS}, check=True, timeout=120)
    theirs = load_file(out)
    ours = matrices_in(load_span(checkpoint, Blocks(0, 2), quantize=weights).model)
    parts = {f"{name}.{i}": part for name, each in ours.items() for i, part in enumerate(each.parts)}
    assert theirs.keys() == parts.keys()
    assert all(torch.equal(part, theirs[name]) for name, part in parts.items())


def test_the_cache_holds_it_apart(weighed, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(weighed)
    weights = checkpoint.importance().named("int4")

    def load(quantize):
        cache = WeightCache(tmp_path / "cache", WeightCacheLimits(free_bytes_min=0))
        span = load_span(checkpoint, Blocks(1, 3), quantize=quantize, rounded=cache)
        cache.write()
        assert span.numeric_class.weights == quantize
        return through(span, random(1, 24, span.hidden_size).to(span.dtype))

    first = {quantize: load(quantize) for quantize in ("int4", weights)}
    assert not torch.equal(*first.values())
    folders = {path.parent.name for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert folders == {"float32+int4", f"float32+{weights}"}
    monkeypatch.delattr(FourBitMatrix, "of")  # all is there
    assert all(torch.equal(load(quantize), output) for quantize, output in first.items())


@pytest.mark.parametrize("other", ["int4-0123456789ab", "gone"])
def test_weights_by_another_file_are_refused(other, weighed):
    checkpoint = open_checkpoint(weighed)
    wanted = other
    if other == "gone":
        wanted = checkpoint.importance().named("int4")
        (weighed / IMPORTANCE_NAME).unlink()
    says = "it has no such file" if other == "gone" else "its own makes int4-[0-9a-f]{12}"
    with pytest.raises(UnsupportedCheckpoint, match=rf"{wanted} is of another {IMPORTANCE_NAME}: {says}"):
        load_span(checkpoint, Blocks(0, 2), quantize=wanted)


@pytest.mark.parametrize("weights", ["int8-0123456789ab", "own4-0123456789ab", "int40"])
def test_no_other_weights_are_rounded_by_it(weights, weighed):
    with pytest.raises(BadConfiguration, match="neither int8 nor int4"):
        load_span(open_checkpoint(weighed), Blocks(0, 2), quantize=weights)


def saved(squares, root=None):
    """A file's bytes. root: that it says it is of; None: it says nothing."""
    return save(squares, None if root is None else {"format": "swarm importance 1", "root": root})


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        (lambda root: saved({"a": torch.ones(3)}, root)[:-9], "the place of .* does not fit"),
        (lambda root: b"hello", "the file ends too early"),
        (lambda root: saved({"a": torch.ones(3)}, "0" * 64), "other words of itself"),
        (lambda root: saved({"a": torch.ones(3)}), "other words of itself"),
        (lambda root: saved({"a": torch.ones(2, 2)}, root), "no list of float32"),
        (lambda root: saved({"a": torch.ones(2).double()}, root), "no list of float32"),
        (lambda root: saved({"a": torch.tensor([1.0, -1.0])}, root), "no mean square"),
        (lambda root: saved({"a": torch.tensor([torch.nan])}, root), "no mean square"),
        (lambda root: saved({"a": torch.tensor([torch.inf])}, root), "no mean square"),
    ],
)
def test_a_file_that_is_none_is_refused_with_what_to_do(spoiled, why, weighed):
    checkpoint = open_checkpoint(weighed)
    (weighed / IMPORTANCE_NAME).write_bytes(spoiled(checkpoint.root))
    with pytest.raises(UnsupportedCheckpoint, match=rf"{why}.*make it again with swarm-importance, or delete it"):
        quantisation_for("int4", checkpoint, CPU)


def test_a_file_of_other_layers_is_refused(weighed):
    checkpoint = open_checkpoint(weighed)
    name = next(name for name in checkpoint.importance().squares if ".1." in name)
    found = write_importance(str(weighed), weighed / IMPORTANCE_NAME, checkpoint.root, {name: torch.ones(3)})
    with pytest.raises(UnsupportedCheckpoint, match=rf"has 3 inputs of {name}, which has \d+"):
        load_span(checkpoint, Blocks(0, 2), quantize=found.named("int4"))


def test_a_repository_of_the_hub_has_it_beside_its_weights(weighed, tmp_path):
    expected = open_checkpoint(weighed).importance()
    with Hub() as hub:
        hub.add("org/llama", weighed, lfs=(*(path.name for path in weighed.glob("*.safetensors")),))
        checkpoint = open_checkpoint("org/llama", cache_dir=tmp_path / "cache", endpoint=hub.url)
        quantisation_for("int8", checkpoint, CPU)
        assert IMPORTANCE_NAME not in hub.files_fetched("org/llama")
        hub.flip_byte("org/llama", IMPORTANCE_NAME, -5)
        with pytest.raises(ChecksumMismatch, match=IMPORTANCE_NAME):
            quantisation_for("int4", checkpoint, CPU)
        hub.heal()
        weights = quantisation_for("int4", checkpoint, CPU).weights
        assert weights == expected.named("int4")
        assert load_span(checkpoint, Blocks(0, 1), quantize=weights).numeric_class.weights == weights


# --- the command


@pytest.mark.slow("two processes, and one reads texts")
def test_the_command_writes_the_file_beside_the_weights_once(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO_CHECKPOINT, folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.py").write_text("def add(a, b):\n    return a + b\n\n\n" * 40)
    (texts / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    line = [sys.executable, "-m", "swarm.client.importance", str(folder), "--texts", str(texts)]
    line += ["--windows", "3", "--positions", "32"]
    said = subprocess.run(
        line, capture_output=True, text=True, check=True, timeout=120, env={**os.environ, **environment(tmp_path)}
    ).stdout
    checkpoint = open_checkpoint(folder)
    importance = checkpoint.importance()
    assert f"of {len(importance.squares)} layers, in 96 tokens" in said
    assert f"rounded by it are {importance.named('int4')}" in said
    span = load_span(checkpoint, Blocks(0, checkpoint.n_blocks), quantize=importance.named("int4"))
    assert importance.squares.keys() == {n for n, m in matrices_in(span.model).items() if isinstance(m, FourBitMatrix)}
    again = subprocess.run(
        line, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment(tmp_path)}
    )
    assert again.returncode == 2
    assert "is there already, and servers round by it; delete it first" in again.stderr
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
