"""Makes a process as bare as a client's on Windows: without hivemind and uvloop, and without what only Unix has.

A pytest plugin (`-p tests.support.bare`); or `python -m tests.support.bare MODULE ARGUMENTS...` runs a command. Third
parties keep their parts of Unix, because they have others on Windows: modules are hidden from the swarm's own modules
alone, and names are removed once the third parties have been imported.
"""

import asyncio
import builtins
import importlib
import mmap
import os
import signal
import socket
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest

NOT_INSTALLED = ("hivemind", "uvloop")
NOT_ON_WINDOWS = ("fcntl", "grp", "pwd", "resource", "termios")
THIRD_PARTIES = (
    "torch",
    "transformers",
    "platformdirs",
    "pydantic_settings",
    "structlog",
    "transformers.models.llama.modeling_llama",
    "libp2p",
    "trio",
    "psutil",
    "click",
)
NAMES: dict[ModuleType, tuple[str, ...]] = {
    mmap: ("MAP_ANON", "MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED"),
    os: ("fork", "forkpty", "getloadavg", "killpg", "sched_getaffinity", "setpgrp", "setsid", "sysconf"),
    signal: ("SIGHUP", "SIGUSR1", "SIGUSR2"),
    socket: ("MSG_DONTWAIT", "SO_REUSEPORT"),
}


def bare(spared: str = "") -> None:
    """Hide it all, for good. spared: a module of the swarm that still sees Unix."""
    assert not any(name.partition(".")[0] == "swarm" for name in sys.modules), "the swarm has been imported already"
    sys.modules.update(dict.fromkeys(NOT_INSTALLED))
    for name in THIRD_PARTIES:
        importlib.import_module(name)
    for module, names in NAMES.items():
        for name in names:
            delattr(module, name)
    asyncio.SelectorEventLoop.add_signal_handler = _not_there  # type: ignore[method-assign]
    warnings.filterwarnings("error", category=EncodingWarning, module=r"swarm\b")  # with -X warn_default_encoding
    imports = builtins.__import__

    def import_(name: str, within: Any = None, *args: Any, **kwargs: Any) -> ModuleType:
        importer = (within or {}).get("__name__", "")
        if name in NOT_ON_WINDOWS and importer.partition(".")[0] == "swarm" and importer != spared:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imports(name, within, *args, **kwargs)

    builtins.__import__ = import_


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Be bare before any test is imported, only able to start servers."""
    bare(spared="swarm.net.launch")


def _not_there(*_: object) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    bare()
    sys.argv = sys.argv[1:]
    importlib.import_module(sys.argv[0]).main()
