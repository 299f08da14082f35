"""Real swarms, each started once: bootstrap node and three servers as processes, clients in this one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from swarm import config as settings
from tests.support.swarms import DEMO_CHECKPOINT, DEMO_SPANS, World, make_checkpoint, world


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the swarm's own files of this test run are."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_alone(home: Path) -> Iterator[None]:
    threads, before = torch.get_num_threads(), settings.CACHE_DIR
    torch.set_num_threads(1)
    settings.CACHE_DIR = home / "cache"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    settings.CACHE_DIR = before


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint on disk; not to be changed."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoint") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def llama(checkpoint: Callable[[str], Path], home: Path) -> Iterator[World]:
    """A llama over three servers. Tests that break something start a swarm of their own."""
    with world(checkpoint("llama"), home) as running:
        yield running


@pytest.fixture(scope="session")
def demo(home: Path) -> Iterator[World]:
    """The small checkpoint that comes with the package, as it is: bfloat16, over three servers."""
    with world(DEMO_CHECKPOINT, home, DEMO_SPANS, torch.bfloat16) as running:
        yield running
