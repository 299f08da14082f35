"""Servers of two halves of a model, and peers."""

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from swarm import config as settings
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from tests.model.rings import save_family
from tests.server.sites import FIRST, SECOND, Loaded, Peer, Site, serving


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    threads, cache_dir = torch.get_num_threads(), settings.CACHE_DIR
    torch.set_num_threads(1)
    settings.CACHE_DIR = tmp_path_factory.mktemp("cache")
    checkpoint = open_checkpoint(save_family("llama", tmp_path_factory.mktemp("llama")))
    yield Loaded(checkpoint, {blocks: load_span(checkpoint, blocks) for blocks in (FIRST, SECOND)})
    torch.set_num_threads(threads)
    settings.CACHE_DIR = cache_dir


@pytest.fixture
async def first(loaded: Loaded) -> AsyncIterator[Site]:
    async with serving(loaded, FIRST) as site:
        yield site


@pytest.fixture
async def second(loaded: Loaded) -> AsyncIterator[Site]:
    async with serving(loaded, SECOND) as site:
        yield site


@pytest.fixture
async def owner() -> AsyncIterator[Peer]:
    peer = Peer()
    yield peer
    peer.leave()


@pytest.fixture
async def stranger() -> AsyncIterator[Peer]:
    peer = Peer()
    yield peer
    peer.leave()
