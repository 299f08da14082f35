"""Memory besides that of models and pasts: freed memory in the C library, and code that kernels keep for later steps.

Freed memory is kept while work goes on, and given back now and then.

Every step makes and frees tensors. By default glibc maps large ones afresh and gives the end of a heap back whenever it
is free, so that the system has to clear the same pages for each layer of each step: up to three quarters of a decode
step, with pasts of 500 positions. Other C libraries are left alone.
"""

import ctypes
import os


def keep_free_memory() -> None:
    """Let this process use its memory again instead of returning it, until `return_kept_memory`."""
    _change(-3, 4 << 20)  # M_MMAP_THRESHOLD, bytes: larger blocks go back at once, or heaps end up full of holes
    _trim_above(32 << 20)


def return_kept_memory() -> None:
    """Give back the memory that `keep_free_memory` keeps, at the end of this thread's heap, too.

    `malloc_trim` leaves the end of all heaps but the main thread's. Freeing a block of 64 KiB or more gives that of its
    own heap back, as far as it is above the threshold.
    """
    return_free_memory()
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return
    _trim_above(128 << 10)
    library.malloc.restype = ctypes.c_void_p
    library.free(ctypes.c_void_p(library.malloc(ctypes.c_size_t(128 << 10))))
    _trim_above(32 << 20)


def return_free_memory() -> None:
    """Give the free memory inside of this process back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def bound_kernels(products: int = 64) -> None:
    """Keep the code and the scratch space of so many products of bfloat16, in this process and its children.

    oneDNN compiles code for each shape, and torch keeps that of 1,024 shapes in each of two caches: half a megabyte for
    each, 560 MB for prompts of any length. A product of a new shape takes half a millisecond more. To be called before
    the first one. These variables in the process's environment have precedence.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(products))


def _trim_above(n_bytes: int) -> None:
    """Have more free memory than that at the end of a heap go back, whenever a large block is freed there."""
    _change(-1, n_bytes)  # M_TRIM_THRESHOLD


def _change(option: int, value: int) -> None:
    """Set an option of glibc's allocator."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(option, value)
