"""Products with weights in int4, compiled for this processor by `numba`, where that is installed.

They are those of `swarm.model.fourbits`, which computes the same numbers by torch's operations, several times as
slowly. All sums are of integers below 2^24, so float32 adds them up exactly in any order. That order is the
compiler's: it uses the vectors that this processor has.

A row of weights is unpacked into 4 bytes for each weight, which stay in the first cache, and is multiplied by all
rows of activations there. Beyond a few rows, unpacking many rows of weights for a product by torch is quicker.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.model.integer import IntegerFormat

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class CompiledKernels:
    """The kernels, for as many threads as torch has in the caller's thread. Each is compiled when it is used first."""

    def __init__(self, njit: Callable[..., Decorator]) -> None:
        """njit: `numba`'s compiler."""
        self._njit = njit

    def unpack(self, codes: Tensor, extremes: Tensor) -> Tensor:
        """Unpack weights: float32 [out, blocks * 32], integers of at most 127. codes, extremes: as `packed`'s."""
        n_outputs, blocks = extremes.shape
        steps = torch.empty(n_outputs, 32 * blocks)
        arrays, unpack = (codes.numpy(), extremes.numpy(), steps.numpy()), self._packed[0]
        _in_threads(lambda a, b: unpack(arrays[0][a:b], arrays[1][a:b], arrays[2][a:b]), n_outputs)
        return steps

    def products(self, parts: Tensor, codes: Tensor, extremes: Tensor) -> Tensor:
        """Multiply activations' parts [rows, in] by packed weights. Returns float32 [rows, out]."""
        n_outputs, blocks = extremes.shape
        if parts.shape[1] < 32 * blocks:  # the last block of weights is filled up with zeros, too
            parts = torch.nn.functional.pad(parts, (0, 32 * blocks - parts.shape[1]))
        sums = torch.empty(len(parts), n_outputs)
        arrays, multiply = (codes.numpy(), extremes.numpy(), sums.numpy(), parts.numpy()), self._packed[1]
        _in_threads(
            lambda a, b: multiply(
                arrays[0][a:b], arrays[1][a:b], arrays[2][:, a:b], arrays[3], IntegerFormat.inputs_max
            ),
            n_outputs,
        )
        return sums

    def products_of_groups(self, parts: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        """Multiply activations' parts [rows, in] by a checkpoint's own codes. Returns float32 [rows, out].

        codes, zeros, scales: as an `OwnMatrix` has them, scales in float32.
        """
        sums = torch.empty(len(parts), len(codes))
        arrays, multiply = (codes.numpy(), zeros.numpy(), scales.numpy(), sums.numpy(), parts.numpy()), self._grouped
        _in_threads(
            lambda a, b: multiply(arrays[0][a:b], arrays[1][a:b], arrays[2][a:b], arrays[3][:, a:b], arrays[4]),
            len(codes),
        )
        return sums

    @cached_property
    def _packed(self) -> tuple[Callable[..., None], Callable[..., None]]:
        return _compiled(self._njit)

    @cached_property
    def _grouped(self) -> Callable[..., None]:
        return _compiled_groups(self._njit)


@cache
def kernels() -> CompiledKernels | None:
    """Return the kernels, which are compiled once in a process. None where `numba` is not installed."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    return CompiledKernels(numba.njit)


def is_installed() -> bool:
    """Whether there is `numba`, without the time that importing it takes."""
    return find_spec("numba") is not None


def _in_threads(work: Callable[[int, int], None], n_outputs: int) -> None:
    """Do work for all outputs, each thread for its share of them."""
    threads = torch.get_num_threads()
    if threads == 1:
        work(0, n_outputs)
        return
    bounds = [n_outputs * thread // threads for thread in range(threads + 1)]
    list(_pool(threads).map(work, bounds, bounds[1:]))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "int4")


def _compiled(njit: Callable[..., Decorator]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile both loops. Their code keeps to operations that a compiler turns into vectors."""

    @njit("void(uint8[:, ::1], int8[:, ::1], float32[:, ::1])", nogil=True)
    def unpack(codes: Any, extremes: Any, steps: Any) -> None:  # noqa: ANN401 - arrays
        for output in range(extremes.shape[0]):
            for block in range(extremes.shape[1]):
                extreme = np.int32(extremes[output, block])
                for byte in range(16):
                    both = codes[output, 16 * block + byte]
                    # An eighth of the product, rounded to the nearest integer, and halves to the even one.
                    low = np.int32(extreme * np.int32(8 - np.int32(both & np.uint8(15))))
                    steps[output, 32 * block + byte] = np.float32(
                        np.int32(np.int32(low + np.int32(3) + np.int32(np.int32(low >> 3) & np.int32(1))) >> 3)
                    )
                    high = np.int32(extreme * np.int32(8 - np.int32(both >> np.uint8(4))))
                    steps[output, 32 * block + 16 + byte] = np.float32(
                        np.int32(np.int32(high + np.int32(3) + np.int32(np.int32(high >> 3) & np.int32(1))) >> 3)
                    )

    @njit(
        "void(uint8[:, ::1], int8[:, ::1], float32[:, :], float32[:, ::1], int64)",
        nogil=True,
        fastmath={"reassoc", "contract", "nsz"},  # sums are exact in any order
    )
    def multiply(codes: Any, extremes: Any, sums: Any, parts: Any, inputs_max: int) -> None:  # noqa: ANN401 - arrays
        steps = np.empty((1, 32 * extremes.shape[1]), np.float32)
        for output in range(extremes.shape[0]):
            unpack(codes[output : output + 1], extremes[output : output + 1], steps)
            for row in range(parts.shape[0]):
                total = np.float32(0)
                for first in range(0, parts.shape[1], inputs_max):
                    ours, theirs = parts[row, first : first + inputs_max], steps[0, first : first + inputs_max]
                    exact = np.float32(0)
                    for at in range(ours.shape[0]):
                        exact += ours[at] * theirs[at]
                    total = np.float32(np.float64(total) + exact)  # rounded here: no compiler moves it into the sum
                sums[row, output] = total

    return unpack, multiply


def _compiled_groups(njit: Callable[..., Decorator]) -> Callable[..., None]:
    """Compile the loop over groups. Sums within a group are exact in any order; those of groups keep theirs."""

    @njit("float32(float32[::1], float32[::1])", nogil=True, fastmath={"reassoc", "contract", "nsz"})
    def exact(ours: Any, theirs: Any) -> Any:  # noqa: ANN401 - arrays, and a number
        total = np.float32(0)
        for at in range(ours.shape[0]):
            total += ours[at] * theirs[at]
        return total

    @njit("void(uint8[:, ::1], int8[:, ::1], float32[:, ::1], float32[:, :], float32[:, ::1])", nogil=True)
    def multiply(codes: Any, zeros: Any, scales: Any, sums: Any, parts: Any) -> None:  # noqa: ANN401 - arrays
        groups = zeros.shape[1]
        size = parts.shape[1] // groups
        steps = np.empty(parts.shape[1], np.float32)
        for output in range(codes.shape[0]):
            for group in range(groups):
                zero = np.int32(zeros[output, group])
                for byte in range(group * size // 2, (group + 1) * size // 2):
                    both = codes[output, byte]
                    steps[2 * byte] = np.float32(np.int32(both & np.uint8(15)) - zero)
                    steps[2 * byte + 1] = np.float32(np.int32(both >> np.uint8(4)) - zero)
            for row in range(parts.shape[0]):
                total = np.float32(0)
                for group in range(groups):
                    inputs = slice(group * size, (group + 1) * size)
                    scaled = np.float32(exact(parts[row, inputs], steps[inputs]) * scales[output, group])
                    total = np.float32(total + scaled)
                sums[row, output] = total

    return multiply
