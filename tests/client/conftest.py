"""A tiny llama, whole and in three spans."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import make
from tests.support.inprocess import inprocess


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The stock model computes as the servers do: with more threads sums are added in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client") / "llama"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make("llama")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def full(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")  # what it announces lives for a minute
def swarm(checkpoint):
    with inprocess(checkpoint, "0:1", "1:4", "4:6") as swarm:
        yield swarm


@pytest.fixture
def model(swarm):
    with swarm.client() as model:
        yield model
