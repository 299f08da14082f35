"""A process that keeps its memory touches no new pages when it needs as much again."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, threading, torch
from swarm.model.allocator import keep_free_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_free_memory()
def work():
    for _ in range(3):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in range(300, 400):  # longer with each step, as a past is
            tensors = [torch.ones(size * 1024 + 256 * n) for n in range(4)]
            del tensors
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.long
def test_what_steps_free_is_used_again():
    kept, usual = (
        int(subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "leave")
    )
    assert kept < 1000, usual
    assert usual > 5 * max(kept, 1)
