"""What all tests share."""

import gc
import os

import pytest
import structlog
from hypothesis import HealthCheck, settings

from swarm.loops import new_event_loop
from tests.simulation.loop import VirtualLoop

HORIZON_S = 24 * 3600.0
gc.disable()  # until all is imported: a fifth of the time that collecting tests takes
os.environ["XDG_STATE_HOME"] = "/dev/null/none"  # nodes are not remembered: one test's swarm is not to meet another's
os.environ["TRITON_INTERPRET"] = "1"  # a GPU's kernels run on the CPU; Triton looks when it is imported
pytest_plugins = ("tests.support.alone", "tests.support.budget", "tests.support.machine")

# Properties are about what comes out. How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def events_go_where_they_went():
    """A command that a test runs in this process says where events go, and which."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_asyncio_loop_factories(config, item):
    """Tests run on the event loop that servers and clients run on; those that need no network may do without time."""
    del config
    if item.get_closest_marker("virtual_clock") is not None:
        return {"virtual": lambda: VirtualLoop(HORIZON_S)}
    return {"uvloop": new_event_loop}


def pytest_collection_modifyitems(items):
    """The longest single item comes first: at the end it would keep one process busy and leave the other idle."""
    items.sort(key=lambda item: item.path.name != "test_lint.py")


def pytest_collection_finish(session):
    """What was imported is not looked through whenever garbage is collected: that is half of a simulation's time."""
    del session
    gc.enable()
    gc.collect()
    gc.freeze()
