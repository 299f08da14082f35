"""Weights in int4: a quarter of bfloat16's memory, and the products of int8.

A weight of int4 is a weight of int8 that is stored in fewer bits. A row of a matrix has one scale, so that its largest
weight is 127 steps, as in int8. 16 weights share a *number*, which names one of 256 tables of 16 steps: eight books of
levels, in 32 sizes. A weight's code is its place in the table.

    scale = largest |weight| of the row / 127    quarters = round(4 weight / scale)
    code = the step of a table that is nearest to the weight    number = the table of least squared error, in quarters

The table is sought among eight sizes: the largest that does not go beyond the largest weight, and the next larger ones.
Halves go to the even number, and of two that are equal the lower one is taken. Errors are integers, and their sums are
below 2^24, so codes have the same bits on every processor. The books come from Lloyd's method over blocks of normal and
of Student's t numbers, and of the demo's weights (S. Lloyd, Least squares quantization in PCM, 1982).

Where it is known how large a layer's inputs are (`swarm.model.importance`), errors are weighed by their mean squares:
the table is that of least error in the layer's output, as far as inputs do not depend on each other.

    share = round(65535 mean square / largest mean square of the half)    error = floor(8 error share / 65536)

Steps are integers of at most 127, so products with activations in two parts of 7 bits are exact in float32, as long as
they are added up over at most `inputs_max` inputs: 63 * 127 * 2048 < 2^24. Any kernel of any processor then gives the
same sum. Weights are unpacked while they are multiplied: by compiled code where there is some
(`swarm.model.compiled`), else some outputs at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from swarm.limits import limit
from swarm.model.compiled import Packed, Search, kernels
from swarm.model.integer import IntegerFormat, RoundedMatrix, joined, products, split
from swarm.model.vectorcode import Weights
from swarm.model.writing import Layout


class FourBitFormat:
    """The numbers of the rounding and of the sums. Others would be another numeric class."""

    block: Final = 32  # weights of one output in 16 octets: two halves, each with a number of its own
    half: Final = 16
    sought: Final = 8  # sizes
    finer: Final = 16  # a block's smallest layers, up to this part of its weights, are int8 (`swarm.model.kinds`)
    quarters: Final = 4 * 127  # the farthest a weight is from zero
    share_most: Final = (1 << 16) - 1  # of errors that are weighed
    eighths: Final = 8  # in which these are added up
    books: Final = (  # in 1/1024 of a size; each is there in its mirror as well
        (-1024, -876, -711, -576, -460, -346, -228, -106, 24, 145, 258, 370, 483, 605, 745, 914),
        (-1024, -851, -659, -520, -399, -289, -181, -77, 19, 111, 208, 315, 430, 559, 707, 881),
        (-1024, -836, -636, -479, -359, -250, -154, -66, 14, 94, 181, 278, 389, 512, 659, 877),
        (-1024, -776, -556, -419, -302, -208, -126, -51, 14, 77, 150, 231, 330, 444, 595, 861),
    )
    sizes: Final = (  # in 1/16 of a step, from 127 steps to 8, each 0.915 of the one before
        *(2032, 1859, 1700, 1555, 1422, 1301, 1190, 1088, 996, 911, 833, 762, 697, 637, 583, 533),
        *(488, 446, 408, 373, 341, 312, 286, 261, 239, 219, 200, 183, 167, 153, 140, 128),
    )


@dataclass(frozen=True, slots=True)
class FourBitLimits:
    """What rounding and a product take beside the weights."""

    rounded_max: int = limit(1 << 18, "weights", "rounded at once; each half block's 64 errors take 256 octets")
    unpacked_max: int = limit(1 << 20, "weights", "unpacked at once in float32; further outputs wait for their turn")


@cache
def tables() -> Tensor:
    """Return the steps of each number's codes: int8 [256, 16]. A number is eight times a size's, and a book's."""
    books = [book for one in FourBitFormat.books for book in (one, [-level for level in reversed(one)])]
    levels = torch.tensor(FourBitFormat.sizes)[:, None, None] * torch.tensor(books)
    return (levels.double() / (1024 * 16)).round_().to(torch.int8).view(256, 16)


@cache
def unsigned() -> Tensor:
    """Return the tables with 128 more: uint8 [256, 16]."""
    return (tables().short() + 128).to(torch.uint8)


@cache
def _errors() -> tuple[Tensor, Tensor]:
    """Return each weight's squared error in each table, int32 [1017, 256], and its code, uint8 [256, 1017].

    Weights are in quarters of a step, from -508 on.
    """
    most = FourBitFormat.quarters
    weights = torch.arange(-most, most + 1, dtype=torch.int32)[:, None]
    levels = 4 * tables().int()
    least, code = (weights - levels[:, 0]).square_(), torch.zeros(2 * most + 1, 256, dtype=torch.uint8)
    for other in range(1, 16):
        error = (weights - levels[:, other]).square_()
        code[error < least] = other
        least = torch.minimum(least, error)
    return least, code.t().contiguous()


@cache
def _errors_from(size: int) -> Tensor:
    """Return the errors of the tables of eight sizes, from this one on: float32 [1017, 64]."""
    return _errors()[0][:, 8 * size : 8 * (size + FourBitFormat.sought)].float().contiguous()


@cache
def _starts() -> Tensor:
    """Return the first size that is sought, by a half block's largest weight in quarters: uint8 [509]."""
    tops = torch.tensor(FourBitFormat.sizes[::-1], dtype=torch.int32) // 4  # of a size's levels, in quarters
    larger = len(tops) - torch.bucketize(torch.arange(FourBitFormat.quarters + 1), tops, right=True)
    return (larger - (FourBitFormat.sought - 1)).clamp_(0, len(tops) - FourBitFormat.sought).to(torch.uint8)


@cache
def _weighed_errors() -> Tensor:
    """Return the errors that are multiplied with shares, in eighths: int64 [1017, 256], of 16 bits."""
    most = FourBitFormat.share_most // FourBitFormat.eighths
    return _errors()[0].clamp(max=most).mul(FourBitFormat.eighths).long()


@cache
def _search(*, weighed: bool) -> Search:
    """Return the tables for compiled rounding. Errors of more than 16 bits stay at their largest number."""
    errors, codes = _errors()
    each = torch.arange(16, dtype=torch.uint8).expand(256, 16).contiguous()
    ends = torch.searchsorted(codes, each, right=True) - 1  # codes ascend with the weights
    saturated = (_weighed_errors() if weighed else errors.clamp(max=(1 << 16) - 1)).to(torch.uint16)
    return Search(saturated, ends.to(torch.int16), _starts())


def shares_of(squares: Tensor) -> Tensor:
    """Return how much each input's errors count, by the mean squares of the inputs: int64 [blocks * 32].

    squares: float32 [in]. The largest of each half block is 65535, and none is 0 but of inputs that fill up a block.
    """
    padding = n_blocks(len(squares)) * FourBitFormat.block - len(squares)
    halves = nn.functional.pad(squares.double(), (0, padding)).view(-1, FourBitFormat.half)
    part = (halves / halves.amax(1, keepdim=True)).nan_to_num_(1.0)  # of zeros alone each counts alike
    shares = part.mul_(FourBitFormat.share_most).round_().clamp_(min=1).long().flatten()
    shares[len(squares) :] = 0
    return shares


def _numbers(quarters: Tensor, shares: Tensor | None) -> Tensor:
    """Return the number of each half block, uint8 [halves]. quarters: int32 [halves, 16], from 0 on.

    shares: int64 [halves, 16], by which errors are weighed; None: all count alike.
    """
    most = FourBitFormat.quarters
    peaks = (quarters - most).abs_().amax(-1)
    starts = _starts()[peaks]
    numbers = torch.empty(len(quarters), dtype=torch.uint8)
    tables_sought = 8 * FourBitFormat.sought
    for start in starts.unique().tolist():
        those = (starts == start).nonzero()[:, 0]
        if shares is None:
            sums = nn.functional.embedding_bag(quarters[those], _errors_from(start), mode="sum")  # exact
        else:
            sums = _weighed_sums(quarters[those], shares[those], start)
        ranks = sums.to(torch.int32).mul_(tables_sought).add_(torch.arange(tables_sought, dtype=torch.int32))
        first = ranks.amin(-1) % tables_sought  # of several that are equal; argmin does not promise it
        numbers[those] = (first + 8 * start).to(torch.uint8)
    return numbers


def _weighed_sums(quarters: Tensor, shares: Tensor, start: int) -> Tensor:
    """Return the errors of the tables of eight sizes, from `start` on, weighed: int64 [halves, 64], of 16 bits."""
    errors = _weighed_errors()[:, 8 * start : 8 * (start + FourBitFormat.sought)]
    sums = torch.zeros(len(quarters), errors.shape[1], dtype=torch.int64)
    for each in range(FourBitFormat.half):
        sums += (errors[quarters[:, each]] * shares[:, each, None]) >> 16
    return sums.clamp_(max=(1 << 16) - 1)


def packed(
    weight: Tensor,
    limits: FourBitLimits = FourBitLimits(),
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix [out, in] to int4. Returns its codes, its half blocks' numbers and its rows' scales.

    squares: float32 [in], the mean squares of its inputs; None: they are not known.
    codes: uint8 [out, blocks * 16]; a block's octet has a weight of its first half in the low bits, and one of its
    second half in the high bits. numbers: uint8 [out, blocks * 2]. scales: float32 [out]. What lacks of a row's last
    block are zeros. The same bits on every processor.
    """
    n_outputs, n_inputs = weight.shape
    blocks, compiled = n_blocks(n_inputs), kernels("int4")
    codes = torch.empty(n_outputs, blocks * FourBitFormat.half, dtype=torch.uint8, device="cpu")
    numbers = torch.empty(n_outputs, 2 * blocks, dtype=torch.uint8, device="cpu")
    scales = torch.empty(n_outputs, dtype=torch.float32, device="cpu")
    rows = max(1, limits.rounded_max // n_inputs)
    shares, search = (None if squares is None else shares_of(squares)), _search(weighed=squares is not None)
    if shares is not None:
        search = replace(search, shares=shares.to(torch.uint16))
    for start in range(0, n_outputs, rows):
        some = slice(start, start + rows)
        part = weight[some]
        parts = _rounded(part.detach().float(), shares) if compiled is None else compiled.sought(part, search)
        codes[some], numbers[some], scales[some] = parts
    return codes, numbers, scales


def _rounded(part: Tensor, shares: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round some rows, float32 [out, in], by torch's operations. What is no number becomes zero, and its scale none.

    shares: int64 [blocks * 32], or None.
    """
    half, most, blocks = FourBitFormat.half, FourBitFormat.quarters, n_blocks(part.shape[1])
    scale = (part.abs().amax(1) / IntegerFormat.weight_steps).clamp(min=IntegerFormat.least)
    quarters = (part / scale[:, None]).nan_to_num_(0.0).mul_(4).round_().add_(most)
    quarters = nn.functional.pad(quarters, (0, blocks * FourBitFormat.block - part.shape[1]), value=float(most))
    quarters = quarters.to(torch.int32).reshape(-1, half)
    number = _numbers(quarters, None if shares is None else shares.view(-1, half).repeat(len(part), 1))
    code = _errors()[1][number.int()[:, None], quarters].view(len(part), blocks, 2, half)
    return (code[:, :, 0] | code[:, :, 1] << 4).flatten(1), number.view(len(part), -1), scale


def n_blocks(n_inputs: int) -> int:
    """Return how many blocks a row has. The last one is filled up with zeros."""
    return -(-n_inputs // FourBitFormat.block)


class FourBitMatrix(RoundedMatrix):
    """A weight [out, in] in int4."""

    weights: ClassVar[Weights] = "int4"

    def __init__(
        self,
        n_inputs: int,
        codes: Tensor,
        numbers: Tensor,
        scales: Tensor,
        limits: FourBitLimits = FourBitLimits(),
    ) -> None:
        """codes, numbers, scales: as `packed` returns them."""
        super().__init__(len(scales), n_inputs)
        self._codes, self._numbers, self._scales = codes, numbers, scales
        chunk = IntegerFormat.inputs_max // FourBitFormat.block
        self._matrix = Packed("int4", codes, numbers, scales, chunk, unsigned())
        self._limits = limits

    @classmethod
    def of(cls, weight: Tensor, squares: Tensor | None = None) -> "FourBitMatrix":
        """Round a weight of any float dtype. squares: as `packed` takes them."""
        return cls(weight.shape[1], *packed(weight, squares=squares))

    @classmethod
    def restored(cls, size: tuple[int, int], parts: Sequence[Tensor]) -> "FourBitMatrix":
        """Make a matrix of its parts again."""
        codes, numbers, scales = parts
        return cls(size[1], codes, numbers, scales)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, numbers and scales, as `packed` returns them."""
        return self._codes, self._numbers, self._scales

    @staticmethod
    def layouts(n_outputs: int, n_inputs: int) -> dict[str, Layout]:
        """Return the dtype and shape of each part of a matrix of this size."""
        blocks = n_blocks(n_inputs)
        return {
            "codes": Layout(torch.uint8, (n_outputs, blocks * FourBitFormat.block // 2)),
            "numbers": Layout(torch.uint8, (n_outputs, 2 * blocks)),
            "scales": Layout(torch.float32, (n_outputs,)),
        }

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        """Return the memory of a matrix of this size."""
        return sum(layout.n_bytes for layout in FourBitMatrix.layouts(n_outputs, n_inputs).values())

    def multiply(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out] of the same dtype. Servers do not train: no gradient passes."""
        rows, compiled = input.reshape(-1, self.n_inputs), kernels("int4")
        if compiled is None:
            output = self._product(rows.float()).to(input.dtype)
        else:
            output = compiled.multiply(rows, self._matrix)
        return output.view(*input.shape[:-1], self.n_outputs)

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
        codes, blocks = self._codes[start:stop], self._codes.shape[1] // FourBitFormat.half
        halves = torch.stack([codes & 15, codes >> 4], 1).view(len(codes), 2, blocks, -1).transpose(1, 2)
        numbers = self._numbers[start:stop].view(len(codes), blocks, 2, 1)
        steps = tables()[numbers.int(), halves.int()]
        return steps.float().flatten(1)[:, : self.n_inputs]
