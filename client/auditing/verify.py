"""Verifies evidence: computes a span once more from the checkpoint, and compares with the outputs that a server signed.

Inputs of a file are chosen by the one that asked for them. On some, honest servers differ by much: a sum of large
numbers that nearly cancel, say. So the span is computed several times, in other steps and from inputs that differ by
less than their rounding. If these differ among themselves by half of the bound or more, the file shows nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activations import Activations, NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.bounds import Bounds, Distance, bounds_of, distance
from swarm.client.auditing.evidence import BadEvidence, Evidence
from swarm.errors import BadBlocks, RootMismatch, SwarmError
from swarm.limits import limit
from swarm.model.checkpoint import Checkpoint
from swarm.model.loading import load_span
from swarm.model.past import SpanPast
from swarm.model.span import Span


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """When inputs show nothing."""

    steady_share: float = limit(0.5, "of the bounds", "that one's own computations differ by; then nothing is shown")
    noise: float = limit(0.25, "of the dtype's precision", "by which inputs are changed to see what rounding does")
    draws: int = limit(2, "draws", "of such changes")


@dataclass(frozen=True, slots=True)
class Finding:
    """A span's outputs as signed and as computed. spread: of one's own computations, from each other."""

    told: Distance
    spread: Distance
    bounds: Bounds
    limits: VerifyLimits = VerifyLimits()

    @property
    def is_steady(self) -> bool:
        """Whether honest servers are sure to agree on these inputs."""
        share = self.limits.steady_share
        return Bounds(self.bounds.typical * share, self.bounds.worst * share).allow(self.spread)

    @property
    def is_wrong(self) -> bool:
        """Whether the server computed wrongly."""
        return self.is_steady and not self.bounds.allow(self.told)


def verify(evidence: Evidence, checkpoint: Checkpoint, limits: VerifyLimits = VerifyLimits()) -> Finding:
    """Compute the span of a receipt. Raises BadEvidence, or what `load_span` raises."""
    said = evidence.receipt.statement
    if checkpoint.root != said.root:
        raise RootMismatch(checkpoint.model, said.root, checkpoint.root)
    try:
        blocks, numeric_class = Blocks(said.start, said.stop), NumericClass.parse(said.numeric_class)
        checkpoint.check(blocks)
    except (ValueError, BadBlocks) as error:
        raise BadEvidence(str(error)) from None
    span = _loaded(checkpoint, blocks, numeric_class)
    _check_inputs(evidence.inputs, span)
    with torch.inference_mode():
        ours = [_computed(span, evidence.inputs)]
        ours.append(_computed(span, evidence.inputs, prompt=max(1, evidence.inputs.tokens // 2)))
        ours += [_computed(span, noisy) for noisy in _noisy(evidence.inputs, span.dtype, limits)]
    first, *others = (_table(each, said.told) for each in ours)
    spreads = [distance(other, first) for other in others]
    return Finding(
        distance(_table(evidence.outputs, said.told), first),
        Distance(max(each.typical for each in spreads), max(each.worst for each in spreads)),
        bounds_of({numeric_class}),
        limits,
    )


def _loaded(checkpoint: Checkpoint, blocks: Blocks, numeric_class: NumericClass) -> Span:
    """Load a span of this class. Raises BadEvidence where this machine cannot compute it."""
    unsent = NumericClass(numeric_class.dtype, numeric_class.weights)
    if numeric_class.dtype not in {"float32", "bfloat16", "float16"} or numeric_class.wire not in {"", "int8"}:
        raise BadEvidence(f"servers do not compute in {numeric_class}")
    dtype: torch.dtype = getattr(torch, numeric_class.dtype)
    quantize = numeric_class.weights if numeric_class.integers else None
    span = load_span(checkpoint, blocks, dtype=dtype, quantize=quantize)
    if span.numeric_class != unsent:
        raise SwarmError(f"this machine computes the blocks in {span.numeric_class}, the receipt is of {unsent}")
    return span


def _check_inputs(inputs: Activations, span: Span) -> None:
    """Raise BadEvidence for inputs that no server takes."""
    if inputs.hidden.shape[2] != span.hidden_size:
        raise BadEvidence(f"activations of width {inputs.hidden.shape[2]}, the model's is {span.hidden_size}")
    most = span.traits.positions_max
    ids = inputs.positions
    if most is not None and inputs.tokens > most:
        raise BadEvidence(f"{inputs.tokens} positions, the model has {most}")
    if ids is not None and (int(ids.min()) < 0 or (most is not None and int(ids.max()) >= most)):
        raise BadEvidence("position ids that the model does not have")
    if inputs.mask is not None and int(inputs.mask.max()) > 1:
        raise BadEvidence("a mask that is none")


def _computed(span: Span, inputs: Activations, prompt: int | None = None) -> Tensor:
    """Return the span's outputs. prompt: positions that come first; the others follow in pieces of one."""
    past = SpanPast(span.new_cache())
    first = inputs.tokens if prompt is None else prompt
    parts = [past.forward(span, inputs.part(0, first))]
    parts += [past.forward(span, inputs.part(at, at + 1)) for at in range(first, inputs.tokens)]
    return torch.cat(parts, dim=1)


def _noisy(inputs: Activations, dtype: torch.dtype, limits: VerifyLimits) -> list[Activations]:
    """Return the inputs with each number changed by less than its rounding."""
    generator = torch.Generator().manual_seed(0)
    size = limits.noise * torch.finfo(dtype).eps
    wide = inputs.hidden.double()
    noises = [torch.randn(wide.shape, generator=generator, dtype=wide.dtype) for _ in range(limits.draws)]
    return [inputs.with_hidden((wide * (1 + size * noise)).float()) for noise in noises]


def _table(outputs: Tensor, told: int) -> Tensor:
    """Return the last positions of all rows as [positions, hidden_size]."""
    return outputs[:, outputs.shape[1] - told :].flatten(0, 1).float()
