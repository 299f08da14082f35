"""From the options of `swarm-serve` to a loaded span: which weights it gets, and where they are kept."""

import pytest
import structlog

from swarm import config
from swarm.model.eightbits import is_supported
from swarm.server.arguments import ServeArguments
from swarm.server.cli import command
from swarm.server.loader import open_model
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
    return opened.loaded.span


def kept(folder):
    return sorted(path.name[:10] for path in folder.rglob("*.safetensors"))


def test_rounded_weights_are_kept_in_the_users_cache(cache):
    assert loaded("--quantize", "int8").numeric_class.weights == "int8"
    assert kept(cache / "weights") == ["block-0000", "block-0001"]


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


def test_plain_weights_are_not_kept(cache):
    assert not loaded().numeric_class.weights
    assert kept(cache) == []


def test_auto_says_on_one_line_what_it_chose(tmp_path):
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
