"""Weights in memory of our own instead of mapped from files.

`from_pretrained` leaves a tensor that needs no conversion where it is: in the mapped file. A program that rewrites that
file while a server runs would change its weights behind its back, or end it with a bus error. So such tensors are
copied, one by one, and the pages that they were read from are let go at once, so that there are never two copies of a
span in memory.
"""

import ctypes
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def own_weights(model: nn.Module, files: set[str]) -> None:
    """Copy each parameter and buffer that lies in one of the files (resolved paths) into memory of its own."""
    mapped = _mapped(files)
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            address = tensor.data_ptr()
            if not any(start <= address < stop for start, stop in mapped):
                continue
            if address not in copies:
                copies[address] = _copy(tensor.detach())
                _let_go(address, tensor.numel() * tensor.element_size())
            tensor.data = copies[address]


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to an address of the same alignment: kernels sum in another order where that differs.

    So a span and a stock model on the mapped file compute the same, to the last bit.
    """
    if not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.preserve_format)
    size = tensor.numel() * tensor.element_size()
    alignment = 64  # bytes: a cache line, and the widest vector register
    room = torch.empty(size + alignment, dtype=torch.uint8, device=tensor.device)
    offset = (tensor.data_ptr() - room.data_ptr()) % alignment
    return room[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _mapped(files: set[str]) -> list[tuple[int, int]]:
    """Return the address ranges that are mapped from these files; none where the system has no list of them."""
    return [bounds for bounds, path in _maps() if path in files]


def _maps() -> Iterator[tuple[tuple[int, int], str]]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6:
                    start, _, stop = fields[0].partition("-")
                    yield (int(start, 16), int(stop, 16)), fields[5]
    except FileNotFoundError:
        return


def _let_go(address: int, n_bytes: int) -> None:
    """Drop the whole pages of a read-only file mapping from this process. A page that is needed again is read again."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if length > 0 and advise is not None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))
