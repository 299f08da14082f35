"""Tests that are marked `alone` run while no other process of the same run tests anything.

Their subject is how a swarm keeps time, with as many processes as the machine can carry. Every test holds one lock,
shared with the others or, alone, with nobody. Whoever wants a lock waits at a gate, so one that needs all is not
overtaken by those that come later.
"""

import fcntl
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest


@contextmanager
def locked(room: Path, *, alone: bool) -> Generator[None]:
    """Hold a lock beside all that share it, or alone. room: a path; files beside it are made."""
    with room.with_suffix(".gate").open("w") as gate, room.with_suffix(".room").open("w") as inside:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def _turn(item: pytest.Item) -> AbstractContextManager[None]:
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return nullcontext()
    room = Path(tempfile.gettempdir(), f"swarm-tests-{worker['testrunuid']}")
    return locked(room, alone=item.get_closest_marker("alone") is not None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for a turn. The limit of a test's time begins after that."""
    with _turn(item):
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that gives out the tests removes the files of its run."""
    plugin = config.pluginmanager.get_plugin("dsession")
    run = getattr(getattr(plugin, "nodemanager", None), "testrunuid", None)
    for file in Path(tempfile.gettempdir()).glob(f"swarm-tests-{run}.*") if run else ():
        file.unlink(missing_ok=True)
