"""A head in int8 that knows how far its logits may be from the exact head's.

Row i of the weight is W_i, and n_i its integers of scale s_i. For a hidden state h, which the product rounds to h', the
int8 logit z_i differs from the true one by three errors, and each has a bound (Cauchy and Schwarz):

    |W_i h - z_i| <= |W_i - s_i n_i| |h| + |s_i n_i| |h - h'| + float32's rounding in the kernel

The exact head is torch's product, and that has an error as well. Sums of d products in float32, in any order, differ
from the true sum by at most d / 2^24 of the sum of the products' magnitudes (Higham, Accuracy and Stability, 3.1). Then
the logit is rounded to the head's dtype, which keeps order. So an interval of true logits, made wider by torch's error
and rounded at both ends, holds the exact head's logit. Float64 makes such an interval of any row, and a narrow one.
"""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.limits import limit
from swarm.model.eightbits import IntegerMatrix, is_supported, rounded
from swarm.model.integer import IntegerFormat


@dataclass(frozen=True, slots=True)
class BoundLimits:
    """Which heads can have bounds, and how wide the bounds are made beside the formulas."""

    inputs_max: int = limit(1 << 16, "inputs", "a wider head stays as it is: its sums of integers could overflow")
    magnitude_max: float = limit(1e30, "", "a hidden state or row this long gets no bounds: float32 could overflow")
    slack: float = limit(1.01, "", "bounds are wider by this factor, since they are computed in floats themselves")
    terms: int = limit(8, "roundings", "torch's kernels may make so many more than one for each product")


class Bounds(NamedTuple):
    """The exact logits lie between these, both ends included; float32 [vocabulary]."""

    low: Tensor
    high: Tensor


class BoundedHead:
    """The weight of a head, and its int8 copy."""

    def __init__(self, weight: Tensor, limits: BoundLimits = BoundLimits()) -> None:
        """weight: [vocabulary, hidden_size] of which `unfit` is None. It is read later, too."""
        began = time.perf_counter()
        integers, scales = rounded(weight)
        self.weight = weight
        self._limits = limits
        self._errors, self._norms = _norms(weight, integers, scales)
        self._matrix = IntegerMatrix(integers, scales)
        self._is_finite = bool((self._norms < limits.magnitude_max).all())  # NaN is not
        self.prepared_s = time.perf_counter() - began

    @property
    def n_bytes(self) -> int:
        """Memory of the int8 copy, with its bounds."""
        return self._matrix.n_bytes + self._errors.nbytes + self._norms.nbytes

    def bounds(self, hidden: Tensor) -> Bounds | None:
        """Bound all logits of a hidden state, [1, hidden_size] in the head's dtype, by int8.

        None where it is not finite.
        """
        row = hidden.detach().float()
        width, slack = row.shape[1], self._limits.slack
        length, peak = float(row.double().norm()), float(row.abs().max())
        if not (self._is_finite and length < self._limits.magnitude_max):
            return None
        middle = self._matrix.multiply(row)[0]
        # Half a step of the low part, for each number.
        lost = math.sqrt(width) * peak / (IntegerFormat.high * 2 * IntegerFormat.low)
        torch_error = self._torch_error(width)
        of_norms = slack * (lost + length * (torch_error + 64 * 2.0**-24)) + IntegerFormat.least
        margin = self._errors * (slack * length) + self._norms * of_norms
        return self._rounded(middle - margin, middle + margin)

    def narrow(self, hidden: Tensor, rows: Tensor) -> Bounds:
        """Bound the logits of some rows, int64 [rows], as well as float64 can."""
        column = hidden.detach().double()[0]
        low, high = [], []
        for part in rows.split(512):  # as many as a cache has room for
            weights = self.weight.detach()[part].double()
            middle = weights @ column
            margin = weights.abs_() @ column.abs() * self._torch_error(len(column)) + IntegerFormat.least
            low.append(middle - margin)
            high.append(middle + margin)
        return self._rounded(torch.cat(low), torch.cat(high))

    def _torch_error(self, width: int) -> float:
        """Return the share of the products' magnitudes by which torch's logits may be wrong."""
        return self._limits.slack * (width + self._limits.terms) * 2.0**-24

    def _rounded(self, low: Tensor, high: Tensor) -> Bounds:
        dtype = self.weight.dtype
        return Bounds(low.to(dtype).float(), high.to(dtype).float())


def unfit(weight: Tensor, limits: BoundLimits = BoundLimits()) -> str | None:
    """Return why a head's weight, [vocabulary, hidden_size], cannot have bounds; None if it can."""
    if weight.device.type != "cpu":
        return f"it is on {weight.device.type}"
    if not is_supported():
        return "torch has no int8 products on this processor"
    if weight.dtype not in {torch.float32, torch.bfloat16}:
        return f"torch adds up {weight.dtype} in ways of its own"
    if weight.shape[1] > limits.inputs_max:
        return f"it is {weight.shape[1]} wide"
    return None


def _norms(weight: Tensor, integers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lengths of what rounding took from each row, and of the rounded rows. Float32 [rows], rounded up."""
    errors, norms = torch.empty(len(weight)), torch.empty(len(weight))
    rows = max(1, (1 << 18) // weight.shape[1])  # as many as a cache has room for
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        kept = integers[part].double() * scales[part, None].double()
        errors[part] = (weight[part].detach().double() - kept).norm(dim=1) * (1 + 1e-6)
        norms[part] = kept.norm(dim=1) * (1 + 1e-6)
    return errors, norms
