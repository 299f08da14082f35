"""The choice of kernels for a span on this processor: measured when the span is loaded.

Decode reads every weight for a handful of tokens, so its speed is that of reading weights. The stock kernels take
them as they lie in the checkpoint. oneDNN can take them in an order of its own, prepared once ("prepacked"): on a Zen 4
core fp32 weights are then read at 29 GB/s instead of 15 and bf16 ones at 20 instead of 12, and batches of 2 to 64
tokens take half as long. On a Zen 3 core batches take three quarters as long, and single tokens a tenth longer. So
both are timed on the span's own weights.

Attention of one position in half precision is the other slow spot: torch's kernel takes four times as long as turning
keys and values into fp32 and using the kernel for that, which is more exact, too.

Packed weights take the place of the others, not memory beside them. The numbers stay: fp32 is multiplied and added up
in fp32, in another order.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from swarm.blocks import Blocks
from swarm.limits import limit
from swarm.model.allocator import return_free_memory
from swarm.model.hollow import blocks_of
from swarm.model.probe import TOLERANCES, outputs_of, samples_of
from swarm.model.span import Span

WIDENED = "swarm_widened"  # an attention implementation


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """When other kernels are tried, and when they count as better."""

    pack_bytes_min: int = limit(32 << 20, "bytes", "smaller spans stay in the processor's cache: nothing is tried")
    trial_bytes: int = limit(192 << 20, "bytes", "of weights that are timed: well beyond any cache")
    trial_rounds: int = limit(9, "rounds", "of a trial, of which the quickest counts")
    gain_min: float = limit(1.1, "times", "less of a gain is noise: the stock kernel stays")
    loss_max: float = limit(1.3, "times", "a lone step's loss that a batch's gain may cost: prefill runs beside it")
    layout_tokens: int = limit(16, "tokens", "the batch that the packed order is made for; it does well from 1 to 512")


Quickest = Callable[..., list[float]]
"""`quickest(rounds, *works)`: the shortest time of each of `works`, in seconds."""


def quickest(rounds: int, *works: Callable[[], None]) -> list[float]:
    """Time all works in turns. Returns the shortest time of each, in seconds."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in times]


class PackedLinear(nn.Linear):
    """A linear layer whose weight is in oneDNN's order. Made of an `nn.Linear` by `_pack`.

    `weight` keeps shape, dtype and device, but no memory: it is NaN everywhere, so that code that goes around
    `forward` is found out by the proof.
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; [..., in] -> [..., out]."""
        if torch.is_grad_enabled():
            return nn.functional.linear(input, self.packed.to_dense(), self.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return output


def choose_kernels(span: Span, limits: KernelLimits = KernelLimits(), quickest: Quickest = quickest) -> bool:
    """Pack a span's weights if that is faster here and computes the same. Returns whether it did. Takes a second or so.

    Call it in a thread that has as many cores as the compute thread will have.
    """
    layers = blocks_of(span.model)
    linears = {index: list(_linears(layers[index])) for index in span.blocks}
    everything = [linear for found in linears.values() for linear in found]
    if span.weight_bytes < limits.pack_bytes_min or not torch.backends.mkldnn.is_available():
        return False
    with torch.inference_mode():
        _choose_attention(span, limits, quickest)
        if not everything:  # they are int8, or on a GPU
            return False
        try:
            if not _is_faster(everything, limits, quickest):
                return False
        except RuntimeError:  # a build of torch without these operators
            return False
        for index in samples_of(span):
            if not _proved(span.part(Blocks(index, index + 1)), linears[index], limits):
                return False
        for linear in everything:
            if not isinstance(linear, PackedLinear):
                _pack(linear, limits)
    return_free_memory()  # the weights as they were, and those of the trial
    return True


def leave_out_planned_attention(device: torch.device) -> None:
    """Let torch attend without cuDNN on a GPU; for the whole process. Elsewhere nothing changes.

    cuDNN builds a plan for every new length of a past, some 40 ms on an H200. In a decode each step has a new length,
    and torch prefers cuDNN on Hopper: a step of 5 ms took 42 (benchmarks/results/gpu_attention.json).
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def widened_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 - as all attention functions
) -> tuple[Tensor, None]:
    """The stock attention, but in fp32 for one position behind a past. query: [batch, heads, tokens, size]."""
    batch, heads, tokens, size = query.shape
    plain = attention_mask is None and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if tokens != 1 or not plain or heads % key.shape[1]:
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return stock
    # Heads that share keys become positions: nothing is repeated.
    shared = query.reshape(batch, key.shape[1], heads // key.shape[1], size).float()
    output = nn.functional.scaled_dot_product_attention(shared, key.float(), value.float(), scale=scaling)
    return output.to(query.dtype).reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(WIDENED, widened_attention)
AttentionMaskInterface.register(WIDENED, sdpa_mask)


def _choose_attention(span: Span, limits: KernelLimits, quickest: Quickest) -> None:
    """Let decode attend in fp32 where the span's dtype is slower at it."""
    if span.device.type != "cpu" or span.dtype not in (torch.bfloat16, torch.float16):
        return
    states = torch.ones((1, 8, 512, 64), dtype=span.dtype)  # batch, heads, positions, size
    query = states[:, :, :1]

    def stock() -> None:
        nn.functional.scaled_dot_product_attention(query, states, states)

    def widened() -> None:
        nn.functional.scaled_dot_product_attention(query.float(), states.float(), states.float())

    stock_s, widened_s = quickest(limits.trial_rounds, stock, widened)
    if stock_s < limits.gain_min * widened_s:
        return
    parts = [span.part(Blocks(index, index + 1)) for index in samples_of(span)]
    expected = [outputs_of(part) for part in parts]
    changed = span.shared.change_attention("sdpa", WIDENED)
    try:
        agree = all(_agree(outputs_of(part), outputs) for part, outputs in zip(parts, expected, strict=True))
    except Exception:  # noqa: BLE001 - a family may look at the name
        agree = False
    if changed and not agree:
        span.shared.change_attention(WIDENED, "sdpa")


def _agree(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether outputs are the same within the tolerance of their dtype."""
    return all(
        float((left - right).float().norm() / right.float().norm()) < TOLERANCES[right.dtype]
        for left, right in zip(got, expected, strict=True)
    )


def _linears(block: nn.Module) -> Iterator[nn.Linear]:
    """Yield the plain linear layers of a block on the CPU: no subclass, which would have its reason."""
    dtypes = torch.float32, torch.bfloat16
    for module in block.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype in dtypes:
            yield module


def _is_faster(linears: Iterable[nn.Linear], limits: KernelLimits, quickest: Quickest) -> bool:
    """Time stock and packed weights, in turn: a step alone, and a batch."""
    trial: list[tuple[Tensor, Tensor]] = []
    size = 0
    for linear in linears:
        if size >= limits.trial_bytes:
            break
        trial.append((linear.weight, _packed(linear.weight, limits)))
        size += linear.weight.nbytes
    gains = []
    for tokens in (1, 8):
        inputs = {weight.shape[1]: torch.ones(tokens, weight.shape[1], dtype=weight.dtype) for weight, _ in trial}

        def stock(inputs: dict[int, Tensor] = inputs) -> None:
            for weight, _ in trial:
                nn.functional.linear(inputs[weight.shape[1]], weight)

        def packed(inputs: dict[int, Tensor] = inputs) -> None:
            for weight, ready in trial:
                torch.ops.mkldnn._linear_pointwise(inputs[weight.shape[1]], ready, None, "none", [], "")

        stock_s, packed_s = quickest(limits.trial_rounds, stock, packed)
        gains.append(stock_s / packed_s)
    alone, together = gains
    return max(gains) >= limits.gain_min and min(gains) > 1 / limits.loss_max and alone * together > 1


def _proved(part: Span, linears: list[nn.Linear], limits: KernelLimits) -> bool:
    """Pack one block, and compare its outputs before and after; where they differ, leave it as it was."""
    weights = [linear.weight for linear in linears]
    expected = outputs_of(part)
    for linear in linears:
        _pack(linear, limits)
    try:
        agree = _agree(outputs_of(part), expected)
    except Exception:  # noqa: BLE001 - a family may use its layers in any way
        agree = False
    if not agree:
        for linear, weight in zip(linears, weights, strict=True):
            linear.__class__ = nn.Linear
            linear.weight = weight
            vars(linear).pop("packed", None)
    return agree


def _pack(linear: nn.Linear, limits: KernelLimits) -> None:
    weight = linear.weight
    vars(linear)["packed"] = _packed(weight, limits)
    with torch.inference_mode(mode=False):
        nothing = torch.full((1, 1), float("nan"), dtype=weight.dtype).expand(weight.shape)
        linear.weight = nn.Parameter(nothing, requires_grad=weight.requires_grad)
    linear.__class__ = PackedLinear


def _packed(weight: Tensor, limits: KernelLimits) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), limits.layout_tokens)
    return packed
