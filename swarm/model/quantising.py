"""Weights that become int8 as a span is loaded (`swarm.model.integer`)."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.errors import UnsupportedCheckpoint
from swarm.model.allocator import return_free_memory
from swarm.model.hollow import blocks_of
from swarm.model.integer import (
    IntegerLimits,
    IntegerMatrix,
    integer_bytes,
    nothing,
    rounded_of,
    to_integers,
    weights_of,
)
from swarm.model.probe import outputs_of, samples_of
from swarm.model.span import Span


class Rounding:
    """Rounds the weights of some blocks of one model: linear layers' as they are read, experts' once they are loaded.

    So linear layers never take the memory that they have in the checkpoint. Experts come in many tensors, which
    `transformers` joins.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        blocks: Blocks,
        dtype: torch.dtype,
        limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
    ) -> None:
        """skeleton: the hollow model, on the meta device. dtype: in which it is loaded."""
        self._limits, self._dtype, self._blocks = limits, dtype, blocks
        chosen = set(map(id, self._modules(skeleton)))
        self._linears = {
            f"{name}.weight"
            for name, module in skeleton.named_modules()
            if id(module) in chosen and isinstance(module, nn.Linear)
        }
        self._read: dict[str, IntegerMatrix] = {}

    def read(self, name: str | None, tensor: Tensor) -> Tensor:
        """Return the tensor that is loaded in its place. name: in the model, where it becomes one tensor there."""
        if name not in self._linears or tensor.dim() != 2 or not tensor.is_floating_point():
            return tensor
        self._read[name] = IntegerMatrix(tensor)
        return nothing(tensor.shape, self._dtype)

    def finish(self, model: PreTrainedModel) -> None:
        """Round the other weights: experts, and linear layers that are joined from several tensors."""
        names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
        for module in self._modules(model):
            to_integers(module, self._read.pop(names[id(module)], None))
        return_free_memory()

    def _modules(self, model: PreTrainedModel) -> list[nn.Module]:
        layers = blocks_of(model)
        return [module for index in self._blocks for module in rounded_of(layers[index], self._limits)]


def prove_rounded(name: str, span: Span) -> None:
    """Run a few blocks. Raises UnsupportedCheckpoint where one goes around the layers that were rounded."""
    for index in samples_of(span):
        with torch.inference_mode():
            outputs = outputs_of(span.part(Blocks(index, index + 1)))
        if not all(bool(output.isfinite().all()) for output in outputs):
            raise UnsupportedCheckpoint(name, f"block {index} reads weights that int8 has taken: leave --quantize out")


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
