"""Freed memory of the C library: kept while work goes on, given back now and then.

Every step makes and frees tensors. By default glibc maps large ones afresh and gives the end of a heap back whenever it
is free, so that the system has to clear the same pages for each layer of each step: up to three quarters of a decode
step, with pasts of 500 positions. Other C libraries are left alone.
"""

import ctypes


def keep_free_memory() -> None:
    """Let this process use its memory again instead of returning it, until `return_free_memory`."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(-3, 4 << 20)  # M_MMAP_THRESHOLD, bytes: larger blocks go back at once, or heaps end up full of holes
        change(-1, 32 << 20)  # M_TRIM_THRESHOLD, bytes: more free memory at the end of a heap goes back


def return_free_memory() -> None:
    """Give the free memory inside of this process back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
