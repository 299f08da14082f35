"""What the C library does with memory that is free again: keep it while work goes on, give it back now and then.

Every step makes and frees tensors. By default glibc maps large ones afresh and gives the end of a heap back whenever it
is free, so that the system has to clear the same pages for each layer of each step: up to three quarters of a decode
step, with pasts of 500 positions. Other C libraries are left alone.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_BYTES_MIN = 4 << 20  # what is larger is given back at once: heaps that hold that, too, end up full of holes
KEPT_BYTES_MAX = 32 << 20  # of free memory at the end of a heap


def keep_free_memory() -> None:
    """Let this process use its memory again instead of returning it, until `return_free_memory`."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        change(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


def return_free_memory() -> None:
    """Give back to the system what is free inside of this process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
