"""Whatever kills a command, its children go with it."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from swarm.demo.local import LocalSwarm
from tests.support import warm
from tests.support.often import rest_is_long
from tests.support.swarms import eventually

CHECKPOINT = Path(__file__).parent.parent / "swarm" / "demo" / "checkpoint"
DEADLINE_S = 90


def descendants(process, at_least):
    """Wait until a process has so many descendants; return them."""

    def found():
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
        return children if len(children) >= at_least else None

    return eventually(found, DEADLINE_S)


def assert_all_end(children):
    gone, alive = psutil.wait_procs(children, timeout=15)
    for process in alive:
        process.kill()
    assert not alive, [process.cmdline() for process in alive]
    assert gone


@pytest.mark.slow("the demo's processes import on their own")
@pytest.mark.parametrize("number", rest_is_long([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [signal.SIGKILL]))
def test_the_demo_takes_its_servers_along(tmp_path, number):
    demo = warm.start(tmp_path, "swarm.demo.cli").process
    children = descendants(demo, 6)  # a bootstrap node, servers, and their p2pd
    os.kill(demo.pid, number)
    demo.wait(30)
    assert_all_end(children)


def test_a_killed_swarm_generate_leaves_no_p2pd(tmp_path):
    with LocalSwarm(CHECKPOINT, launch=warm.launch) as swarm:
        line = (str(CHECKPOINT), "--prompt", "x", "--initial-peers", swarm.initial_peers[0])
        client = warm.start(tmp_path, "swarm.client.cli", *line).process
        children = descendants(client, 1)
        client.kill()
        client.wait(30)
        assert_all_end(children)
