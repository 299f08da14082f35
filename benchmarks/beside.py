"""Servers that start beside a measurement, at a low priority: elsewhere each would have a machine of its own."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from swarm.demo.local import LocalProcess
from swarm.errors import SwarmError

LOW = 19  # the nice value of what is not to disturb


def beside(server: LocalProcess) -> LocalProcess:
    """Have a server start at a low priority, p2pd too. Then it has that of others, where this process may say so."""
    threading.Thread(target=_follow, args=(server,), daemon=True).start()
    return server


def _follow(server: LocalProcess) -> None:
    with suppress(PermissionError, SwarmError):
        while not server.is_ready():
            _prioritise(server, LOW)
            time.sleep(0.02)
        _prioritise(server, 0)


def _prioritise(server: LocalProcess, nice: int) -> None:
    """Give all threads of a server and of its children a nice value. On Linux a child's session competes as a whole."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
        process = psutil.Process(server.process.pid)
        for each in (process, *process.children()):
            for thread in each.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, nice)
            if each is not process:
                Path(f"/proc/{each.pid}/autogroup").write_text(str(nice))
