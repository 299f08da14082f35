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
    """Give all threads of a server and of its children a nice value. On Linux a session of its own competes as a whole.

    Threads and children that end meanwhile are left out: the others must not keep their value.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(server.process.pid)
        for each in (process, *process.children()):
            with suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                for thread in each.threads():
                    with suppress(ProcessLookupError):
                        os.setpriority(os.PRIO_PROCESS, thread.id, nice)
                if os.getsid(each.pid) != os.getsid(0):
                    Path(f"/proc/{each.pid}/autogroup").write_text(str(nice))
