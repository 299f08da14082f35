"""Whatever kills a command, its children go with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarm.demo.local import LocalSwarm

CHECKPOINT = Path(__file__).parent.parent / "swarm" / "demo" / "checkpoint"
DEADLINE_S = 90


def descendants(process, at_least):
    """Wait until a process has so many descendants; return them."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := psutil.Process(process.pid).children(recursive=True)) < at_least:
        assert process.poll() is None
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def run(module, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def assert_all_end(children):
    gone, alive = psutil.wait_procs(children, timeout=15)
    for process in alive:
        process.kill()
    assert not alive, [process.cmdline() for process in alive]
    assert gone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_demo_takes_its_servers_along(number):
    demo = run("swarm.demo.cli")
    children = descendants(demo, 6)  # a bootstrap node, servers, and their p2pd
    os.kill(demo.pid, number)
    demo.wait(30)
    assert_all_end(children)


def test_a_killed_swarm_generate_leaves_no_p2pd():
    with LocalSwarm(CHECKPOINT) as swarm:
        client = run("swarm.client.cli", str(CHECKPOINT), "--prompt", "x", "--initial-peers", swarm.initial_peers[0])
        children = descendants(client, 1)
        client.kill()
        client.wait(30)
        assert_all_end(children)
