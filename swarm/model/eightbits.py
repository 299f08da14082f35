"""Weights in int8: half of bfloat16's memory. An output's largest weight is 127 steps, and it has one scale.

Compiled code multiplies them as they are (`swarm.model.compiled`). Without it torch's kernels do, to the same bits:
they put the weights in an order of their own first, which takes longer than rounding. Where there is neither, products
in float64 are exact, too, and slow: int4 has few such weights.
"""

import warnings
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from swarm.model.compiled import Packed, kernels
from swarm.model.integer import IntegerFormat, RoundedMatrix, joined, split
from swarm.model.vectorcode import Weights
from swarm.model.writing import Layout


def is_supported() -> bool:
    """Whether there are kernels for this processor: torch's, or compiled ones."""
    return _product_kind() is not _PlainMatrix


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [out, in] to int8. Returns the integers and the float32 scale of each output.

    Halves go to the even step. The same bits on every processor: division and rounding are IEEE's.
    """
    compiled = kernels("int8")
    return _rounded(weight) if compiled is None else compiled.rounded(weight)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round by torch's operations. What is no number becomes zero, and its scale none."""
    integers = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device="cpu")
    rows = max(1, (1 << 20) // weight.shape[1])  # as many as a cache has room for
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows].detach().float()
        scale = (part.abs().amax(1) / IntegerFormat.weight_steps).clamp(min=IntegerFormat.least)
        scales[start : start + rows] = scale
        integers[start : start + rows] = (part / scale[:, None]).nan_to_num_(0.0).round_()
    return integers, scales


class IntegerMatrix(RoundedMatrix):
    """A weight [out, in] in int8."""

    weights: ClassVar[Weights] = "int8"

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        """integers: int8 [out, in]. scales: float32 [out]."""
        super().__init__(*integers.shape)
        self._matrix = _product_kind()(integers, scales)

    @classmethod
    def of(cls, weight: Tensor) -> "IntegerMatrix":
        """Round a weight of any float dtype."""
        return cls(*rounded(weight))

    @classmethod
    def restored(cls, _size: tuple[int, int], parts: Sequence[Tensor]) -> "IntegerMatrix":
        """Make a matrix of its parts again."""
        return cls(*parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What it was made of: int8 [out, in] and float32 [out]."""
        return self._matrix.parts()

    @staticmethod
    def layouts(n_outputs: int, n_inputs: int) -> dict[str, Layout]:
        """Return the dtype and shape of each part of a matrix of this size."""
        return {
            "integers": Layout(torch.int8, (n_outputs, n_inputs)),
            "scales": Layout(torch.float32, (n_outputs,)),
        }

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        """Return the memory of a matrix of this size."""
        return _product_kind().bytes_of(n_outputs, n_inputs)

    def multiply(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out] of the same dtype. Servers do not train: no gradient passes."""
        output = self._matrix.product(input.reshape(-1, self.n_inputs))
        return output.view(*input.shape[:-1], self.n_outputs)


class _CompiledMatrix:
    """Rows of weights as they are, filled up to blocks of 32 inputs."""

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        self._n_inputs = integers.shape[1]
        filler = -self._n_inputs % 32
        filled = (nn.functional.pad(integers, (0, filler)) if filler else integers).contiguous()
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._packed = Packed("int8", filled, none, scales.float().contiguous(), filled.shape[1] // 32)

    def parts(self) -> tuple[Tensor, Tensor]:
        return self._packed.codes[:, : self._n_inputs], self._packed.scales

    def product(self, rows: Tensor) -> Tensor:
        """Multiply; [count, in] -> [count, out] of the same dtype."""
        compiled = kernels("int8")
        assert compiled is not None
        return compiled.multiply(rows, self._packed)

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        return n_outputs * (-(-n_inputs // 32) * 32 + 4)


class _TorchMatrix:
    """Weights in the order of torch's kernels."""

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        zeros = torch.zeros(scales.shape, dtype=torch.long)
        engine = torch.backends.quantized.engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to make such tensors in another package one day
            quantised = torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)
            torch.backends.quantized.engine = "fbgemm"
            try:
                self._packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised, None)
            finally:
                torch.backends.quantized.engine = engine

    def parts(self) -> tuple[Tensor, Tensor]:
        """Make anew what it was made of."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantised, _ = torch.ops.quantized.linear_unpack(self._packed)
            return quantised.int_repr(), quantised.q_per_channel_scales().float()

    def product(self, rows: Tensor) -> Tensor:
        """Multiply; [count, in] -> [count, out] of the same dtype."""
        parts, peak = split(rows.float())
        parts.nan_to_num_(0.0)  # of a row with an infinite number
        both = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            parts, 1.0, IntegerFormat.high + 1, self._packed
        )
        return joined(both, peak).to(rows.dtype)

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        """Each output has a scale, a zero point and a sum beside its integers."""
        return n_outputs * (n_inputs + 12)


class _PlainMatrix:
    """Rows of weights as they are, which become float64 for each product, some outputs at a time."""

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        self._integers, self._scales = integers, scales.float()

    def parts(self) -> tuple[Tensor, Tensor]:
        return self._integers, self._scales

    def product(self, rows: Tensor) -> Tensor:
        """Multiply; [count, in] -> [count, out] of the same dtype."""
        parts, peak = split(rows.float())
        both, exact = parts.new_empty(len(parts), len(self._scales)), parts.double()
        outputs = max(1, (1 << 20) // self._integers.shape[1])  # as many as a cache has room for
        for start in range(0, len(self._scales), outputs):
            some = slice(start, start + outputs)
            both[:, some] = exact @ self._integers[some].double().t()
        return joined(both.mul_(self._scales), peak).to(rows.dtype)

    @staticmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        return n_outputs * (n_inputs + 4)


def _product_kind() -> type[_CompiledMatrix | _TorchMatrix | _PlainMatrix]:
    if kernels("int8") is not None:
        return _CompiledMatrix
    return _TorchMatrix if "fbgemm" in torch.backends.quantized.supported_engines else _PlainMatrix
