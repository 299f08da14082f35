"""Servers of tests start as forks of one process that has imported everything: importing takes seconds of every one.

Otherwise they are what `swarm.demo.local.launch` starts: processes of their own, with their own arguments, variables,
network and logs, that a signal reaches and that cannot outlive the tests. What libraries read from variables while they
are imported (HF_HOME, HF_ENDPOINT) is the tests' own: who needs it otherwise launches in the usual way.
"""

import ctypes
import importlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

from swarm.demo.local import Place, ProcessLimits
from swarm.net.launch import bind

PRELOADED = "tests.support.preloaded"
CLONE_NEWNET = 0x40000000  # of sched.h
NAMESPACES = Path("/run/netns")  # of `ip netns`

_context = get_context("forkserver")
_context.set_forkserver_preload([PRELOADED])


class Warm:
    """A process as `subprocess.Popen` shows it."""

    def __init__(self, process: "_context.Process") -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def launch(place: Place, module: str, arguments: Sequence[str], env: dict[str, str], log: BinaryIO) -> Warm:
    """As `swarm.demo.local.launch`."""
    process = _context.Process(target=_run, args=(module, tuple(arguments), env, log.name, place.namespace))
    process.start()
    return Warm(process)


def _run(module: str, arguments: tuple[str, ...], env: dict[str, str], log: str, namespace: str) -> None:
    os.setpgrp()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert PRELOADED in sys.modules, "nothing was imported before the fork: PYTHONPATH must name the repository"
    if namespace:
        _enter(namespace)
    if not bind(os.getppid(), ProcessLimits().descriptors_max, ProcessLimits().data_bytes_max):
        return
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # looked up anew
    random.seed()
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def _enter(namespace: str) -> None:
    """Be in another network from now on. Sockets that are open already stay where they were made."""
    with (NAMESPACES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
