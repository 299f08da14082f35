"""Start a child that cannot outlive this process: run as a script, it sets the limits and then becomes the child.

`python -I -S launch.py PARENT_PID DESCRIPTORS_MAX DATA_BYTES_MAX PROGRAM ARG...`

On Linux the kernel kills the child when the *thread* that started it ends (PR_SET_PDEATHSIG), so even `kill -9` of the
parent leaves nothing behind. Setting it here, between fork and exec, and not in a `preexec_fn` keeps Python code out of
a forked copy of a process with threads. It imports the standard library only and costs about 10 ms.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path


def command(program: str, *args: str, descriptors_max: int, data_bytes_max: int) -> tuple[str, ...]:
    """Return the command line that runs `program` bound to the calling process, with limits on files and memory."""
    limits = (str(os.getpid()), str(descriptors_max), str(data_bytes_max))
    return (sys.executable, "-I", "-S", str(Path(__file__)), *limits, program, *args)


def bind(parent: int, descriptors_max: int, data_bytes_max: int) -> bool:
    """Set the limits, and let this process end with its parent. Returns False if that is already gone."""
    for kind, value in ((resource.RLIMIT_NOFILE, descriptors_max), (resource.RLIMIT_DATA, data_bytes_max)):
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS has no RLIMIT_DATA worth the name
            resource.setrlimit(kind, (limit, limit))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return os.getppid() == parent  # else it died before the line above


if __name__ == "__main__" and bind(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):
    os.execv(sys.argv[4], sys.argv[4:])  # noqa: S606 - no shell is wanted
