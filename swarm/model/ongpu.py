"""Products with weights in int8 and int4 on a GPU, by kernels of Triton, which comes with torch for CUDA.

The numbers are those of `swarm.model.integer` and `swarm.model.fourbits`, to the bit: activations in two parts of 7
bits, sums of products in int32, and the same operations in float32 around them, none of which is fused. Sums of
integers have no order, so a row's result depends neither on the batch nor on how the kernel cuts the matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from swarm.model import gpukernels
from swarm.model.eightbits import IntegerMatrix
from swarm.model.fourbits import FourBitMatrix, n_blocks, tables
from swarm.model.integer import IntegerFormat, RoundedMatrix
from swarm.model.vectorcode import Weights

PRECISE = {"enable_fp_fusion": False}  # a product and a sum that are fused round once instead of twice


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kernel cuts matrices: rows, outputs and inputs of a program's pieces."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW = Cut(rows=16, outputs=32, inputs=256, warps=4, stages=4)
MANY = Cut(rows=64, outputs=128, inputs=128, warps=8, stages=3)


class GpuMatrix(RoundedMatrix):
    """A weight [out, in] on a GPU, made of one on the CPU by `of_host`."""

    host: ClassVar[type[RoundedMatrix]]

    def __init__(self, size: tuple[int, int], parts: Sequence[Tensor]) -> None:
        """parts: as the CPU's matrix has them, on the device."""
        super().__init__(*size)
        self._parts = tuple(parts)

    @classmethod
    def of_host(cls, matrix: RoundedMatrix, device: torch.device) -> "GpuMatrix":
        """Move a matrix to a device."""
        parts = [part.to(device).contiguous() for part in matrix.parts]
        return cls((matrix.n_outputs, matrix.n_inputs), parts)

    @classmethod
    def of(cls, weight: Tensor) -> "GpuMatrix":
        """Round a weight of any float dtype, on its device."""
        return cls.of_host(cls.host.of(weight.cpu()), weight.device)

    @classmethod
    def restored(cls, size: tuple[int, int], parts: Sequence[Tensor]) -> "GpuMatrix":
        """Make a matrix of its parts again, where they are."""
        return cls(size, parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What it was made of, on the host."""
        return tuple(part.cpu() for part in self._parts)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return sum(part.nbytes for part in self._parts)

    def multiply(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out] of the same dtype. Servers do not train: no gradient passes."""
        rows = input.reshape(-1, self.n_inputs)
        with torch.cuda.device_of(input):  # Triton launches where torch is
            return self._multiply(rows).view(*input.shape[:-1], self.n_outputs)

    def _multiply(self, rows: Tensor) -> Tensor:
        parts, peaks = split(rows)
        output = torch.empty(len(rows), self.n_outputs, dtype=rows.dtype, device=rows.device)
        cut = FEW if len(rows) <= FEW.rows else MANY
        grid = (triton.cdiv(len(rows), cut.rows), triton.cdiv(self.n_outputs, cut.outputs))
        options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": cut.stages} | PRECISE
        sizes = (len(rows), self.n_outputs, self.n_inputs, cut.rows, cut.outputs, cut.inputs)
        kernel, weights, number = self._kernel(len(rows))
        kernel[grid](parts, peaks, *weights, output, number, *sizes, **options)
        return output

    def _kernel(self, count: int) -> tuple[Any, tuple[Tensor, ...], int]:
        """Return the kernel for so many rows, the weights that it takes, and its own number."""
        raise NotImplementedError


class GpuIntegerMatrix(GpuMatrix):
    """A weight in int8 on a GPU."""

    weights: ClassVar[Weights] = IntegerMatrix.weights
    host: ClassVar[type[RoundedMatrix]] = IntegerMatrix
    layouts = staticmethod(IntegerMatrix.layouts)
    bytes_of = staticmethod(IntegerMatrix.bytes_of)

    def _kernel(self, count: int) -> tuple[Any, tuple[Tensor, ...], int]:
        del count
        return gpukernels.int8_products, self._parts, self.n_inputs


class GpuFourBitMatrix(GpuMatrix):
    """A weight in int4 on a GPU."""

    weights: ClassVar[Weights] = FourBitMatrix.weights
    host: ClassVar[type[RoundedMatrix]] = FourBitMatrix
    layouts = staticmethod(FourBitMatrix.layouts)
    bytes_of = staticmethod(FourBitMatrix.bytes_of)

    def _kernel(self, count: int) -> tuple[Any, tuple[Tensor, ...], int]:
        codes, numbers, scales = self._parts
        blocks, steps = n_blocks(self.n_inputs), _tables_on(codes.device)
        if count <= FEW.rows:
            return gpukernels.int4_products, (codes, numbers, steps, scales), blocks
        integers = torch.empty(self.n_outputs, self.n_inputs, dtype=torch.int8, device=codes.device)
        unpacked = 1024  # octets of an output in a program
        unpacking = self.n_outputs, triton.cdiv(blocks * 16, unpacked)  # once for all rows
        gpukernels.unpack_int4[unpacking](codes, numbers, steps, integers, blocks, self.n_inputs, unpacked, **PRECISE)
        return gpukernels.int8_products, (integers, scales), IntegerFormat.inputs_max


@cache
def _tables_on(device: torch.device) -> Tensor:
    return tables().to(device)


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations [count, in] to two parts of 7 bits: int8 [2, count, in], high ones first.

    Returns each row's peak, float32 [count], too. As `swarm.model.integer.split`, in one kernel.
    """
    count, n_inputs = rows.shape
    rows = rows.contiguous()
    parts = torch.empty(2, count, n_inputs, dtype=torch.int8, device=rows.device)
    peaks = torch.empty(count, dtype=torch.float32, device=rows.device)
    piece = min(4096, triton.next_power_of_2(n_inputs))
    gpukernels.split[(count,)](
        rows, parts, peaks, count, n_inputs, piece, num_warps=8 if piece > 1024 else 4, **PRECISE
    )
    return parts, peaks
