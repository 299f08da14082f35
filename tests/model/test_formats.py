"""Checkpoints in the formats of others: spans and clients compute with their numbers, or refuse them by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.client import AutoDistributedModel
from swarm.errors import UnsupportedCheckpoint
from swarm.identity import Identity
from swarm.model.checkpoint import open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.formats import formats
from swarm.model.loading import block_bytes, expected_dtype, load_ends, load_span
from tests.support.often import rest_is_long
from tests.support.quantised import cases, spread, values_of_mxfp4, write

NOWHERE = ["/ip4/127.0.0.1/tcp/1/p2p/" + Identity.generate().peer_id]
BLOCKS = Blocks(1, 3)
OFTEN = ("gptq, asymmetric, in another order", "compressed-tensors W4A16", "bitsandbytes nf4, nested")
HAND_MADE = [case for case in cases() if case != "mxfp4"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def get(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("format")
            write(made[case], case)
        return made[case]

    return get


def output(span):
    hidden = torch.randn(1, 12, span.hidden_size, generator=torch.Generator().manual_seed(0)).to(span.dtype)
    with torch.inference_mode():
        return span.forward(hidden, cache=span.new_cache())


def logits(ends):
    hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0)).to(ends.dtype)
    return ends.get_output_embeddings()(ends.get_decoder().norm(hidden))


@pytest.mark.parametrize("dtype", rest_is_long([torch.float32, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("case", rest_is_long(HAND_MADE, OFTEN))
def test_a_span_has_the_numbers_of_the_format(case, dtype, folder_of):
    plain, quantised = (open_checkpoint(folder_of(case) / which) for which in ("plain", "quantised"))
    expected, got = (load_span(each, BLOCKS, dtype=dtype) for each in (plain, quantised))
    weights = expected.model.state_dict(), got.model.state_dict()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert torch.equal(output(got), output(expected))


@pytest.mark.parametrize("case", rest_is_long(cases(), OFTEN))
def test_class_and_size_are_known_before_anything_is_loaded(case, folder_of):
    checkpoint = open_checkpoint(folder_of(case) / "quantised")
    span = load_span(checkpoint, BLOCKS)
    before = numeric_class_of(checkpoint.config, expected_dtype(checkpoint))
    assert span.numeric_class == before == NumericClass("float32")
    assert span.weight_bytes / len(BLOCKS) == pytest.approx(block_bytes(checkpoint), rel=0.03)


@pytest.mark.parametrize("case", rest_is_long(HAND_MADE, OFTEN[:1]))
def test_a_client_loads_its_part(case, folder_of):
    plain, quantised = (load_ends(open_checkpoint(folder_of(case) / which)) for which in ("plain", "quantised"))
    assert torch.equal(logits(plain), logits(quantised))


@pytest.mark.long
def test_experts_in_mxfp4_are_unpacked(folder_of):
    checkpoint = open_checkpoint(folder_of("mxfp4") / "quantised")
    files = [load_file(path) for path in (folder_of("mxfp4") / "quantised").glob("*.safetensors")]
    tensors = {name: tensor for each in files for name, tensor in each.items()}
    state = load_span(checkpoint, BLOCKS, dtype=torch.float32).model.state_dict()
    found = [name for name in state if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")]
    assert len(found) == 2 * len(BLOCKS)
    for name in found:
        expected = values_of_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert torch.equal(state[name], expected)
    assert load_ends(checkpoint).get_output_embeddings().weight.dtype == torch.float32


@pytest.mark.long
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("case", ["gptq", "compressed-tensors W4A16", "fp8"])
def test_unpacked_weights_may_be_rounded_as_plain_ones(case, quantize, folder_of):
    plain, quantised = (open_checkpoint(folder_of(case) / which) for which in ("plain", "quantised"))
    expected, got = (load_span(each, BLOCKS, quantize=quantize) for each in (plain, quantised))
    assert torch.equal(output(got), output(expected))
    assert str(got.numeric_class) == f"float32+{quantize}"


@pytest.mark.long
@pytest.mark.parametrize("case", ["gptq", "bitsandbytes nf4", "fp8"])
def test_one_file_is_read_as_several(case, tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, case, files=1))
    assert checkpoint.index is None
    expected = load_span(open_checkpoint(tmp_path / "plain"), BLOCKS)
    assert torch.equal(output(load_span(checkpoint, BLOCKS)), output(expected))


# --- refusals


REFUSED = {
    ("gptq", "3 bits, or Marlin's order"): [{"bits": 3}, {"bits": 4, "is_marlin_format": True}],
    ("awq", "versions `gemv` and others"): [{"bits": 4, "group_size": 32, "version": "gemv"}],
    ("compressed-tensors", "NVFP4, sparse or rotated weights"): [
        cases()["compressed-tensors W4A16"][0] | {"format": "nvfp4-pack-quantized"},
        cases()["compressed-tensors W4A16"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        cases()["compressed-tensors W4A16"][0] | {"transform_config": {"config_groups": {"u": {}}}},
    ],
    ("torchao", "all"): [{"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}],
}
OTHERS = ("hqq", "quanto", "eetq", "aqlm", "vptq", "bitnet", "auto-round", "fbgemm_fp8", "nvfp4", "quark", "spqr")


def changed(folder, tmp_path, **values):
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return tmp_path / "copy"


def by_client_and_server(folder):
    """What a client and a server say of a checkpoint, which has to be the same."""
    with pytest.raises(UnsupportedCheckpoint) as server:
        load_span(open_checkpoint(folder), BLOCKS)
    with pytest.raises(UnsupportedCheckpoint) as client:
        AutoDistributedModel.from_pretrained(folder, initial_peers=NOWHERE)
    assert str(client.value) == str(server.value)
    return str(server.value)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        *((method, config) for (method, _), configs in REFUSED.items() for config in configs),
        *((method, {"bits": 4}) for method in OTHERS),
        ("gptq", {"bits": "four"}),
        ("gptq", {}),
        ("awq", {"bits": 4, "group_size": None}),
        ("compressed-tensors", {"format": "pack-quantized", "config_groups": {}}),
        ("compressed-tensors", {"format": 7, "config_groups": {"a": {"weights": None}}}),
        ("fp8", {"weight_block_size": [128]}),
    ],
)
def test_a_format_that_spans_do_not_run_is_refused_by_name(method, config, folder_of, tmp_path):
    folder = changed(folder_of("gptq") / "plain", tmp_path, quantization_config=config | {"quant_method": method})
    said = by_client_and_server(folder)
    assert f"quantised by {method}" in said
    assert "take the plain checkpoint" in said


@pytest.mark.parametrize("has_config", [True, False])
def test_gguf_is_refused_by_name(has_config, folder_of, tmp_path):
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    if has_config:
        shutil.copy(folder_of("gptq") / "plain" / "config.json", tmp_path)
    for path in (tmp_path, tmp_path / "model.Q4_K_M.gguf"):
        said = by_client_and_server(path)
        assert "GGUF" in said
        assert "docs/quantisation.md" in said


def test_every_format_of_the_table_is_tested():
    read = {row.method for row in formats() if row.runs == "yes"}
    assert {config["quant_method"] for config, _ in cases().values()} == read
    assert {(row.method, row.tensors) for row in formats() if row.runs != "yes"} == REFUSED.keys() | {("gguf", "all")}


# --- files that do not fit


def broken(case, change, tmp_path):
    """A checkpoint of one file after its tensors were changed."""
    folder = write(tmp_path, case, files=1)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    spread(folder, tensors, 1)
    return folder


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "part", "made"),
    [
        ("gptq", "scales", lambda _: None),
        ("gptq", "qzeros", lambda tensor: tensor[:, :-1]),
        ("gptq", "qweight", lambda tensor: tensor[:-1]),
        ("gptq", "qweight", lambda tensor: tensor.float()),
        ("gptq", "qweight", lambda tensor: tensor[:0]),
        ("gptq", "g_idx", lambda tensor: tensor + 7),
        ("gptq", "g_idx", lambda tensor: -1 - tensor),
        ("gptq", "g_idx", lambda tensor: tensor[:0]),
        ("awq", "qweight", lambda tensor: tensor.flatten()),
        ("awq", "scales", lambda tensor: tensor[:1, :1]),
        ("awq", "qzeros", lambda _: None),
        ("compressed-tensors W4A16", "weight_shape", lambda tensor: tensor * 1000),
        ("compressed-tensors W4A16", "weight_shape", lambda tensor: tensor[:1]),
        ("compressed-tensors W4A16", "weight_shape", lambda _: None),
        ("compressed-tensors W4A16", "weight_scale", lambda tensor: tensor[:5]),
        ("compressed-tensors W8A8", "weight_scale", lambda _: None),
        ("compressed-tensors W8A8", "weight", lambda _: None),
        ("compressed-tensors W8A8", "weight_scale", lambda tensor: tensor[:7]),
        ("fp8", "weight_scale_inv", lambda tensor: tensor[:1]),
        ("fp8", "weight_scale_inv", lambda _: None),
        ("bitsandbytes nf4", "weight.absmax", lambda tensor: tensor[:-1]),
        ("bitsandbytes nf4", "weight.quant_map", lambda tensor: tensor[:3]),
        ("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", lambda tensor: tensor[:9]),
        ("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", lambda _: None),
        ("bitsandbytes nf4", "weight", lambda tensor: tensor[:-9]),
        ("bitsandbytes nf4, nested", "weight.nested_absmax", lambda tensor: tensor[:1]),
        ("bitsandbytes int8", "SCB", lambda tensor: tensor[:3]),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(case, part, made, tmp_path):
    def change(tensors):
        new = made(tensors.pop(f"{LAYER}.{part}"))
        if new is not None:
            tensors[f"{LAYER}.{part}"] = new.contiguous()

    with pytest.raises(UnsupportedCheckpoint, match=r"mlp\.up_proj\.weight"):
        load_span(open_checkpoint(broken(case, change, tmp_path)), BLOCKS)


@pytest.mark.long
def test_a_part_that_the_index_does_not_list_changes_no_number(tmp_path):
    path = write(tmp_path, "gptq, asymmetric, in another order") / "model.safetensors.index.json"
    expected, index = output(load_span(open_checkpoint(tmp_path / "plain"), BLOCKS)), json.loads(path.read_text())
    refused = 0
    for number, part in enumerate(("qweight", "qzeros", "scales", "g_idx")):
        places = {name: place for name, place in index["weight_map"].items() if name != f"{LAYER}.{part}"}
        path.write_text(json.dumps(index | {"weight_map": places}) + " " * number)  # of another size: no damage
        try:
            assert torch.equal(output(load_span(open_checkpoint(path.parent), BLOCKS)), expected)
        except UnsupportedCheckpoint:
            refused += 1
    assert refused > 0


@pytest.mark.long
def test_a_layer_of_another_size_is_refused(tmp_path):
    folder = write(tmp_path, "gptq", files=1)
    tensors = load_file(folder / "model.safetensors")
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER.replace('up_proj', 'down_proj')}.{part}"].clone()
    save_file(tensors, folder / "model.safetensors")
    for quantize in (None, "int4"):
        with pytest.raises(UnsupportedCheckpoint, match=r"it is \[64, 96\], and the model's is \[96, 64\]"):
            load_span(open_checkpoint(folder), BLOCKS, quantize=quantize)
