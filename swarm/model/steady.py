"""Products of small layers in integers, so that the experts of a position do not depend on the batch.

Routers and gates decide by small differences, so 8 bits are too few for their weights. Such a weight is kept as it is,
and beside it as the sum of two matrices of integers: the weight rounded to 8 bits, and what that left, rounded again.
Together they have some 15 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm.model.eightbits import rounded
from swarm.model.integer import joined, products, split


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix in integers. steps: float32 [out, in], integers of at most 127. scales: float32 [out]."""

    steps: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Rounded":
        """Round a weight [out, in] of any float dtype."""
        integers, scales = rounded(weight)
        return cls(integers.float(), scales)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return self.steps.nbytes + self.scales.nbytes


class SteadyWeight(nn.Parameter):
    """A weight [out, in] by which `linear` multiplies in integers. All other functions see the weight as it was."""

    matrices: tuple[Rounded, Rounded]

    @classmethod
    def of(cls, weight: Tensor) -> "SteadyWeight":
        """Round a weight of any float dtype, and keep it."""
        plain = weight.detach()
        first = Rounded.of(plain)
        steady = cls(plain, requires_grad=False)
        steady.matrices = first, Rounded.of(plain.float() - first.steps * first.scales[:, None])
        return steady

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - whatever `func` returns
        """Answer `linear`, and let the rest be computed. A cast before it is the weight itself."""
        del types
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func in (Tensor.to, Tensor.type, Tensor.float) and not kwargs and _is_cast(args):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_steady(block: nn.Module) -> None:
    """Have the layers of a block that keep their weights multiply in integers."""
    for module in block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or "integers" in vars(module):
            continue
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            module.weight = SteadyWeight.of(weight)


def place_steady(model: nn.Module, device: torch.device) -> None:
    """Have the integers beside such weights follow them to a device."""
    for weight in model.parameters():
        if isinstance(weight, SteadyWeight):
            first, second = (Rounded(each.steps.to(device), each.scales.to(device)) for each in weight.matrices)
            weight.matrices = first, second


def steady_bytes(model: nn.Module) -> int:
    """Return the memory of all integers beside weights of a model that are kept as they are."""
    steady = [weight for weight in model.parameters() if isinstance(weight, SteadyWeight)]
    return sum(matrix.n_bytes for weight in steady for matrix in weight.matrices)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert isinstance(weight, SteadyWeight)
    parts, peak = split(input.reshape(-1, input.shape[-1]).float())
    first, second = (joined(products(parts, each.steps).mul_(each.scales), peak) for each in weight.matrices)
    output = (first + second).to(input.dtype).view(*input.shape[:-1], -1)
    return output if bias is None else output + bias


def _is_cast(args: Sequence[Any]) -> bool:
    """Whether the arguments of `to`, `type` or `float` name at most a dtype of floating point."""
    return len(args) == 1 or (len(args) == 2 and isinstance(args[1], torch.dtype) and args[1].is_floating_point)
