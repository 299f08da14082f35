"""From the options of `swarm-serve` to a loaded span: which weights it gets, and where they are kept."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
import structlog
import torch

from swarm import config
from swarm.errors import BadConfiguration
from swarm.model.eightbits import is_supported
from swarm.model.weightcache import CacheKey, WeightCache, WeightCacheLimits
from swarm.model.writing import Layout, Piece
from swarm.server.arguments import ServeArguments
from swarm.server.cli import command
from swarm.server.loader import open_model, written
from tests.model.rings import save_family
from tests.support.swarms import DEMO_CHECKPOINT

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setattr(config, "CACHE_DIR", tmp_path / "cache")
    monkeypatch.delenv("SWARM_QUANTIZE_CACHE", raising=False)
    return tmp_path / "cache"


def loaded(*options, checkpoint=DEMO_CHECKPOINT):
    line = [str(checkpoint), "--blocks", "0:2", "--device", "cpu", "--cache-tokens", "64", *options]
    context = command.make_context("swarm-serve", line, auto_envvar_prefix="SWARM")
    opened = open_model(ServeArguments.of(context.params))
    assert opened.loader.numeric_class == opened.loaded.span.numeric_class
    if opened.loaded.rounded is not None:
        opened.loaded.rounded.write()
    return opened.loaded.span


def kept(folder):
    return sorted(path.name[:10] for path in folder.rglob("*.safetensors"))


def test_rounded_weights_are_kept_in_the_users_cache(cache):
    assert loaded("--quantize", "int8").numeric_class.weights == "int8"
    assert kept(cache / "weights") == ["block-0000", "block-0001"]


@pytest.mark.parametrize("where", ["load_span", "choose_kernels", "cache_prices"])
def test_memory_that_is_not_there_is_told_wherever_it_lacks(where, monkeypatch):
    def none(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(f"swarm.server.loader.{where}", none)
    with pytest.raises(BadConfiguration, match="blocks 0:2 do not fit"):
        loaded("--quantize", "none")


@pytest.mark.long
def test_weights_of_four_bits_are_kept_beside_those_of_eight(cache):
    assert loaded("--quantize", "int4").numeric_class.weights == "int4"
    assert loaded("--quantize", "int8").numeric_class.weights == "int8"
    assert kept(cache / "weights") == ["block-0000", "block-0000", "block-0001", "block-0001"]


def test_another_folder_can_be_named_or_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded("--quantize", "int8", "--quantize-cache", str(tmp_path / "mine"))
    monkeypatch.setenv("SWARM_QUANTIZE_CACHE", str(tmp_path / "other"))
    loaded("--quantize", "int8")
    loaded("--quantize", "int8", "--quantize-cache", "off")
    assert len(kept(tmp_path / "mine")) == len(kept(tmp_path / "other")) == 2
    assert len(kept(tmp_path)) == 4


async def test_a_server_that_leaves_while_it_writes_keeps_whole_blocks_and_lets_the_weights_go(tmp_path):
    writes = threading.Event()

    def tensors():
        writes.set()
        time.sleep(0.02)
        return (torch.ones(3),)

    rounded = WeightCache(tmp_path, WeightCacheLimits(free_bytes_min=0))
    names = [f"block-{index:04d}" for index in range(400)]
    for name in names:
        rounded.save(CacheKey("a" * 64, "float32+int8"), name, [Piece({"a": Layout(torch.float32, (3,))}, tensors)])
    writing = asyncio.create_task(written(rounded))
    await asyncio.to_thread(writes.wait, 10)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    held = weakref.ref(tensors)
    del tensors
    gc.collect()
    assert held() is None
    there = kept(tmp_path)
    await asyncio.sleep(0.1)
    assert kept(tmp_path) == there == names[: len(there)]
    assert len(there) == len([path for path in tmp_path.rglob("*") if path.is_file()]) < len(names)


async def test_a_server_that_leaves_does_not_wait_for_a_disk_that_has_stalled(tmp_path):
    stalls, goes_on = threading.Event(), threading.Event()

    def tensors():
        stalls.set()
        goes_on.wait(30)
        return (torch.ones(3),)

    rounded = WeightCache(tmp_path, WeightCacheLimits(free_bytes_min=0, stop_s=0.05))
    rounded.save(CacheKey("a" * 64, "float32+int8"), "block-0000", [Piece({"a": Layout(torch.float32, (3,))}, tensors)])
    writing = asyncio.create_task(written(rounded))
    await asyncio.to_thread(stalls.wait, 10)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(writing, 10)
    goes_on.set()


def test_plain_weights_are_not_kept(cache):
    assert not loaded().numeric_class.weights
    assert kept(cache) == []


def test_auto_says_on_one_line_what_it_chose(tmp_path):
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))  # whatever ran before in this process
    with structlog.testing.capture_logs() as events:
        assert loaded("--quantize", "auto").numeric_class.weights == "int8"
        gpt2 = save_family("gpt2", tmp_path / "gpt2")
        assert not loaded("--quantize", "auto", checkpoint=gpt2).numeric_class.weights
    said = [event for event in events if event["event"] == "weights chosen"]
    assert [event["quantize"] for event in said] == ["int8", "none"]
    assert "int8 is for linear layers and experts" in said[1]["why"]


def test_auto_counts_blocks_of_the_weights_that_it_chose(monkeypatch):
    sizes = {}
    for quantize in ("none", "auto", "int8", "int4"):
        context = command.make_context(
            "swarm-serve", [str(DEMO_CHECKPOINT), "--quantize", quantize, "--dtype", "float32"]
        )
        monkeypatch.setattr(
            "swarm.server.loader.blocks_that_fit",
            lambda one, _device, quantize=quantize: sizes.setdefault(quantize, one) and 1,
        )
        open_model(ServeArguments.of(context.params))
    assert sizes["auto"] == sizes["int8"] < 0.5 * sizes["none"]
    assert sizes["int4"] < 0.6 * sizes["int8"]


def test_weights_for_a_gpu_have_to_fit_into_the_host_as_well(monkeypatch):
    room = {"cuda": 5, "cpu": 2}
    monkeypatch.setattr("swarm.server.loader.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr("swarm.server.loader.blocks_that_fit", lambda _, device: room[device.type])
    context = command.make_context("swarm-serve", [str(DEMO_CHECKPOINT), "--quantize", "none"])
    assert open_model(ServeArguments.of(context.params)).length == 2
    room["cpu"] = 0
    with pytest.raises(BadConfiguration, match="or its host has no room"):
        open_model(ServeArguments.of(context.params))
