"""Where short pasts of many sessions lie together: a row of one tensor for each session, with room for more positions.

A call for each session and layer takes some 30 us, however short its past is. Sessions whose single steps are computed
together write their new positions into one tensor of each layer instead, and attend to it by one call.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swarm.model.cache import SpanCache


class Slots:
    """Keys and values of some layers, by the layers' numbers: [rows, heads, capacity, size].

    Attention weighs hidden positions with 0, so they must be finite: a row is zero behind the past copied to it.
    """

    def __init__(self, like: Mapping[int, tuple[Tensor, Tensor]], rows: int, capacity: int) -> None:
        """like: for each layer keys and values as they will lie there, [any, heads, any, size]."""
        self.layers = {
            layer_idx: tuple(side.new_zeros(rows, side.shape[1], capacity, side.shape[3]) for side in pair)
            for layer_idx, pair in like.items()
        }
        self.numbers = tuple(like)
        self.capacity = capacity
        self.position_bytes = max(side[0, :, 0].nbytes for pair in self.layers.values() for side in pair)
        self._holders: list[ref[SpanCache] | None] = [None] * rows

    @property
    def rows(self) -> int:
        """How many sessions have a place."""
        return len(self._holders)

    @property
    def is_writable(self) -> bool:
        """Whether this thread may write in place: inference mode's tensors are its own."""
        return self.layers[self.numbers[0]][0].is_inference() == torch.is_inference_mode_enabled()

    def past(self, layer_idx: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Return views of one session's keys and values, [1, heads, length, size]."""
        keys, values = self.layers[layer_idx]
        return keys[row : row + 1, :, :length], values[row : row + 1, :, :length]

    def held(self) -> list["SpanCache"]:
        """The caches whose pasts lie here."""
        return [cache for row in range(self.rows) if (cache := self._holder(row)) is not None]

    def free(self, near: Sequence[int]) -> list[int]:
        """The rows that have no past, those near to these first."""
        first, last = min(near), max(near)
        empty = [row for row in range(self.rows) if self._holder(row) is None]
        return sorted(empty, key=lambda row: max(first - row, row - last))

    def take(self, row: int, cache: "SpanCache") -> None:
        """Copy a cache's past to a free row. From now on it lies there."""
        for layer_idx, pair in self.layers.items():
            for side, past in zip(pair, cache.past(layer_idx), strict=True):
                side[row].zero_()
                side[row].narrow(1, 0, past.shape[2]).copy_(past[0])
        self._holders[row] = ref(cache)
        cache.enter(Slot(self, row))

    def _holder(self, row: int) -> "SpanCache | None":
        held = self._holders[row]
        cache = None if held is None else held()
        return cache if cache is not None and cache.slot == (self, row) else None


class Slot(NamedTuple):
    """One session's row. How long its past is, its cache knows."""

    slots: Slots
    row: int
