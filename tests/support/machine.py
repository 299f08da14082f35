"""What a run leaves out on a machine that is too slow for it, and says that it left out.

`--until SECONDS` names a time, in seconds since the epoch, from which on no test begins: the others are skipped. So a
run that has to end by some time ends by itself, and its result counts.

Some tests let clients and servers answer each other over sockets, within the product's own limits of time. They are
marked `real_time`, by hand or by what their module uses. A virtual machine whose host gives the cores to others for
most of the time cannot keep those limits: there they are skipped. Load inside the machine is no reason to skip: the
scheduler shares the cores fairly, in slices of milliseconds. A run over several processes looks before it starts them.
"""

import os
import time
from functools import cache
from types import ModuleType

import pytest

from tests.support.budget import LOST, Moment, lost

LOOKS_S = 2.0
GAP_S = 1e-3  # longer than any interrupt
LOST_MAX = 0.3
REAL = {f"tests.support.{name}" for name in ("inprocess", "swarms", "warm", "lab", "proxy", "router", "bridge")}
REAL |= {"tests.dht.support", "tests.dht.liars"}
FOLDERS = {"integration", "nat"}
FIXTURES = {"swarm"}


def lost_share(looks_s: float = LOOKS_S) -> float:
    """Read the clock for so long. Returns the share of the time in which nothing in this machine ran."""
    began = Moment.now()
    last, gaps_s = began.wall_s, 0.0
    while last < began.wall_s + looks_s:
        now = time.monotonic()
        if now - last > GAP_S:
            gaps_s += now - last
        last = now
    ended = Moment.now()
    contended_s = (ended.contended_s or 0.0) - (began.contended_s or 0.0)
    return max(0.0, gaps_s - contended_s) / looks_s


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, metavar="SECONDS", help="begin no test after this time since the epoch")


def pytest_configure(config: pytest.Config) -> None:
    """Look whether the machine keeps time, before the processes that test use its cores."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[LOST] = str(lost_share() if config.getoption("numprocesses", None) else 0.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start swarms."""
    for item in items:
        if _starts_a_swarm(item):
            item.add_marker("real_time")


def _starts_a_swarm(item: pytest.Item) -> bool:
    """Whether a test's module has a function or a class of those that do, or the test a fixture."""
    if item.path.parent.name in FOLDERS or FIXTURES & set(getattr(item, "fixturenames", ())):
        return True
    return _uses_one(item.module) if isinstance(item, pytest.Function) else False


@cache
def _uses_one(module: ModuleType) -> bool:
    values = vars(module).values()
    return any(str(getattr(value, name, "")) in REAL for value in values for name in ("__module__", "__name__"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has no time left, and what this machine has no time for."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("no time is left")
    share = lost()
    if share > LOST_MAX and item.get_closest_marker("real_time") is not None:
        pytest.skip(f"this machine loses {share:.0%} of its time to others")
