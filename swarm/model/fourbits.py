"""Weights in int4: a quarter of bfloat16's memory, and the products of int8.

A weight of int4 is a weight of int8 that is stored in fewer bits. A row of a matrix has one scale, so that its largest
weight is 127 steps, as in int8. The 32 weights of a block become multiples of an eighth of the block's extreme, which
is the weight that is farthest from zero:

    scale = largest |weight| of the row / 127    extreme = round(weight / scale), of the one that is farthest from zero
    code = round(weight / scale / (extreme / -8)), from -8 to 7    step = round(code * extreme / -8)

Steps are integers of at most 127, so products with activations in two parts of 7 bits are exact in float32, as long as
they are added up over at most `inputs_max` inputs: 63 * 127 * 2048 < 2^24. Any kernel of any processor then gives the
same sum. Weights are unpacked while they are multiplied: by compiled code where there is some
(`swarm.model.compiled`), else some outputs at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from swarm.limits import limit
from swarm.model.compiled import Packed, kernels
from swarm.model.integer import IntegerFormat, RoundedMatrix, joined, products, split
from swarm.model.writing import Layout


class FourBitFormat:
    """The numbers of the rounding and of the sums. Others would be another numeric class."""

    block: Final = 32  # weights of one output that share an extreme
    lowest: Final = -8  # the code of a block's extreme
    highest: Final = 7


@dataclass(frozen=True, slots=True)
class FourBitLimits:
    """What a product takes beside the weights."""

    unpacked_max: int = limit(1 << 20, "weights", "unpacked at once in float32; further outputs wait for their turn")


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix [out, in] to int4. Returns its codes, its blocks' extremes and its rows' scales.

    codes: uint8 [out, blocks * 16]; a block's byte has a weight of its first half in the low bits, and one of its
    second half in the high bits, both plus 8. extremes: int8 [out, blocks]. scales: float32 [out]. Halves go to the
    even number. Of two weights that are equally far from zero the positive one is the extreme. The same bits on every
    processor.
    """
    n_outputs, n_inputs = weight.shape
    blocks = n_blocks(n_inputs)
    codes = torch.empty(n_outputs, blocks * FourBitFormat.block // 2, dtype=torch.uint8)
    extremes = torch.empty(n_outputs, blocks, dtype=torch.int8)
    scales = torch.empty(n_outputs)
    rows = max(1, (1 << 20) // n_inputs)  # as many as a cache has room for
    for start in range(0, n_outputs, rows):
        some = slice(start, start + rows)
        part = weight[some].detach().float()
        scale = (part.abs().amax(1) / IntegerFormat.weight_steps).clamp(min=IntegerFormat.least)
        steps = nn.functional.pad(part / scale[:, None], (0, blocks * FourBitFormat.block - n_inputs))
        steps = steps.view(len(part), blocks, FourBitFormat.block)
        top, bottom = steps.amax(-1), steps.amin(-1)
        extreme = torch.where(top >= -bottom, top, bottom).round_()
        unit = torch.where(extreme == 0, 1.0, extreme / FourBitFormat.lowest)  # all codes of such a block are 0
        code = (steps / unit[..., None]).round_().clamp_(FourBitFormat.lowest, FourBitFormat.highest)
        code = (code - FourBitFormat.lowest).to(torch.uint8).view(len(part), blocks, 2, -1)
        codes[some] = (code[:, :, 0] | code[:, :, 1] << 4).flatten(1)
        extremes[some] = extreme.to(torch.int8)
        scales[some] = scale
    return codes, extremes, scales


def n_blocks(n_inputs: int) -> int:
    """Return how many blocks a row has. The last one is filled up with zeros."""
    return -(-n_inputs // FourBitFormat.block)


class FourBitMatrix(RoundedMatrix):
    """A weight [out, in] in int4."""

    weights: ClassVar[str] = "int4"

    def __init__(
        self,
        n_inputs: int,
        codes: Tensor,
        extremes: Tensor,
        scales: Tensor,
        limits: FourBitLimits = FourBitLimits(),
    ) -> None:
        """codes, extremes, scales: as `packed` returns them."""
        super().__init__(len(scales), n_inputs)
        self._codes, self._extremes, self._scales = codes, extremes, scales
        chunk = IntegerFormat.inputs_max // FourBitFormat.block
        self._matrix = Packed("int4", codes, extremes, scales, chunk)
        self._limits = limits

    @classmethod
    def of(cls, weight: Tensor) -> "FourBitMatrix":
        """Round a weight of any float dtype."""
        return cls(weight.shape[1], *packed(weight))

    @classmethod
    def restored(cls, size: tuple[int, int], parts: Sequence[Tensor]) -> "FourBitMatrix":
        """Make a matrix of its parts again."""
        codes, extremes, scales = parts
        return cls(size[1], codes, extremes, scales)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, extremes and scales, as `packed` returns them."""
        return self._codes, self._extremes, self._scales

    @staticmethod
    def layouts(n_outputs: int, n_inputs: int) -> dict[str, Layout]:
        """Return the dtype and shape of each part of a matrix of this size."""
        blocks = n_blocks(n_inputs)
        return {
            "codes": Layout(torch.uint8, (n_outputs, blocks * FourBitFormat.block // 2)),
            "extremes": Layout(torch.int8, (n_outputs, blocks)),
            "scales": Layout(torch.float32, (n_outputs,)),
        }

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        """Return the memory of a matrix of this size."""
        return sum(layout.n_bytes for layout in FourBitMatrix.layouts(n_outputs, n_inputs).values())

    def multiply(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out] of the same dtype. Servers do not train: no gradient passes."""
        rows, compiled = input.reshape(-1, self.n_inputs).float(), kernels()
        output = self._product(rows) if compiled is None else compiled.multiply(rows, self._matrix)
        return output.to(input.dtype).view(*input.shape[:-1], self.n_outputs)

    def _product(self, rows: Tensor) -> Tensor:
        """Multiply float32 [count, in], to the same bits as the compiled kernel."""
        parts, peak = split(rows)
        sums = parts.new_empty(len(parts), self.n_outputs)
        outputs = max(1, self._limits.unpacked_max // self.n_inputs)
        for start in range(0, self.n_outputs, outputs):
            sums[:, start : start + outputs] = products(parts, self.steps(start, start + outputs))
        return joined(sums.mul_(self._scales), peak)

    def steps(self, start: int, stop: int) -> Tensor:
        """Unpack the weights of some outputs: float32 [out, in], integers of at most 127, in steps of their scale."""
        extremes = self._extremes[start:stop]
        codes = self._codes[start:stop].view(*extremes.shape, -1)
        steps = torch.empty(*extremes.shape, 2, codes.shape[-1])
        steps[:, :, 0] = codes & 15
        steps[:, :, 1] = codes >> 4
        lowest = extremes.float()[..., None, None]
        torch.addcmul(lowest, steps, lowest / FourBitFormat.lowest, out=steps)  # exact: eighths of small integers
        return steps.round_().flatten(1)[:, : self.n_inputs]
