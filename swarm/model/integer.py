"""Weights in integers: less memory, and numbers that do not depend on the batch.

A row of activations is rounded to steps of 1/7938 of its largest number, some 14 bits, in two parts of 7 bits that are
multiplied as integers:

    high = round(63 x / peak)    low = round(126 (63 x / peak - high))    x ~ (high + low / 126) peak / 63

Sums of integers have no order. So a row's result is the same alone and in a batch, and nearly the same on every
processor. Seven bits, because processors without VNNI add up pairs of products in 16.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm.limits import limit
from swarm.model.vectorcode import Weights
from swarm.model.writing import Layout


class IntegerFormat:
    """The numbers of the rounding. Others would be another numeric class."""

    experts: Final = "swarm_integers"  # an implementation in `transformers`' sense
    weight_steps: Final = 127  # on either side of zero
    high: Final = 63
    low: Final = 126.0
    least: Final = 2.0**-100  # of a scale or a peak: rows of zeros have one, too
    inputs_max: Final = 2048  # of one sum of products in float32: 63 * 127 * 2048 < 2^24, so it is exact


@dataclass(frozen=True, slots=True)
class IntegerLimits:
    """Which layers get weights in integers, and when a block is refused them."""

    outputs_min: int = limit(16, "outputs", "smaller layers choose experts or open gates: they keep their weights")
    share_min: float = limit(0.5, "share", "of a block's weights that has to become integers: the rest keeps its size")


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations to two parts of 7 bits.

    rows: float32 [count, in]. Returns the parts as integers in float32, [2 * count, in], high ones first, and each
    row's peak, [count, 1].
    """
    count = rows.shape[0]
    peak = rows.abs().amax(-1, keepdim=True).clamp_(min=IntegerFormat.least)
    parts = rows.new_empty(2 * count, rows.shape[1])
    high, low = parts[:count], parts[count:]
    steps = rows * (IntegerFormat.high / peak)
    torch.round(steps, out=high)
    torch.sub(steps, high, out=low).mul_(IntegerFormat.low).round_()
    return parts, peak


def products(parts: Tensor, steps: Tensor) -> Tensor:
    """Multiply integers in float32, where any kernel gives the same sums.

    parts: [rows, in], of at most 63. steps: [out, in], of at most 127. Returns float32 [rows, out].
    """
    sums = parts.new_zeros(len(parts), len(steps))
    for first in range(0, parts.shape[1], IntegerFormat.inputs_max):
        inputs = slice(first, first + IntegerFormat.inputs_max)
        # Sums that are not exact any more are added up by themselves: always in this order.
        sums.add_(parts[:, inputs] @ steps[:, inputs].t())
    return sums


def joined(both: Tensor, peak: Tensor) -> Tensor:
    """Return the products [count, out] of activations from those of their two parts, [2 * count, out], in place."""
    count = peak.shape[0]
    # One operation at a time: fused ones round otherwise at the end of a vector.
    return both[count:].mul_(1 / IntegerFormat.low).add_(both[:count]).mul_(peak / IntegerFormat.high)


class RoundedMatrix(ABC):
    """A weight [out, in] that is held in integers."""

    weights: ClassVar[Weights]  # in the name of a numeric class
    rounds: ClassVar[bool] = True  # whether it is made of plain weights

    def __init__(self, n_outputs: int, n_inputs: int) -> None:
        self.n_outputs, self.n_inputs = n_outputs, n_inputs

    @classmethod
    @abstractmethod
    def of(cls, weight: Tensor) -> Self:
        """Round a weight of any float dtype."""

    @classmethod
    @abstractmethod
    def restored(cls, size: tuple[int, int], parts: Sequence[Tensor]) -> Self:
        """Make a matrix of its parts again. size: [out, in]."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """What it was made of, of these `layouts`."""

    @staticmethod
    @abstractmethod
    def layouts(n_outputs: int, n_inputs: int) -> dict[str, Layout]:
        """Return the dtype and shape of each part of a matrix of this size."""

    @staticmethod
    @abstractmethod
    def bytes_of(n_outputs: int, n_inputs: int) -> int:
        """Return the memory of a matrix of this size."""

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return self.bytes_of(self.n_outputs, self.n_inputs)

    @abstractmethod
    def multiply(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out] of the same dtype. Servers do not train: no gradient passes."""


class IntegerLinear(nn.Linear):
    """A linear layer whose weight is a `RoundedMatrix`. Made of an `nn.Linear` by `to_integers`."""

    integers: tuple[RoundedMatrix]

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out]."""
        output = self.integers[0].multiply(input)
        return output if self.bias is None else output + self.bias


def integer_experts(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:  # noqa: ANN401
    """Send each position through its experts: an implementation for `transformers`' expert modules.

    experts: a module with `integers`. hidden: [positions, hidden_size]. chosen: int64 [positions, k], experts' numbers.
    shares: [positions, k]. A position's experts are added up by their numbers, whatever else is in the batch.
    """
    output = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():  # in order
        up, down = experts.integers[2 * expert : 2 * expert + 2]
        positions, places = torch.where(chosen == expert)
        inner = up.multiply(hidden[positions])
        if experts.has_bias:
            inner += (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias)[expert]
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        outer = down.multiply(inner)
        if experts.has_bias:
            outer += experts.down_proj_bias[expert]
        if experts.has_post_expert_norm:
            outer = experts.post_expert_norm(outer)
        output.index_add_(0, positions, (outer * shares[positions, places, None]).to(output.dtype))
    return output


ALL_EXPERTS_FUNCTIONS.register(IntegerFormat.experts, integer_experts)


def integers_of(model: nn.Module) -> str | None:
    """Return what a model's weights were rounded to, as "int8"; None: they are plain. int4 has some of them in int8.

    A model that was rounded by an `Importance` knows the name, which its matrices do not.
    """
    kind = min((matrix.weights for matrix in _all_matrices(model)), default=None)
    return None if kind is None else vars(model).get("rounded_by", kind)


def bytes_of_integers(model: nn.Module) -> int:
    """Return the memory of all weights of a model that are integers."""
    return sum(matrix.n_bytes for matrix in _all_matrices(model))


def to_integers(module: nn.Module, matrix: type[RoundedMatrix], rounded: Sequence[RoundedMatrix] = ()) -> None:
    """Round the weights of one of `rounded_of`'s modules. As they were they are dropped.

    matrix: what they become. rounded: the weights, in the order of `matrices_of`, where they are rounded already.
    """
    if isinstance(module, nn.Linear):
        vars(module)["integers"] = tuple(rounded) or (matrix.of(module.weight),)
        _empty(module, "weight")
        module.__class__ = IntegerLinear
        return
    experts: Any = module
    pairs = zip(*weights_of(experts), strict=True)
    vars(experts)["integers"] = tuple(rounded) or tuple(matrix.of(weight) for pair in pairs for weight in pair)
    for name in _names(experts):
        _empty(experts, name)
    experts.config._experts_implementation_internal = IntegerFormat.experts


def place(model: nn.Module, device: torch.device, moved: Callable[[RoundedMatrix], RoundedMatrix]) -> None:
    """Move all integers of a model to a device, before the model follows them. moved: makes a matrix there."""
    for module in model.modules():
        if "integers" in vars(module):
            vars(module)["integers"] = tuple(map(moved, vars(module)["integers"]))
            for name in ("weight",) if isinstance(module, nn.Linear) else _names(module):
                _empty(module, name, device)  # moving what has no memory would give it some


def _empty(module: nn.Module, name: str, device: torch.device | None = None) -> None:
    """Let a parameter keep shape and dtype, but no memory. device: None keeps it as well.

    It is NaN everywhere, so that code that goes around the integers is found out by the proof.
    """
    weight = getattr(module, name)
    with torch.inference_mode(mode=False):
        empty = nothing(weight.shape, weight.dtype, weight.device if device is None else device)
        setattr(module, name, nn.Parameter(empty, requires_grad=weight.requires_grad))


def nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a tensor of NaN that takes no memory."""
    return torch.full((1,) * len(shape), float("nan"), dtype=dtype, device=device).expand(shape)


def rounded_of(block: nn.Module, limits: IntegerLimits = IntegerLimits()) -> list[nn.Module]:
    """Return the modules of a block whose weights become integers: plain linear layers, and experts.

    No subclass of a linear layer, which has its reason.
    """
    return [
        module
        for module in block.modules()
        if (type(module) is nn.Linear and module.out_features >= limits.outputs_min) or _are_experts(module)
    ]


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the weights of one of `rounded_of`'s modules that become integers: [out, in] or [experts, out, in]."""
    names = ("weight",) if isinstance(module, nn.Linear) else _names(module)
    return [getattr(module, name) for name in names]


def matrices_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the names and sizes [out, in] of the matrices that one of `rounded_of`'s modules is rounded to, in order.

    "weight", or of experts "gate_up_proj.0", "down_proj.0", "gate_up_proj.1", ...
    """
    if isinstance(module, nn.Linear):
        return {"weight": (module.out_features, module.in_features)}
    shapes = {name: getattr(module, name).shape for name in _names(module)}
    count = next(iter(shapes.values()))[0]
    return {f"{name}.{expert}": tuple(shape[1:]) for expert in range(count) for name, shape in shapes.items()}


def matrices_in(model: nn.Module) -> dict[str, RoundedMatrix]:
    """Return all matrices of a model whose weights were rounded, by names as `matrices_of` and the module's."""
    found: dict[str, RoundedMatrix] = {}
    for name, module in model.named_modules():
        if "integers" in vars(module):
            pairs = zip(matrices_of(module), vars(module)["integers"], strict=True)
            found |= {f"{name}.{each}": matrix for each, matrix in pairs}
    return found


def _all_matrices(model: nn.Module) -> Iterator[RoundedMatrix]:
    return (matrix for module in model.modules() for matrix in vars(module).get("integers", ()))


def _are_experts(module: nn.Module) -> bool:
    """Whether a module has its experts' weights in two tensors, each [experts, out, in], and lets others compute."""
    if getattr(module, "is_transposed", True) or not hasattr(module, "_apply_gate"):
        return False
    weights = [getattr(module, name, None) for name in _names(module)]
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def _names(experts: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"
