"""A checkpoint's own weights of 4 bits, as they are: codes with a scale and a zero point for each group of inputs.

Formats such as GPTQ's store a weight as (code - zero) * scale. Nothing is rounded here. Activations are rounded as for
int8 (`swarm.model.integer`), so a group's sum of products is one of integers, exact in float32 in any order. The groups
of an output are then scaled and added up one after the other, so the bits depend on the row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from swarm.limits import limit
from swarm.model.compiled import Packed, kernels
from swarm.model.integer import RoundedMatrix, joined, split
from swarm.model.stored import Grid, Stored
from swarm.model.vectorcode import Weights
from swarm.model.writing import Layout


class OwnFormat:
    """Which groups can be multiplied exactly: 63 * 15 * 2048 < 2^24."""

    smallest: Final = 16
    largest: Final = 2048


@dataclass(frozen=True, slots=True)
class OwnLimits:
    """What a product takes beside the weights."""

    unpacked_max: int = limit(1 << 20, "weights", "unpacked at once in float32; further outputs wait for their turn")


class OwnMatrix(RoundedMatrix):
    """A weight [out, in] in the checkpoint's codes."""

    weights: ClassVar[Weights] = "own4"
    rounds: ClassVar[bool] = False

    def __init__(self, codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> None:
        """codes: uint8 [out, in / 2], two in an octet, the first one in the low bits, by groups.

        zeros: int8 [out, groups]. scales: a float [out, groups]. order: int64 [in], the inputs' numbers by groups.
        """
        super().__init__(len(codes), 2 * codes.shape[1])
        self._codes, self._zeros, self._scales, self._order = codes, zeros, scales, order
        self._limits = OwnLimits()

    @classmethod
    def taken(cls, weight: Stored) -> "OwnMatrix | None":
        """Take a weight as a checkpoint stores it; None where its codes do not fit."""
        if not isinstance(weight, Grid) or weight.shape[1] % 2:
            return None
        order, size = None, weight.group_size
        if weight.groups is not None:
            counts = weight.groups.bincount(minlength=weight.scales.shape[1])
            size = int(counts[0]) if bool((counts == counts[0]).all()) else None
            order = weight.groups.argsort(stable=True)
        if size is None or size % 2 or not fits(size):
            return None
        if any(bool((numbers < 0).any() or (numbers > 15).any()) for numbers in (weight.codes, weight.zeros)):
            return None
        codes = weight.codes if order is None else weight.codes[:, order]
        both = codes[:, ::2] | codes[:, 1::2] << 4
        return cls(both.contiguous(), weight.zeros.to(torch.int8).contiguous(), _narrowed(weight.scales), order)

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Refuse: no plain weight has such codes."""
        raise NotImplementedError

    @classmethod
    def restored(cls, _size: tuple[int, int], parts: Sequence[Tensor]) -> "OwnMatrix":
        """Make a matrix of its parts again."""
        return cls(*parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, zeros and scales, and the order where there is one."""
        parts = self._codes, self._zeros, self._scales
        return parts if self._order is None else (*parts, self._order)

    @staticmethod
    def layouts(_n_outputs: int, _n_inputs: int) -> dict[str, Layout]:
        """Refuse: parts depend on the checkpoint, and no cache keeps them."""
        raise NotImplementedError

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int, group_size: int = 128) -> int:
        """Return the memory of a matrix of this size."""
        return n_outputs * (n_inputs // 2 + 3 * (n_inputs // group_size))

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return sum(part.nbytes for part in self.parts)

    def multiply(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out] of the same dtype. Servers do not train: no gradient passes."""
        rows = input.reshape(-1, self.n_inputs)
        rows = rows if self._order is None else rows[:, self._order]
        size, compiled = self.n_inputs // self._zeros.shape[1], kernels("own4")
        if compiled is None or size % 32:
            parts, peak = split(rows.float())
            output = joined(self._products(parts), peak).to(input.dtype)
        else:
            matrix = Packed("own4", self._codes, self._zeros, self._scales.float(), size // 32)
            output = compiled.multiply(rows, matrix)
        return output.view(*input.shape[:-1], self.n_outputs)

    def _products(self, parts: Tensor) -> Tensor:
        """Multiply activations' parts [rows, in]. Returns float32 [rows, out], the same as the compiled kernel."""
        groups = self._scales.shape[1]
        by_groups = parts.view(len(parts), groups, -1).transpose(0, 1)
        sums = parts.new_zeros(len(parts), self.n_outputs)
        outputs = max(1, self._limits.unpacked_max // self.n_inputs)
        for start in range(0, self.n_outputs, outputs):
            stop = min(start + outputs, self.n_outputs)
            scaled = torch.bmm(by_groups, self.steps(start, stop).permute(1, 2, 0))
            scaled *= self._scales[start:stop].t().float()[:, None]
            total = sums[:, start:stop]
            for group in scaled:  # one after the other: sums that are not exact have an order
                total += group
        return sums

    def steps(self, start: int, stop: int) -> Tensor:
        """Unpack the weights of some outputs: float32 [outputs, groups, inputs], integers from -15 to 15."""
        both = self._codes[start:stop]
        codes = torch.stack([both & 15, both >> 4], dim=-1).view(stop - start, self._zeros.shape[1], -1)
        return codes.float() - self._zeros[start:stop, :, None]


def fits(group_size: int) -> bool:
    """Whether groups of so many inputs are multiplied exactly."""
    return OwnFormat.smallest <= group_size <= OwnFormat.largest


def _narrowed(scales: Tensor) -> Tensor:
    """Return scales in the smallest dtype that has their numbers."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype).contiguous()
    return scales.contiguous()
