"""A tiny llama over servers in this process, and the engine of the gateway in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from swarm.client.planning.router import Wanted
from swarm.client.session.membership import joined
from swarm.compute.thread import ComputeThread
from swarm.events import configure_events
from swarm.gateway.engine import Engine, EngineLimits
from swarm.identity import Identity
from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds
from tests.gateway.replying import replying
from tests.gateway.scripted import scripted
from tests.support.inprocess import NETWORK, InProcessSwarm
from tests.support.real_model import path
from tests.support.tiny import checkpoint, full, one_thread, swarm

__all__ = ["checkpoint", "engine_of", "full", "one_thread", "swarm"]


@pytest.fixture(scope="package", autouse=True)
def events():
    """As the command writes them: structlog's own tracebacks show all variables, which takes seconds."""
    before = structlog.get_config()
    configure_events("warning")
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def real_model():
    """The folder of a small model with real weights."""
    folder = path()
    if folder is None:
        pytest.skip("the real model is fetched by `make real-model`")
    return folder


@pytest.fixture(scope="module")
def says_ok():
    """URL and backend of a gateway whose model says the same sentence to every prompt."""
    with scripted(lambda _: "All is well.") as (url, backend):
        yield url, backend


@pytest.fixture(scope="module")
def replies(request):
    """URL and model of a gateway that answers with the events of the module's REPLY."""
    with replying(lambda _: request.module.REPLY) as (url, model):
        yield url, model


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
