"""Where short pasts of many sessions lie together: a row of one tensor for each session, with room for more positions.

A call for each session and layer takes some 30 us, however short its past is. Sessions whose single steps are computed
together write their new positions into one tensor of each layer instead, and attend to it by one call.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Slots:
    """Keys and values of some layers, by the layers' numbers: [rows, heads, capacity, size], zero where none were put.

    Attention weighs what a mask hides with 0, so it must be finite.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.layers = dict(layers)
        self.numbers = tuple(layers)
        first = next(iter(self.layers.values()))[0]
        self.rows, _, self.capacity, _ = first.shape
        self.position_bytes = max(side[0, :, 0].nbytes for pair in self.layers.values() for side in pair)

    def past(self, layer_idx: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Return views of one session's keys and values, [1, heads, length, size]."""
        keys, values = self.layers[layer_idx]
        return keys[row : row + 1, :, :length], values[row : row + 1, :, :length]

    @property
    def is_writable(self) -> bool:
        """Whether this thread may write in place: inference mode's tensors are its own."""
        return next(iter(self.layers.values()))[0].is_inference() == torch.is_inference_mode_enabled()


class Slot(NamedTuple):
    """One session's row. How long its past is, its cache knows."""

    slots: Slots
    row: int
