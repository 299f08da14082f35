"""Weights that become int8 as a span is loaded (`swarm.model.integer`)."""

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.errors import UnsupportedCheckpoint
from swarm.model.allocator import return_free_memory
from swarm.model.hollow import blocks_of
from swarm.model.integer import IntegerLimits, integer_bytes, rounded_of, to_integers, weights_of
from swarm.model.probe import outputs_of, samples_of
from swarm.model.span import Span
from swarm.model.traits import Traits


def quantise(
    name: str,
    model: PreTrainedModel,
    traits: Traits,
    blocks: Blocks,
    limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
) -> None:
    """Round the weights of a loaded model's blocks to int8, one layer at a time.

    name: of the model, for errors. Raises UnsupportedCheckpoint where int8 reaches little of a block, or where a block
    then computes something else.
    """
    refuse_to_quantise(name, model, blocks)
    before = Span.of(model, traits, blocks)
    indices = samples_of(before)
    with torch.inference_mode():
        expected = [outputs_of(before.part(Blocks(index, index + 1))) for index in indices]
    layers = blocks_of(model)
    for index in blocks:
        for module in rounded_of(layers[index], limits):
            to_integers(module)
    return_free_memory()
    after = Span.of(model, traits, blocks)
    for index, outputs in zip(indices, expected, strict=True):
        with torch.inference_mode():
            got = outputs_of(after.part(Blocks(index, index + 1)))
        error = max(float((new - old).norm() / old.norm()) for new, old in zip(got, outputs, strict=True))
        if not error < limits.error_max:  # NaN is no error that small either
            why = f"block {index} computes something else with int8 weights ({error:.0%} off)"
            raise UnsupportedCheckpoint(name, why)


def refuse_to_quantise(
    name: str,
    model: PreTrainedModel,
    blocks: Blocks,
    limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
) -> None:
    """Raise UnsupportedCheckpoint where int8 weights are not for this model. It may be on the meta device."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedCheckpoint(name, "its weights are quantised already: leave --quantize out")
    layers = blocks_of(model)
    for index in blocks:
        share = _numbers(layers[index], limits) / _size(layers[index])
        if share < limits.share_min:
            why = f"int8 is for linear layers and experts: {share:.0%} of block {index} is; leave --quantize out"
            raise UnsupportedCheckpoint(name, why)


def quantised_bytes(layer: nn.Module, item: int) -> int:
    """Return the memory of a block's weights once they are int8. item: bytes of a number that is not."""
    weights = [weight for module in rounded_of(layer) for weight in weights_of(module)]
    plain = _size(layer) - sum(weight.numel() for weight in weights)
    return plain * item + sum(integer_bytes(weight.shape[:-1].numel(), weight.shape[-1]) for weight in weights)


def _numbers(layer: nn.Module, limits: IntegerLimits) -> int:
    return sum(weight.numel() for module in rounded_of(layer, limits) for weight in weights_of(module))


def _size(layer: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*layer.parameters(), *layer.buffers()))
