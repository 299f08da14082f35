"""Blocks of a past: keys and values of some positions, cut out of one session's cache and put into another's.

Only layers that keep every position can be cut: windows and recurrent states know the end of a past alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model.cache import SpanCache
from swarm.model.growing import GrowingLayer
from swarm.model.span import Span


@dataclass(frozen=True, slots=True)
class PastBlock:
    """Keys and values [1, heads, positions, size] of each layer of a span, which nothing changes any more."""

    layers: tuple[tuple[Tensor, Tensor], ...]


@dataclass(slots=True)
class Cutting:
    """Blocks that a task is to cut when it is computed. bounds: their first positions, and those behind the last.

    blocks: filled by `cut`.
    """

    bounds: tuple[tuple[int, int], ...]
    blocks: tuple[PastBlock, ...] = ()

    def cut(self, cache: SpanCache) -> None:
        """Copy the blocks out of a cache of one row; none where a layer does not keep every position."""
        if all(_is_plain(layer, cache.length) for layer in cache.layers):
            self.blocks = tuple(_copied(cache, start, stop) for start, stop in self.bounds)


def can_share(span: Span) -> bool:
    """Whether pasts of a span can be cut, as far as the model's traits tell."""
    traits = span.traits
    kinds = {traits.kinds[block] for block in range(span.blocks.start, span.blocks.stop)}
    return traits.can_roll_back and "full" in kinds and kinds <= {"full", "none"}


def refill(cache: SpanCache, blocks: Sequence[PastBlock]) -> None:
    """Put blocks that follow each other into an empty cache of the same span."""
    if not blocks:
        return
    each_layer = zip(*(block.layers for block in blocks), strict=True)
    for layer, pairs in zip(cache.layers, each_layer, strict=True):
        keys, values = (torch.cat([pair[side] for pair in pairs], dim=-2) for side in (0, 1))
        layer.update(keys, values)
    cache.advance(sum(block.layers[0][0].shape[-2] for block in blocks))


def _is_plain(layer: object, length: int) -> bool:
    return type(layer) is GrowingLayer and layer.keys is not None and layer.keys.shape[-2] == length


def _copied(cache: SpanCache, start: int, stop: int) -> PastBlock:
    whole = [(layer.keys, layer.values) for layer in cache.layers]
    return PastBlock(
        tuple((keys[:, :, start:stop].clone(), values[:, :, start:stop].clone()) for keys, values in whole)
    )
