"""Servers of tests start as forks of one process that has imported everything: importing takes seconds of every one.

Otherwise they are what `swarm.demo.local.launch` starts: processes of their own, with their own arguments, variables,
network and logs, that a signal reaches and that cannot outlive the tests. What libraries read from variables while they
are imported (HF_HOME, HF_ENDPOINT) is the tests' own: who needs it otherwise launches in the usual way.
"""

import ctypes
import importlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import platformdirs

from swarm import config
from swarm.demo.local import Place, ProcessLimits
from swarm.net.launch import bind

PRELOADED = "tests.support.preloaded"
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000  # of sched.h
NAMESPACES = Path("/run/netns")  # of `ip netns`
EMPTY: Mapping[str, str] = {}

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


@dataclass(frozen=True, slots=True)
class Command:
    """One of the swarm's commands that runs, or has run."""

    process: Warm
    log: Path

    def printed(self) -> str:
        """What it has printed so far, on either stream."""
        return self.log.read_text(errors="replace")

    def ended(self, within_s: float = 60.0) -> tuple[int, str]:
        """Wait for its end. Returns its exit code and all that it printed; one that runs on is killed, and raises."""
        try:
            return self.process.wait(within_s), self.printed()
        finally:
            self.process.kill()


def start(folder: Path, module: str, *arguments: str, env: Mapping[str, str] = EMPTY, given: bytes = b"") -> Command:
    """Run a command's module. env: variables beside this process's own, less its settings. given: standard input."""
    log = folder / f"{module}-{secrets.token_hex(4)}.log"
    log.touch()
    (given_file := log.with_suffix(".given")).write_bytes(given)
    args = (module, arguments, own_variables() | dict(env), str(log), "", str(given_file))
    process = _context.Process(target=_run, args=args)
    process.start()
    return Command(Warm(process), log)


def own_variables() -> dict[str, str]:
    """The variables of this process, without settings of the swarm."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}


def _run(
    module: str, arguments: tuple[str, ...], env: dict[str, str], log: str, namespace: str, given: str = os.devnull
) -> None:
    os.setsid()  # as a terminal or systemd starts commands: Linux shares processor time among sessions
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell began the run in the background
    with open(log, "ab", buffering=0) as file, open(given, "rb", buffering=0) as start:
        os.dup2(start.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays open
    assert PRELOADED in sys.modules, "nothing was imported before the fork: PYTHONPATH must name the repository"
    if namespace:
        enter(NAMESPACES / namespace)
    if not bind(os.getppid(), ProcessLimits().descriptors_max, ProcessLimits().data_bytes_max):
        return
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # looked up anew
    config.DATA_DIR = Path(platformdirs.user_data_dir("swarm"))
    random.seed()
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def enter(namespace: str | Path) -> None:
    """Be in another network from now on. Sockets that are open already stay where they were made.

    namespace: a name of `ip netns`, or the path of a process's network, whose user namespace is entered, too.
    """
    network = NAMESPACES / namespace
    owner = network.with_name("user")
    if owner.exists() and not owner.samefile("/proc/self/ns/user"):
        _set_namespace(owner, CLONE_NEWUSER)
    _set_namespace(network, CLONE_NEWNET)


def _set_namespace(path: Path, kind: int) -> None:
    with path.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), kind):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {path}")
