"""Blocks of a past: keys and values of some positions, cut out of one session's cache and put into another's.

Only layers that keep every position can be cut: windows and recurrent states know the end of a past alone.
"""

import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model.cache import SpanCache
from swarm.model.growing import GrowingLayer, reserve
from swarm.model.span import Span


@dataclass(frozen=True, slots=True)
class PastBlock:
    """Keys and values of some positions of each layer of a span, which nothing changes any more.

    They lie one behind the other in pages of their own, and no tensor is kept: thousands of blocks that come and go
    leave a heap no holes, not even those around small things. data: the pages; a tensor where none can be had. shapes:
    [1, heads, positions, size] of each layer's keys and of its values, the same object in blocks that are alike.
    """

    data: mmap.mmap | Tensor
    dtype: torch.dtype
    shapes: tuple[tuple[torch.Size, torch.Size], ...]

    @property
    def positions(self) -> int:
        """How many it has."""
        return self.shapes[0][0][-2]

    @property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Each layer's keys and values, as views."""
        sizes = [shape.numel() for pair in self.shapes for shape in pair]
        data = self.data if isinstance(self.data, Tensor) else torch.frombuffer(self.data, dtype=self.dtype)
        parts = iter(data.split(sizes))
        return tuple((next(parts).view(keys), next(parts).view(values)) for keys, values in self.shapes)


@dataclass(slots=True)
class Cutting:
    """Blocks that a task is to cut when it is computed. bounds: their first positions, and those behind the last.

    blocks: filled by `cut`.
    """

    bounds: tuple[tuple[int, int], ...]
    blocks: tuple[PastBlock, ...] = ()

    def cut(self, cache: SpanCache) -> None:
        """Copy the blocks out of a cache of one row; none where layers do not keep every position alike."""
        if all(_is_plain(layer, cache.length) for layer in cache.layers) and len(_kinds(cache)) == 1:
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
    cache.advance(sum(block.positions for block in blocks))


def _is_plain(layer: object, length: int) -> bool:
    return type(layer) is GrowingLayer and layer.keys is not None and layer.keys.shape[-2] == length


def _kinds(cache: SpanCache) -> set[tuple[torch.dtype, torch.device]]:
    return {(side.dtype, side.device) for layer in cache.layers for side in (layer.keys, layer.values)}


@functools.lru_cache(maxsize=64)
def _one(shapes: tuple[tuple[torch.Size, torch.Size], ...]) -> tuple[tuple[torch.Size, torch.Size], ...]:
    """Return the first ones that were equal."""
    return shapes


def _copied(cache: SpanCache, start: int, stop: int) -> PastBlock:
    cut = [(layer.keys[:, :, start:stop], layer.values[:, :, start:stop]) for layer in cache.layers]
    like, numbers = cut[0][0], sum(keys.numel() + values.numel() for keys, values in cut)
    data = reserve(numbers, like)
    shapes = _one(tuple((keys.shape, values.shape) for keys, values in cut))
    block = PastBlock(like.new_empty(numbers) if data is None else data, like.dtype, shapes)
    for into, pair in zip(block.layers, cut, strict=True):
        for side in (0, 1):
            into[side].copy_(pair[side])
    return block
