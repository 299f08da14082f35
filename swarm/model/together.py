"""Short pasts of many sessions in one packed step: joined in memory, and attended by one call.

A call for each session and layer takes some 30 us, however short its past is. So the single steps of a batch append to
one tensor of their pasts, each padded to the longest, of which each session keeps a view. It goes to attention as a
whole, with a mask over the padding. Long pasts stay apart: reading them takes longer than the call.

A view keeps the other sessions' memory, too. Only the latest such tensor of each layer is shared: a session that does
not take part in the next batch gets memory of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from swarm.model.growing import GrowingLayer


@dataclass(slots=True)
class Shape:
    """The segments of a packed step that are joined, by number, and the lengths of their pasts with the new position.

    mask: bool [segments, 1, 1, longest], True where a position is real; None if all are as long as the longest.
    """

    numbers: list[int]
    lengths: list[int]
    mask: Tensor | None

    @classmethod
    def of(cls, numbers: list[int], lengths: list[int], device: torch.device) -> "Shape":
        """Lay out pasts of these lengths."""
        longest = max(lengths)
        if min(lengths) == longest:
            return cls(numbers, lengths, None)
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        return cls(numbers, lengths, real[:, None, None].to(device))

    def padded(self, joined: Tensor) -> Tensor:
        """Return joined pasts [1, heads, segments * longest, size] as [segments, heads, longest, size]."""
        _, heads, _, size = joined.shape
        return joined.view(heads, len(self.lengths), -1, size).transpose(0, 1)

    def join(self, pasts: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Put pasts and their new positions side by side. Returns all, padded, and each one's own part as a view."""
        longest = max(self.lengths)
        widths = [longest - length for length in self.lengths]
        zeros = new[0].new_zeros(*new[0].shape[:2], max(widths), new[0].shape[3])
        paddings = {width: zeros[:, :, :width] for width in set(widths)}
        parts = zip(pasts, new, (paddings[width] for width in widths), strict=True)
        joined = torch.cat(list(chain.from_iterable(parts)), dim=2)
        sizes = list(chain.from_iterable(zip(self.lengths, widths, strict=True)))
        return joined, joined.split_with_sizes(sizes, dim=2)[::2]


@dataclass(slots=True)
class Together:
    """The sessions whose pasts lie in one tensor, for each layer. Used by a model's one compute thread."""

    _members: dict[int, list[ref[GrowingLayer]]] = field(default_factory=dict)

    def append(
        self,
        layer_idx: int,
        layers: Sequence[GrowingLayer],
        new: tuple[Sequence[Tensor], Sequence[Tensor]],
        shape_of: Callable[[list[int]], Shape],
    ) -> tuple[Tensor, Tensor, Shape]:
        """Append a position to each layer. Returns all keys and all values, joined, and how they lie.

        new: keys and values, [1, heads, 1, size] for each. shape_of: is given the new lengths.
        """
        self._part(layer_idx, layers)
        shape = shape_of([layer.get_seq_length() + 1 for layer in layers])
        pasts = [layer.past for layer in layers]
        keys, own_keys = shape.join([past[0] for past in pasts], new[0])
        values, own_values = shape.join([past[1] for past in pasts], new[1])
        for layer, *own in zip(layers, own_keys, own_values, strict=True):
            layer.hold(*own)
        return keys, values, shape

    def _part(self, layer_idx: int, layers: Sequence[GrowingLayer]) -> None:
        """Give those memory of their own that were joined before and are not among these."""
        before = self._members.get(layer_idx, [])
        if len(before) == len(layers) and all(old() is new for old, new in zip(before, layers, strict=True)):
            return
        staying = set(map(id, layers))
        for old in before:
            layer = old()
            if layer is not None and id(layer) not in staying:
                layer.own()
        self._members[layer_idx] = [ref(layer) for layer in layers]


def is_short(layer: Any) -> bool:  # noqa: ANN401 - a cache layer of any family
    """Whether a layer's past of one row may be joined with others."""
    return type(layer) is GrowingLayer and layer.is_small and layer.past[0].shape[0] == 1
