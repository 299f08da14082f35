"""A draft head's files: what does not fit the model or itself is refused, before its weights are read."""

import json
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.errors import BadConfiguration
from swarm.model.draftfiles import is_draft, load_draft_head, save_draft
from swarm.model.drafthead import DraftHead, HeadShape
from swarm.model.manifest import sha256_of

ROOT = "ab" * 32
SHAPE = HeadShape(hidden_size=64, embedding_size=64, width=48, mlp=80, layers=2, heads=3, head_size=16, window=24)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(2)
    save_draft(DraftHead(SHAPE), tmp_path / "draft", root=ROOT, model="org/tiny")
    return tmp_path / "draft"


def load(folder, root=ROOT, sizes=(64, 64)):
    return load_draft_head(folder, root=root, sizes=sizes, dtype=torch.float32, device=torch.device("cpu"))


def change(folder, **changes):
    path = folder / "draft.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        (config["shape"] if name in config["shape"] else config)[name] = value
    path.write_text(json.dumps(config))


def seal(folder):
    """Write the digest of whatever the weights are now."""
    change(folder, sha256=sha256_of(folder / "draft.safetensors"))


def test_a_head_is_loaded_as_it_was_saved(folder):
    torch.manual_seed(2)
    head = DraftHead(SHAPE)
    loaded = load(folder)
    assert is_draft(folder)
    assert not is_draft(folder.parent)
    assert all(
        torch.equal(tensor, head.state_dict()[name].bfloat16().float()) for name, tensor in loaded.state_dict().items()
    )
    assert not any(weight.requires_grad for weight in loaded.parameters())


def test_the_same_head_makes_the_same_files(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    torch.manual_seed(2)
    save_draft(DraftHead(SHAPE), folder, root=ROOT, model="org/tiny")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_head_of_another_model_is_refused(folder):
    with pytest.raises(BadConfiguration, match=r"of another model, 'org/tiny' with root abab.*swarm-draft"):
        load(folder, root="cd" * 32)


def test_a_head_of_other_sizes_is_refused(folder):
    with pytest.raises(BadConfiguration, match="states have 64 numbers, and the model's 32"):
        load(folder, sizes=(32, 64))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "malformed"),
        ("[]", "malformed"),
        ('{"format": 1}', "malformed at root"),
        (" " * 70_000, "larger than 65536 bytes"),
        ("[" * 60_000, "malformed"),
    ],
)
def test_a_malformed_config_is_refused(folder, text, why):
    (folder / "draft.json").write_text(text)
    with pytest.raises(BadConfiguration, match=why):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 2}, "malformed at format"),
        ({"sha256": "0"}, "malformed at sha256"),
        ({"layers": 0}, "malformed at shape.layers"),
        ({"width": 1 << 20}, "malformed at shape.width"),
        ({"head_size": 15}, "malformed at shape.head_size"),
        ({"more": 1}, "malformed at more"),
        ({"sha256": "0" * 64}, "damaged"),
    ],
)
def test_a_config_that_says_nonsense_is_refused(folder, changes, why):
    change(folder, **changes)
    with pytest.raises(BadConfiguration, match=why):
        load(folder)


def test_large_sizes_in_a_small_file_allocate_nothing(folder):
    change(folder, width=1 << 16, mlp=1 << 16, layers=16)
    with (
        patch("swarm.model.draftfiles.read_tensors", side_effect=AssertionError("read")),
        pytest.raises(BadConfiguration, match="and their sizes make"),
    ):
        load(folder)


@pytest.mark.parametrize("cut", [0, 7, 200, -1])
def test_a_file_that_was_cut_off_is_refused(folder, cut):
    path = folder / "draft.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    seal(folder)
    with pytest.raises(BadConfiguration, match=r"bytes, and their sizes make|malformed"):
        load(folder)


def test_damaged_weights_are_refused(folder):
    path = folder / "draft.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(data)
    with pytest.raises(BadConfiguration, match="damaged"):
        load(folder)


def test_missing_weights_are_named(folder):
    (folder / "draft.safetensors").unlink()
    with pytest.raises(BadConfiguration, match="cannot be read: No such file"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("out.weight", lambda weight: weight.T.contiguous(), "do not fit its sizes"),
        ("norm.weight", lambda weight: weight.view(torch.float16), "not all finite numbers in bfloat16"),
        ("norm.weight", lambda weight: weight * float("nan"), "not all finite numbers"),
    ],
)
def test_weights_of_another_kind_are_refused(folder, name, make, why):
    path = folder / "draft.safetensors"
    weights = load_file(path)
    weights[name] = make(weights[name])
    save_file(weights, path)
    seal(folder)
    with pytest.raises(BadConfiguration, match=why):
        load(folder)


def test_weights_of_another_name_are_refused(folder):
    path = folder / "draft.safetensors"
    weights = load_file(path)
    weights["layers.7.up.weight"] = weights.pop("layers.0.up.weight")
    save_file(weights, path)
    seal(folder)
    with pytest.raises(BadConfiguration, match="do not fit its sizes"):
        load(folder)
