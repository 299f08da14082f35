"""A tiny llama, whole and in three spans."""

import pytest

from tests.support.tiny import checkpoint, full, one_thread, swarm

__all__ = ["checkpoint", "full", "one_thread", "swarm"]


@pytest.fixture
def model(swarm):
    with swarm.client() as model:
        yield model
