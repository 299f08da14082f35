"""The choice of kernels for a span on this processor: measured when the span is loaded.

Decode reads every weight for a handful of tokens, so its speed is that of reading weights. torch takes them as they
lie in the checkpoint. Which of the other ways (`swarm.model.linears`) is faster depends on the processor, so each is
timed on the span's own weights, and proved on its blocks.

Attention of one position in half precision is the other slow spot: torch's kernel takes four times as long as turning
keys and values into fp32 and using the kernel for that, which is more exact, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from swarm.blocks import Blocks
from swarm.limits import limit
from swarm.model.aligned import ALIGNED, aligned_attention
from swarm.model.allocator import return_free_memory
from swarm.model.hollow import blocks_of
from swarm.model.linears import OtherLinear, kinds_of
from swarm.model.probe import TOLERANCES, agrees, outputs_of, replace_attention, samples_of
from swarm.model.span import Span

WIDENED, ALIGNED_WIDENED = "swarm_widened", "swarm_aligned_widened"  # attention implementations


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """When other kernels are tried, and when they count as better."""

    pack_bytes_min: int = limit(32 << 20, "bytes", "smaller spans stay in the processor's cache: nothing is tried")
    trial_bytes: int = limit(192 << 20, "bytes", "of weights that are timed: well beyond any cache")
    trial_rounds: int = limit(9, "rounds", "of a trial, of which the quickest counts")
    gain_min: float = limit(1.1, "times", "less of a gain is noise: the stock kernel stays")
    loss_max: float = limit(1.3, "times", "a lone step's loss that a batch's gain may cost: prefill runs beside it")
    trial_tokens: int = limit(8, "tokens", "of the batch that is timed beside a step alone")


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


def choose_kernels(
    span: Span,
    limits: KernelLimits = KernelLimits(),
    quickest: Quickest = quickest,
) -> type[OtherLinear] | None:
    """Multiply by a span's weights in the way that is fastest here and computes the same. Takes a second or so.

    Call it in a thread that has as many cores as the compute thread will have. Returns that way; None: it is torch's.
    """
    layers = blocks_of(span.model)
    linears = {index: list(_linears(layers[index], span.dtype)) for index in span.blocks}
    everything = [linear for found in linears.values() for linear in found]
    if span.weight_bytes < limits.pack_bytes_min:
        return None
    with torch.inference_mode():
        _choose_attention(span, limits, quickest)
        if not everything:  # they are int8, or on a GPU
            return None
        kind = _fastest(everything, limits, quickest)
        if kind is None:
            return None
        for index in samples_of(span):
            if not _proved(kind, span.part(Blocks(index, index + 1)), linears[index]):
                return None
        for linear in everything:
            if type(linear) is nn.Linear:
                kind.take(linear)
    return_free_memory()  # the weights as they were, and those of the trial
    return kind


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
AttentionInterface.register(ALIGNED_WIDENED, partial(aligned_attention, step=widened_attention))
AttentionMaskInterface.register(WIDENED, sdpa_mask)
AttentionMaskInterface.register(ALIGNED_WIDENED, sdpa_mask)


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
    replace_attention(span, "sdpa", WIDENED, TOLERANCES[span.dtype])
    replace_attention(span, ALIGNED, ALIGNED_WIDENED, TOLERANCES[span.dtype])


def _linears(block: nn.Module, dtype: torch.dtype) -> Iterator[nn.Linear]:
    """Yield the plain linear layers of a block on the CPU: no subclass, which would have its reason."""
    for module in block.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype is dtype:
            yield module


def _fastest(linears: Sequence[nn.Linear], limits: KernelLimits, quickest: Quickest) -> type[OtherLinear] | None:
    """Time torch's way beside each of the others, alone and with a batch. Returns the first that is better, or None."""
    weights: list[Tensor] = []
    for linear in linears:
        if sum(weight.nbytes for weight in weights) < limits.trial_bytes:
            weights.append(linear.weight)
    for kind in kinds_of(weights[0].dtype):
        try:
            alone, together = _gains(kind, weights, limits, quickest)
        except RuntimeError:  # torch has not this way, or this processor does not
            continue
        enough, bearable = max(alone, together) >= limits.gain_min, min(alone, together) > 1 / limits.loss_max
        if enough and bearable and alone * together > 1.0:
            return kind
    return None


def _gains(
    kind: type[OtherLinear], weights: Sequence[Tensor], limits: KernelLimits, quickest: Quickest
) -> tuple[float, float]:
    """Return how many times as fast as torch's way another one is, for one token and for a batch."""
    ready = [kind.prepared(weight) for weight in weights]
    gains = []
    for tokens in (1, limits.trial_tokens):
        inputs = {weight.shape[1]: torch.ones(tokens, weight.shape[1], dtype=weight.dtype) for weight in weights}

        def stock(inputs: dict[int, Tensor] = inputs) -> None:
            for weight in weights:
                nn.functional.linear(inputs[weight.shape[1]], weight)

        def other(inputs: dict[int, Tensor] = inputs) -> None:
            for weight, prepared in zip(weights, ready, strict=True):
                kind.multiply(inputs[weight.shape[1]], prepared, None)

        stock_s, other_s = quickest(limits.trial_rounds, stock, other)
        gains.append(stock_s / other_s)
    return gains[0], gains[1]


def _proved(kind: type[OtherLinear], part: Span, linears: list[nn.Linear]) -> bool:
    """Compute one block in the other way, and compare its outputs; where they differ, leave it as it was."""
    weights = [linear.weight for linear in linears]
    expected = outputs_of(part)
    for linear in linears:
        kind.take(linear)
    try:
        agree = agrees(outputs_of(part), expected, TOLERANCES[part.dtype])
    except Exception:  # noqa: BLE001 - a family may use its layers in any way
        agree = False
    if not agree:
        for linear, weight in zip(linears, weights, strict=True):
            linear.__class__ = nn.Linear
            linear.weight = weight
            vars(linear).pop("packed", None)
    return agree
