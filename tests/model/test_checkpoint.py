"""Checkpoints on disk: opened without their weights, hashed once, verified before use, refused with a reason."""

import errno
import hashlib
import json
import os
import pickle  # noqa: TID251 - to see one refused
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from swarm import config as settings
from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.errors import (
    BadBlocks,
    CheckpointError,
    ChecksumMismatch,
    ModelNotFound,
    RootMismatch,
    UnsupportedArchitecture,
    UnsupportedCheckpoint,
    UsageError,
)
from swarm.model import manifest
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import expected_dtype, load_ends, load_span
from swarm.model.reading import MalformedWeights, read_tensors
from tests.model.rings import Pair, difference, save_family, tokens
from tests.support.swarms import DEMO_CHECKPOINT

FamilyDir = Callable[[str], Path]


@pytest.fixture
def llama(family_dir: FamilyDir, tmp_path: Path) -> Path:
    """A llama checkpoint of several files that a test may damage."""
    return Path(shutil.copytree(family_dir("llama"), tmp_path / "llama"))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def flip_a_byte(path: Path, *, keep_time: bool = False) -> None:
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def swap_config(directory: Path) -> None:
    """Give the config a value of the same length that computes something else; size and time stay."""
    path = directory / "config.json"
    times, config = path.stat(), path.read_text()
    swapped = config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 9e-01')
    assert swapped != config
    path.write_text(swapped)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rewrite_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_root_depends_on_contents_and_not_on_the_place(llama: Path, family_dir: FamilyDir) -> None:
    here, there = open_checkpoint(llama), open_checkpoint(family_dir("llama"))
    assert here.root == there.root
    assert here.n_blocks == 6
    assert set(here.manifest.files) == {"config.json", "model.safetensors.index.json", *(p.name for p in shards(llama))}
    assert open_checkpoint(family_dir("qwen2")).root != here.root


def test_the_root_is_a_stated_encoding() -> None:
    files = {"model.safetensors": "b" * 64, "config.json": "a" * 64}
    encoded = b"swarm manifest 1\nconfig.json\0" + b"a" * 64 + b"\nmodel.safetensors\0" + b"b" * 64 + b"\n"
    assert manifest.Manifest(files=files).root == manifest.hashlib.sha256(encoded).hexdigest()


def test_a_flipped_byte_refuses_to_start(llama: Path) -> None:
    open_checkpoint(llama)
    flip_a_byte(shards(llama)[1])
    with pytest.raises(ChecksumMismatch, match=r"model-00002-of-.*damaged or was changed"):
        open_checkpoint(llama)


def test_a_byte_flipped_after_opening_is_noticed_when_the_span_is_loaded(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    needed = {checkpoint.index.weight_map[n] for n in checkpoint.index.weight_map if "layers.2." in n}
    flip_a_byte(llama / min(needed), keep_time=True)
    with pytest.raises(ChecksumMismatch):
        load_span(open_checkpoint(llama), Blocks(2, 3))  # size and time are as they were: the remembered hash is used
    with pytest.raises(ChecksumMismatch):
        load_span(checkpoint, Blocks(2, 3))


def test_a_config_swapped_behind_its_remembered_hash_is_refused(llama: Path) -> None:
    root = open_checkpoint(llama).root
    swap_config(llama)
    with pytest.raises(ChecksumMismatch, match=r"config\.json"):
        open_checkpoint(llama, root=root)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_carried_manifest_does_not_vouch_for_swapped_files(llama: Path, name: str) -> None:
    checkpoint = open_checkpoint(llama)
    checkpoint.manifest.save(llama)
    (llama / name).write_bytes((llama / name).read_bytes() + b" ")
    with pytest.raises(ChecksumMismatch, match=name):
        open_checkpoint(llama, root=checkpoint.root)


def test_weights_swapped_as_soon_as_they_are_verified_are_not_loaded(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(llama)
    hidden = torch.randn(1, 4, 64)
    expected = load_span(checkpoint, Blocks(2, 4)).forward(hidden, cache=None)
    digests = set(checkpoint.manifest.files.values())
    real, swapped = hashlib.sha256, list[str]()

    class Swapping:
        """SHA-256 of a disk that changes its files once it has been asked for the digest of one of them."""

        def __init__(self, data: bytes = b"") -> None:
            self.inner = real(data)
            self.update = self.inner.update

        def digest(self) -> bytes:
            return self.inner.digest()

        def hexdigest(self) -> str:
            found = self.inner.hexdigest()
            for path in shards(llama):
                if found == checkpoint.manifest.files[path.name] in digests:
                    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
                    save_file(tensors, path, metadata={"format": "pt"})
                    swapped.append(path.name)
            return found

    monkeypatch.setattr(hashlib, "sha256", Swapping)
    span = load_span(checkpoint, Blocks(2, 4))
    assert swapped
    assert difference(span.forward(hidden, cache=None), expected) == 0.0


def test_a_file_changed_on_purpose_gives_another_root(llama: Path) -> None:
    before = open_checkpoint(llama).root
    flip_a_byte(shards(llama)[1])
    assert open_checkpoint(llama, accept_changes=True).root != before
    assert open_checkpoint(llama).root != before


def test_another_root_than_expected_is_refused(llama: Path) -> None:
    root = open_checkpoint(llama).root
    assert open_checkpoint(llama, root=root).root == root
    with pytest.raises(RootMismatch, match="the files differ"):
        open_checkpoint(llama, root="0" * 64)


def test_files_are_hashed_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = manifest.sha256_of
    monkeypatch.setattr(manifest, "sha256_of", lambda path: hashed.append(path.name) or real(path))
    first = open_checkpoint(llama)
    assert sorted(hashed) == sorted(first.manifest.files)
    hashed.clear()
    open_checkpoint(llama)
    assert hashed == []
    os.utime(shards(llama)[0], (1, 1))
    assert open_checkpoint(llama).root == first.root
    assert hashed == [shards(llama)[0].name]


def test_a_cache_that_cannot_be_written_only_means_hashing_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    expected = open_checkpoint(llama).root
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path / "file" / "cache")
    assert open_checkpoint(llama).root == expected


def test_a_checkpoint_that_carries_its_manifest_needs_only_the_files_of_its_span(llama: Path) -> None:
    whole = open_checkpoint(llama)
    whole.manifest.save(llama)
    needed = {file for name, file in whole.index.weight_map.items() if "layers.4." in name}
    for path in shards(llama):
        if path.name not in needed:
            path.unlink()
    checkpoint = open_checkpoint(llama)
    assert checkpoint.root == whole.root
    assert load_span(checkpoint, Blocks(4, 5)).blocks == Blocks(4, 5)
    with pytest.raises(UnsupportedCheckpoint, match="is missing"):
        load_span(checkpoint, Blocks(0, 2))
    flip_a_byte(llama / max(needed))
    with pytest.raises(ChecksumMismatch):
        load_span(open_checkpoint(llama), Blocks(4, 5))


def test_a_span_reads_only_the_files_that_have_its_tensors(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    fetched: list[str] = []
    real = checkpoint.source.fetch
    checkpoint.source.fetch = lambda names: fetched.extend(names) or real(names)
    load_span(checkpoint, Blocks(2, 4))
    wanted = {f for n, f in checkpoint.index.weight_map.items() if "layers.2." in n or "layers.3." in n}
    assert set(fetched) - {"config.json"} == wanted
    assert len(wanted) < len(shards(llama))


def test_a_single_file_checkpoint_loads(tmp_path: Path, family_dir: FamilyDir) -> None:
    directory = tmp_path / "single"
    directory.mkdir()
    shutil.copy(family_dir("llama") / "config.json", directory)
    tensors = {}
    for path in shards(family_dir("llama")):
        tensors |= load_file(path)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    single, several = Pair.load(directory), Pair.load(family_dir("llama"))
    assert set(single.checkpoint.manifest.files) == {"config.json", "model.safetensors"}
    ids = tokens(1, 9)
    spans = single.spans((0, 2), (2, 6))
    assert difference(single.ring(spans).step(ids), several.stock().step(ids)) == 0.0


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, "float32"])
def test_dtype_and_numeric_class(family_dir: FamilyDir, dtype: torch.dtype | str) -> None:
    checkpoint = open_checkpoint(family_dir("llama"))
    span, ends = load_span(checkpoint, Blocks(1, 3), dtype=dtype), load_ends(checkpoint, dtype=dtype)
    expected = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    assert span.dtype == ends.dtype == expected
    assert span.numeric_class == NumericClass(str(expected).removeprefix("torch."))
    hidden = torch.randn(1, 3, 64, dtype=expected)
    assert span.forward(hidden, cache=None).dtype == expected


def test_a_span_holds_no_more_than_its_share(family_dir: FamilyDir) -> None:
    checkpoint = open_checkpoint(family_dir("llama"))
    whole, two = load_span(checkpoint, Blocks(0, 6)), load_span(checkpoint, Blocks(2, 4))
    assert two.weight_bytes <= whole.weight_bytes * 2 / 6 * 1.1
    assert not any("embed" in name or "lm_head" in name for name, _ in two.model.named_parameters())


def test_weights_stay_when_their_file_is_rewritten(llama: Path) -> None:
    span = load_span(open_checkpoint(llama), Blocks(0, 6))
    hidden = torch.randn(1, 4, 64)
    before = span.forward(hidden, cache=None)
    for path in shards(llama):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert difference(span.forward(hidden, cache=None), before) == 0.0


def test_blocks_that_the_model_does_not_have_are_refused(family_dir: FamilyDir) -> None:
    checkpoint = open_checkpoint(family_dir("llama"))
    with pytest.raises(BadBlocks, match="0:6"):
        load_span(checkpoint, Blocks(4, 7))


def test_what_is_no_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelNotFound, match="neither a directory nor a hub id"):
        open_checkpoint(tmp_path / "missing")


def test_pickles_are_never_read(llama: Path) -> None:
    for path in [*shards(llama), llama / "model.safetensors.index.json"]:
        path.unlink()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(UnsupportedCheckpoint, match="pickles"):
        open_checkpoint(llama)
    (llama / "pytorch_model.bin").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"neither model\.safetensors"):
        open_checkpoint(llama)


@pytest.mark.parametrize("name", ["kernels-community/flash-attn2", "somebody/attention:run", "flash_attention_2"])
def test_attention_that_a_config_names_is_never_fetched(llama: Path, name: str) -> None:
    """Where the package `kernels` is installed, transformers runs what it finds under that name on the hub."""
    rewrite_config(llama, attn_implementation=name)
    span = load_span(open_checkpoint(llama), Blocks(2, 3))
    assert span.model.config._attn_implementation == "sdpa"


def test_remote_code_is_never_run(llama: Path) -> None:
    marker = llama / "ran"
    (llama / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    rewrite_config(
        llama, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    with pytest.raises(UnsupportedArchitecture, match="not part of transformers"):
        open_checkpoint(llama)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("{", "malformed"),
        ('{"weight_map": {}}', "malformed"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "malformed"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "malformed"),
        ('{"weight_map": {"a": "weights.bin"}}', "only safetensors"),
        ('{"weight_map": {"a": 3}}', "malformed"),
    ],
)
def test_a_malformed_index_is_refused(llama: Path, index: str, why: str) -> None:
    (llama / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnsupportedCheckpoint, match=why):
        open_checkpoint(llama)


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"model_type": 3}', '{"model_type": "no such type"}'])
def test_a_malformed_config_is_refused(llama: Path, config: str) -> None:
    (llama / "config.json").write_text(config)
    with pytest.raises(UsageError):
        open_checkpoint(llama)


def test_files_that_do_not_fit_together_are_refused(llama: Path) -> None:
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop("model.layers.3.mlp.up_proj.weight")
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(llama / file)
    tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, llama / file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(llama)
    load_span(checkpoint, Blocks(0, 2))
    with pytest.raises(UnsupportedCheckpoint, match="missing or misshapen"):
        load_span(checkpoint, Blocks(3, 4))


def test_a_file_that_is_no_safetensors_is_refused(llama: Path) -> None:
    for path in shards(llama):
        path.write_bytes(b"not safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="does not load"):
        load_span(open_checkpoint(llama), Blocks(0, 2))


def test_an_encoder_is_refused(llama: Path) -> None:
    AutoConfig.for_model("bert").save_pretrained(llama)
    with pytest.raises(UnsupportedArchitecture, match="bert"):
        open_checkpoint(llama)


def test_a_file_that_is_missing_is_named(llama: Path) -> None:
    shards(llama)[0].unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"model-00001-of-.* is missing"):
        open_checkpoint(llama)


def test_a_damaged_manifest_is_refused(llama: Path) -> None:
    (llama / manifest.MANIFEST_NAME).write_text('{"files": {"config.json": "x"}}')
    with pytest.raises(UnsupportedCheckpoint, match="cannot be read"):
        open_checkpoint(llama)


def test_the_client_takes_the_generation_config_along(tmp_path: Path) -> None:
    directory = save_family("llama", tmp_path)
    (directory / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    ends = load_ends(open_checkpoint(directory))
    assert ends.generation_config.temperature == 0.25


def test_models_load_one_at_a_time(monkeypatch):
    """`transformers` changes dtype and ties of the whole process meanwhile; what overlaps would leave that behind."""
    checkpoint, under_way, most = open_checkpoint(DEMO_CHECKPOINT), [], []
    ties, stock = PreTrainedModel.tie_weights, PreTrainedModel.from_pretrained.__func__

    def slow(cls, *args, **kwargs):
        under_way.append(cls)
        most.append(len(under_way))
        time.sleep(0.1)
        loaded = stock(cls, *args, **kwargs)
        under_way.pop()
        return loaded

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(slow))
    loads = [threading.Thread(target=load_ends, args=(checkpoint,)) for _ in range(3)]
    for load in loads:
        load.start()
    for load in loads:
        load.join()
    assert most == [1, 1, 1]
    assert PreTrainedModel.tie_weights is ties
    assert torch.get_default_dtype() is torch.float32


def test_a_config_without_a_dtype_is_loaded_as_it_is_announced(llama: Path) -> None:
    for shard in shards(llama):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    (llama / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(llama)
    assert load_span(checkpoint, Blocks(0, 2)).dtype is expected_dtype(checkpoint) is torch.float32


@pytest.mark.parametrize("error", [ZeroDivisionError("no inputs"), TypeError("len() of a 0-d tensor"), OverflowError()])
def test_a_damaged_file_is_damaged_whatever_its_tensors_break(llama: Path, error: Exception) -> None:
    """So it is thrown away, and fetched again."""

    def keep(_: str, __: torch.Tensor) -> torch.Tensor:
        raise error

    path = shards(llama)[0]
    with pytest.raises(ChecksumMismatch):
        read_tensors(path, "0" * 64, lambda _: True, keep)
    with pytest.raises(MalformedWeights, match="cannot be read"):
        read_tensors(path, hashlib.sha256(path.read_bytes()).hexdigest(), lambda _: True, keep)


def test_a_full_temporary_folder_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` reads copies there; the family is not unknown, nor a tokenizer broken."""
    write, checkpoint = Path.write_bytes, open_checkpoint(DEMO_CHECKPOINT)

    def fill_up(path: Path, data: bytes) -> int:
        if path.parent.name.startswith("swarm-load-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    for read in (lambda: open_checkpoint(DEMO_CHECKPOINT), checkpoint.texts().tokenizer):
        with pytest.raises(CheckpointError, match=r"temporary copy of .*config\.json: No space left on device"):
            read()
