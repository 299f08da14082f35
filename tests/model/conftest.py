"""Checkpoints and loaded models of the families: each is made once and shared by all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from swarm import config as settings
from tests.model.rings import Pair, save_family


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads, cache_dir = torch.get_num_threads(), settings.CACHE_DIR
    torch.set_num_threads(1)
    settings.CACHE_DIR = tmp_path_factory.mktemp("cache")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    settings.CACHE_DIR = cache_dir


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint on disk; not to be changed."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name.replace("+", "_")))
        return made[name]

    return get


@pytest.fixture(scope="session")
def pair_of(family_dir: Callable[[str], Path]) -> Callable[[str], Pair]:
    """A family's stock model and checkpoint."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = Pair.load(family_dir(name))
        return made[name]

    return get


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
