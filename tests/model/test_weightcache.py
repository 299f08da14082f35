"""Rounded weights on disk: the same bits as from the checkpoint, and nothing that another has written."""

import errno
import logging
import os
import shutil
import threading
import time
from collections import namedtuple

import pytest
import torch
from safetensors import safe_open
from xxhash import xxh3_128

from swarm.blocks import Blocks
from swarm.errors import ChecksumMismatch
from swarm.model import kept, loading, weightcache
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import IntegerMatrix, is_supported
from swarm.model.kept import _plain
from swarm.model.loading import load_span
from swarm.model.reading import read_tensors
from swarm.model.weightcache import CacheKey, WeightCache, WeightCacheLimits
from swarm.model.writing import Layout, Piece, write_tensors
from tests.support.often import rest_is_long

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")

BLOCKS = Blocks(1, 3)
KEY = CacheKey("a" * 64, "float32+int8")
FAMILIES = ("llama", "phi3", "gemma3_text", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
ANY_DISK = WeightCacheLimits(free_bytes_min=0)


def load(directory, folder, blocks=BLOCKS, dtype=torch.float32):
    cache = None if folder is None else WeightCache(folder, ANY_DISK)
    span = load_span(open_checkpoint(directory), blocks, dtype=dtype, quantize="int8", rounded=cache)
    if cache is not None:
        cache.write()
    return span


def output(span):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 24, span.hidden_size, generator=generator).to(span.dtype)
    with torch.inference_mode():
        return span.forward(hidden, cache=span.new_cache())


def files(folder):
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def no_reading(monkeypatch):
    """Let nothing be read of a checkpoint, and nothing be rounded."""

    def refuse(*_args):
        raise AssertionError("it is in the cache")

    def apply():
        monkeypatch.setattr(loading, "read_verified", refuse)
        monkeypatch.setattr(IntegerMatrix, "of", refuse)

    return apply


@pytest.mark.parametrize("name", rest_is_long(FAMILIES, ("llama", "qwen3_moe")))
def test_a_second_start_reads_rounded_weights_alone_and_has_the_same_bits(name, family_dir, tmp_path, no_reading):
    plain = output(load(family_dir(name), None))
    assert torch.equal(output(load(family_dir(name), tmp_path)), plain)
    assert len(files(tmp_path)) == len(BLOCKS)
    no_reading()
    again = load(family_dir(name), tmp_path)
    assert torch.equal(output(again), plain)
    assert str(again.numeric_class) == "float32+int8"


def test_weights_that_are_not_rounded_lie_where_they_lay(family_dir, tmp_path):
    """Kernels add up in another order at another address: a router of experts would choose others."""
    before = load(family_dir("mixtral"), tmp_path).model.state_dict()
    after = load(family_dir("mixtral"), tmp_path).model.state_dict()
    plain = [name for name, tensor in before.items() if not tensor.isnan().any()]
    assert any("gate" in name for name in plain)
    for name in plain:
        assert torch.equal(after[name], before[name])
        assert after[name].data_ptr() % 64 == before[name].data_ptr() % 64


@pytest.mark.long
def test_the_dtype_of_the_other_weights_is_part_of_the_class(family_dir, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        span = load(family_dir("llama"), tmp_path, dtype=dtype)
        again = load(family_dir("llama"), tmp_path, dtype=dtype)
        assert torch.equal(output(again), output(span))
    assert {path.parent.name for path in files(tmp_path)} == {"float32+int8", "bfloat16+int8"}


def test_other_spans_of_the_model_share_its_blocks(family_dir, tmp_path, no_reading):
    load(family_dir("llama"), tmp_path, Blocks(0, 2))
    load(family_dir("llama"), tmp_path, Blocks(1, 3))
    assert len(files(tmp_path)) == 3
    no_reading()
    load(family_dir("llama"), tmp_path, Blocks(0, 3))


def test_a_file_is_half_the_size_and_can_be_opened_by_others(family_dir, tmp_path):
    span = load(family_dir("llama"), tmp_path)
    assert sum(path.stat().st_size for path in files(tmp_path)) < 1.2 * span.weight_bytes  # tiny blocks: headers count
    with safe_open(files(tmp_path)[0], "pt") as file:
        assert file.metadata()["numeric_class"] == "float32+int8"
        names = [name for name in file.keys() if not name.startswith("gap.")]  # noqa: SIM118 - not a mapping
        assert {file.get_tensor(name).dtype for name in names} == {torch.int8, torch.float32}


@pytest.mark.parametrize("place", rest_is_long([0.02, 0.5, 0.999], [0.5]))
def test_a_flipped_byte_is_told_and_the_block_is_rounded_anew(place, family_dir, tmp_path, caplog, no_reading):
    plain = output(load(family_dir("llama"), tmp_path))
    path = files(tmp_path)[1]
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(output(load(family_dir("llama"), tmp_path)), plain)
    assert f"{path} is damaged" in caplog.text
    assert len(files(tmp_path)) == len(BLOCKS)
    no_reading()
    assert torch.equal(output(load(family_dir("llama"), tmp_path)), plain)


def test_a_file_that_ends_early_is_rounded_anew(family_dir, tmp_path, no_reading):
    plain = output(load(family_dir("llama"), tmp_path))
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:1000])
    assert torch.equal(output(load(family_dir("llama"), tmp_path)), plain)
    no_reading()
    load(family_dir("llama"), tmp_path)


def test_a_write_that_breaks_off_leaves_no_file(family_dir, tmp_path, monkeypatch, caplog):
    def full(file, *_):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("swarm.model.weightcache.write_tensors", full)
    with caplog.at_level(logging.WARNING):
        load(family_dir("llama"), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert caplog.text.count("No space left on device") == 1  # not for each block


def test_writing_that_is_stopped_keeps_whole_blocks_alone(tmp_path):
    cache = WeightCache(tmp_path, ANY_DISK)
    layout = Layout(torch.float32, (3,))

    def last():
        cache.stop()
        return (torch.ones(3),)

    for part, make in (("block-0001", lambda: (torch.ones(3),)), ("block-0002", last)):
        cache.save(KEY, part, [Piece({"a": layout}, make), Piece({"b": layout}, lambda: (torch.ones(3),))])
    cache.write()
    assert [path.name[:10] for path in tmp_path.rglob("*") if path.is_file()] == ["block-0001"]


def test_an_error_of_memory_or_of_a_device_is_told_and_nothing_is_held(tmp_path, caplog):
    cache = WeightCache(tmp_path, ANY_DISK)

    def fail():
        raise RuntimeError("the device is lost")

    for part in ("block-0001", "block-0002"):
        cache.save(KEY, part, [Piece({"a": Layout(torch.float32, (3,))}, fail)])
    with caplog.at_level(logging.WARNING):
        cache.write()
        cache.write()
    assert [record.getMessage().count("the device is lost") for record in caplog.records] == [1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_writing_ends_within_a_large_tensor(tmp_path, monkeypatch):
    cache, written = WeightCache(tmp_path, ANY_DISK), []

    def stopping(file, data, write=weightcache._Stoppable.write):
        write(file, data)
        written.append(len(data))
        if len(data) > 1 << 20:
            cache.stop()

    monkeypatch.setattr(weightcache._Stoppable, "write", stopping)
    layout = Layout(torch.uint8, (40 << 20,))
    cache.save(KEY, "block-0001", [Piece({"a": layout}, lambda: (torch.zeros(40 << 20, dtype=torch.uint8),))])
    cache.write()
    assert max(written) == sum(written[-1:]) == 16 << 20
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_without_room_gets_no_file(family_dir, tmp_path, monkeypatch, caplog):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 10_000))
    with caplog.at_level(logging.WARNING):
        load(family_dir("llama"), tmp_path)
    assert files(tmp_path) == []
    assert caplog.text.count("are not kept") == 1


@pytest.mark.parametrize("change", ["root", "class", "block"])
def test_a_file_in_anothers_place_is_not_taken(change, family_dir, tmp_path):
    load(family_dir("llama"), tmp_path)
    checkpoint = open_checkpoint(family_dir("llama"))
    first, second = files(tmp_path)[:2]
    key = CacheKey(checkpoint.root, "float32+int8")
    part = "block-0001"
    if change == "root":
        key = CacheKey("b" * 64, "float32+int8")
        (tmp_path / ("b" * 64)).mkdir(mode=0o700)
        shutil.copytree(first.parent, tmp_path / ("b" * 64) / "float32+int8")
    elif change == "class":
        key = CacheKey(checkpoint.root, "bfloat16+int8")
        shutil.copytree(first.parent, first.parent.with_name("bfloat16+int8"))
    else:
        shutil.copy(second, first.with_name(second.name.replace("block-0002", "block-0001")))
        first.unlink()
    cache, taken = WeightCache(tmp_path), []
    assert cache.load(key, part, set(), lambda name, tensor: taken.append(name) or tensor) is None
    assert taken == []


def test_another_version_of_transformers_rounds_anew(family_dir, tmp_path, monkeypatch, no_reading):
    load(family_dir("llama"), tmp_path)
    older = files(tmp_path)
    monkeypatch.setattr(weightcache.transformers, "__version__", "5.99.0")
    load(family_dir("llama"), tmp_path)
    assert len(files(tmp_path)) == len(BLOCKS)  # the older ones have gone
    assert not set(files(tmp_path)) & set(older)
    no_reading()
    load(family_dir("llama"), tmp_path)


def test_only_verified_weights_are_kept(family_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(family_dir("llama"), copy)
    checkpoint = open_checkpoint(copy)
    for path in copy.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 4
        path.write_bytes(data)
    cache = WeightCache(tmp_path / "cache", ANY_DISK)
    with pytest.raises(ChecksumMismatch):
        load_span(checkpoint, BLOCKS, quantize="int8", rounded=cache)
    cache.write()
    assert files(tmp_path / "cache") == []


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
@pytest.mark.parametrize("which", rest_is_long(["folder", "root", "class", "file"], ["folder", "file"]))
def test_what_others_can_write_to_is_not_trusted(which, family_dir, tmp_path, caplog):
    folder = tmp_path / "cache"
    plain = output(load(family_dir("llama"), folder))
    path = files(folder)[0]
    forged = _forge(path)
    opened = {"folder": folder, "root": path.parent.parent, "class": path.parent, "file": forged}[which]
    opened.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(output(load(family_dir("llama"), folder)), plain)
    assert "can write to it" in caplog.text
    assert caplog.text.count("are not used") == 1  # not for each block
    if which != "file":  # which has been written anew
        opened.chmod(0o700)
        assert not torch.equal(output(load(family_dir("llama"), folder)), plain)  # it would have been taken


def _forge(path):
    """Put other numbers under their right digest, as a person could who may write there."""
    data = bytearray(path.read_bytes())
    data[-200] ^= 64
    path.unlink()
    forged = path.with_name(f"block-0001.{xxh3_128(data).hexdigest()}.safetensors")
    forged.write_bytes(data)
    forged.chmod(0o600)
    return forged


@pytest.mark.skipif(os.name == "nt", reason="owners of POSIX")
def test_what_another_user_owns_is_not_trusted(family_dir, tmp_path, monkeypatch, caplog):
    load(family_dir("llama"), tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        assert WeightCache(tmp_path).load(KEY, "block-0001", set(), lambda _, tensor: tensor) is None
        load(family_dir("llama"), tmp_path)
    assert "others own" in caplog.text


@pytest.mark.long
def test_two_servers_at_once_share_the_folder(family_dir, tmp_path, no_reading):
    plain = output(load(family_dir("llama"), None))
    spans, failures = [], []

    def start():
        try:
            spans.append(load(family_dir("llama"), tmp_path))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(torch.equal(output(span), plain) for span in spans)
    assert len(files(tmp_path)) == len(BLOCKS)  # both wrote the same bytes
    no_reading()
    load(family_dir("llama"), tmp_path)


def test_another_process_reads_what_one_has_written(family_dir, tmp_path, no_reading):
    plain = output(load(family_dir("llama"), tmp_path))
    no_reading()
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = torch.equal(output(load(family_dir("llama"), tmp_path)), plain)
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_block_whose_names_change_on_loading_is_rounded_each_time(tmp_path):
    cache = WeightCache(tmp_path, ANY_DISK)
    parts = {"block-0001": kept.Part({"a": (3,)}, {}, {})}
    cache.save(KEY, "block-0001", [Piece({"a": Layout(torch.float32, (3,))}, lambda: (torch.ones(3),))])
    cache.write()
    span = kept.Kept(cache, KEY, parts, torch.float32)
    assert span.recall(lambda _: True)[0]["a"].tolist() == [1, 1, 1]
    assert span.is_complete
    assert span.recall(lambda _: False) == ({}, {})
    assert not span.is_complete


def test_files_that_no_server_reads_are_deleted_in_the_end(family_dir, tmp_path):
    load(family_dir("llama"), tmp_path)
    old, other = files(tmp_path)
    own = other.with_name("notes.safetensors")  # of the user
    half = other.with_name(".block-0003.00000000")
    fresh = other.with_name(".block-0004.00000000")
    for path in (own, half, fresh):
        path.write_bytes(b"")
    now = time.time()
    for path, days in ((old, 31), (own, 99), (half, 2)):
        os.utime(path, (now - days * 86400, now - days * 86400))
    WeightCache(tmp_path).tidy()
    assert set(other.parent.iterdir()) == {other, own, fresh}


def test_reading_a_file_keeps_it(family_dir, tmp_path):
    load(family_dir("llama"), tmp_path)
    for path in files(tmp_path):
        os.utime(path, (0, time.time() - 29 * 86400))
    load(family_dir("llama"), tmp_path)
    assert all(time.time() - path.stat().st_mtime < 1000 for path in files(tmp_path))


def test_what_lies_on_a_device_is_written_from_the_hosts_memory(tmp_path):
    class OnDevice:
        """A tensor of a GPU: numpy does not read it."""

        device, dtype, shape = torch.device("cuda"), torch.float32, (2, 3)

        def detach(self):
            return self

        def data_ptr(self):
            raise AssertionError("an address that says nothing here")

        def cpu(self):
            return torch.arange(6.0).view(2, 3)

    piece = _plain("weight", OnDevice())
    path = tmp_path / "file.safetensors"
    with path.open("wb") as file:
        digest = write_tensors(file, {}, [piece])
    (read,) = read_tensors(path, digest, lambda _: True).values()
    assert torch.equal(read, torch.arange(6.0).view(2, 3))
