"""Servers of tests start as forks of one process that has imported everything: importing takes seconds of every one.

Otherwise they are what `swarm.demo.local.launch` starts: processes of their own, with their own arguments, variables
and logs, that a signal reaches and that cannot outlive the tests. What libraries read from variables while they are
imported (HF_HOME, HF_ENDPOINT) is the tests' own: who needs it otherwise launches in the usual way.
"""

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from typing import BinaryIO

from swarm.demo.local import DESCRIPTORS_MAX, MEMORY_BYTES_MAX, Place
from swarm.net.launch import bind

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preloaded"])


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
    assert not place.prefix, "a fork runs where its parent does"
    process = _context.Process(target=_run, args=(module, tuple(arguments), env, log.name))
    process.start()
    return Warm(process)


def _run(module: str, arguments: tuple[str, ...], env: dict[str, str], log: str) -> None:
    os.setpgrp()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not bind(os.getppid(), DESCRIPTORS_MAX, MEMORY_BYTES_MAX):
        return
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
