"""Other ways than torch's to multiply by the weights of linear layers on a CPU.

*Packed*: oneDNN takes weights in an order of its own, prepared once. On a Zen 4 core fp32 weights are then read at 29
GB/s instead of 15 and bf16 ones at 20 instead of 12, and batches of 2 to 64 tokens take half as long. On a Zen 3 core
batches take three quarters as long, and single tokens a tenth longer. Packed weights take the place of the others, not
memory beside them. The numbers stay: fp32 is multiplied and added up in fp32, in another order.

*Widened*: on processors without instructions for bfloat16 or float16, such as those with AVX2 alone, torch multiplies
each row by itself: 64 took 30 times as long as one. There a layer makes float32 of some rows of its
weight, which stay in the processor's cache, multiplies all inputs by them, and goes on to the next rows. Products of
two such numbers are exact in float32, so only the order of additions is another one. oneDNN multiplies such rows as
they are: prompts take 4 % less than by torch's own product. Packing rows that are used once costs more than it gains.

*Compiled*: where there is `llvmlite`, LLVM compiles a loop that widens weights in registers (`swarm.model.halfcode`).
Batches are the faster for it. Single rows and prompts go on as above.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from swarm.limits import limit
from swarm.model.compiled import kernels
from swarm.model.halfcode import Half


@dataclass(frozen=True, slots=True)
class LinearLimits:
    """How weights are taken."""

    layout_tokens: int = limit(16, "tokens", "the batch that the packed order is made for; it does well from 1 to 512")
    few: int = limit(8, "tokens", "up to which torch multiplies widened weights; for more oneDNN is faster")
    tile_bytes: int = limit(1 << 20, "bytes", "of weights that are widened at a time for few tokens")
    tile_outputs: int = limit(256, "outputs", "whose weights are widened at a time for more; fewer take longer")
    compiled_below: int = limit(48, "tokens", "of a batch that compiled code multiplies; longer ones are widened")


class OtherLinear(nn.Linear):
    """A linear layer that multiplies in another way. Made of an `nn.Linear` by `take`. says: how, for people."""

    says: ClassVar[str]
    limits: ClassVar[LinearLimits] = LinearLimits()

    @classmethod
    def prepared(cls, weight: Tensor) -> Tensor:
        """Return the form of a weight [out, in] that `multiply` takes. Raises RuntimeError where there is none."""
        raise NotImplementedError

    @classmethod
    def multiply(cls, input: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; [..., in] -> [..., out]. Without gradients."""
        raise NotImplementedError

    @classmethod
    def take(cls, linear: nn.Linear) -> None:
        """Let a layer compute in this way."""
        linear.__class__ = cls


class PackedLinear(OtherLinear):
    """A linear layer whose weight is in oneDNN's order.

    `weight` keeps shape, dtype and device, but no memory: it is NaN everywhere, so that code that goes around
    `forward` is found out by the proof.
    """

    says: ClassVar[str] = "packed by oneDNN"
    packed: Tensor

    @classmethod
    def prepared(cls, weight: Tensor) -> Tensor:
        """Return a weight in oneDNN's order. Raises RuntimeError where torch or the processor cannot."""
        if not torch.backends.mkldnn.is_available():
            raise RuntimeError("torch is built without oneDNN")
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), cls.limits.layout_tokens)
        return packed

    @classmethod
    def multiply(cls, input: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; [..., in] -> [..., out]. It takes weights in the order of torch, too."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, prepared, bias, "none", [], "")
        return output

    @classmethod
    def take(cls, linear: nn.Linear) -> None:
        """Pack a layer's weight."""
        weight = linear.weight
        vars(linear)["packed"] = cls.prepared(weight)
        with torch.inference_mode(mode=False):
            nothing = torch.full((1, 1), float("nan"), dtype=weight.dtype).expand(weight.shape)
            linear.weight = nn.Parameter(nothing, requires_grad=weight.requires_grad)
        super().take(linear)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out]."""
        if torch.is_grad_enabled():
            return nn.functional.linear(input, self.packed.to_dense(), self.bias)
        return self.multiply(input, self.packed, self.bias)


class WidenedLinear(OtherLinear):
    """A linear layer in half precision that multiplies in float32. A single row is multiplied in torch's way."""

    says: ClassVar[str] = "widened to float32 piece by piece"

    @classmethod
    def prepared(cls, weight: Tensor) -> Tensor:
        """Return the weight as it is."""
        return weight

    @classmethod
    def multiply(cls, input: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; [..., in] -> [..., out]."""
        n_outputs, n_inputs = prepared.shape
        rows = input.numel() // n_inputs
        if rows == 1:
            return nn.functional.linear(input, prepared, bias)
        wide, few = input.reshape(rows, n_inputs).float(), rows <= cls.limits.few
        height = min(n_outputs, max(1, cls.limits.tile_bytes // (4 * n_inputs)) if few else cls.limits.tile_outputs)
        multiply = nn.functional.linear if few or not torch.backends.mkldnn.is_available() else PackedLinear.multiply
        tile = torch.empty(height, n_inputs)
        output = torch.empty(rows, n_outputs, dtype=input.dtype)
        for at in range(0, n_outputs, height):
            part = tile[: n_outputs - at].copy_(prepared[at : at + height])
            sums = multiply(wide, part, None)
            if bias is not None:
                sums += bias[at : at + height]
            output[:, at : at + height] = sums
        return output.view(*input.shape[:-1], n_outputs)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out]."""
        if torch.is_grad_enabled():
            return super().forward(input)
        return self.multiply(input, self.weight, self.bias)


class CompiledLinear(WidenedLinear):
    """A linear layer in half precision that widens its weights in registers, for all but long prompts."""

    says: ClassVar[str] = "widened to float32 by compiled code"

    @classmethod
    def prepared(cls, weight: Tensor) -> Tensor:
        """Return the weight as it is. Raises RuntimeError where there is no compiled code for it."""
        if weight.shape[1] % 8 or kernels(_name(weight.dtype)) is None:
            raise RuntimeError("no compiled products")
        return weight

    @classmethod
    def multiply(cls, input: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; [..., in] -> [..., out]."""
        n_outputs, n_inputs = prepared.shape
        compiled = kernels(_name(prepared.dtype))
        rows = input.numel() // n_inputs
        if compiled is None or rows == 1 or rows >= cls.limits.compiled_below:
            return super().multiply(input, prepared, bias)
        sums = compiled.widened(input.reshape(-1, n_inputs), prepared)
        if bias is not None:
            sums += bias
        return sums.to(input.dtype).view(*input.shape[:-1], n_outputs)


def _name(dtype: torch.dtype) -> Half:
    return "bfloat16" if dtype is torch.bfloat16 else "float16"


def kinds_of(dtype: torch.dtype) -> tuple[type[OtherLinear], ...]:
    """Return the other ways for weights of this dtype, the better ones first."""
    return {
        torch.float32: (PackedLinear,),
        torch.bfloat16: (PackedLinear, CompiledLinear, WidenedLinear),
        torch.float16: (CompiledLinear, WidenedLinear),
    }.get(dtype, ())
