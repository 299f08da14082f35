"""Fixtures of a tiny llama, whole and in three spans. A conftest imports those that its tests use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.families import make
from tests.support.inprocess import InProcessSwarm, inprocess


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The stock model computes as the servers do: with more threads sums are added in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoint."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make("llama")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def full(checkpoint: Path) -> PreTrainedModel:
    """The stock model."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")  # its announcements live for a minute
def swarm(checkpoint: Path) -> Iterator[InProcessSwarm]:
    """The model in three spans, on servers in this process."""
    with inprocess(checkpoint, "0:1", "1:4", "4:6") as swarm:
        yield swarm
