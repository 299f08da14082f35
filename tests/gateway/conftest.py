"""A tiny llama over servers in this process, and the engine of the gateway in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM

from swarm.client.planning.router import Wanted
from swarm.client.session.membership import joined
from swarm.compute.thread import ComputeThread
from swarm.events import configure_events
from swarm.gateway.engine import Engine, EngineLimits
from swarm.identity import Identity
from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds
from tests.families import make
from tests.support.inprocess import NETWORK, InProcessSwarm, inprocess
from tests.support.real_model import path


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The stock model computes as the servers do: with more threads sums are added in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def events():
    """As the command writes them: structlog's own tracebacks show all variables, which takes seconds."""
    before = structlog.get_config()
    configure_events("warning")
    yield
    structlog.configure(**before)


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway") / "llama"
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


@pytest.fixture(scope="session")
def real_model():
    """The folder of a small model with real weights."""
    folder = path()
    if folder is None:
        pytest.skip("the real model is fetched by `make real-model`")
    return folder


@asynccontextmanager
async def engine_of(swarm: InProcessSwarm, limits: EngineLimits | None = None) -> AsyncIterator[Engine]:
    """An engine that has joined a swarm."""

    @asynccontextmanager
    async def join():
        yield swarm.directory()

    checkpoint = swarm.checkpoint
    ends = TokenEnds(load_ends(checkpoint, dtype=swarm.dtype), checkpoint.traits)
    name = str(swarm.dtype).removeprefix("torch.")
    wanted = Wanted(checkpoint.root, checkpoint.public_name, checkpoint.n_blocks, name)
    compute = ComputeThread(asyncio.get_running_loop(), threads=1)
    try:
        async with joined(join, Identity.generate(), network=NETWORK) as member, member.of(wanted) as membership:
            engine = Engine(checkpoint, ends, membership, compute, limits)
            yield engine
            await engine.close()
    finally:
        compute.stop()


@pytest.fixture
async def engine(swarm):
    async with engine_of(swarm) as engine:
        yield engine
