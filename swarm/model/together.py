"""Single steps of many sessions with short pasts: which lie in rows side by side, and how they are written and read.

A batch is computed in place where its sessions have rows of the same tensors. One that was elsewhere moves to a free
row near by; a batch that is spread too far, or finds no room, moves as a whole. Long pasts stay apart: reading them
takes longer than the call that is saved.

Rows keep each other's memory. The last ones of a tensor whose others have left move to memory of their own.
"""

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from swarm.model.cache import SpanCache
from swarm.model.growing import GrowingLimits
from swarm.model.slots import Slots


class Joined:
    """Some segments of a packed step whose pasts lie in slots. Made for one step.

    numbers: of the segments. lengths: of their pasts, with the new position.
    """

    def __init__(self, slots: Slots, caches: Sequence[SpanCache], numbers: list[int], tokens: list[int]) -> None:
        """caches: all in these slots. tokens: where their positions are in the step, ascending."""
        rows = [cache.slot.row for cache in caches if cache.slot is not None]
        self.slots = slots
        self.numbers = numbers
        self.lengths = [cache.length + 1 for cache in caches]
        self._first = min(rows)
        self._count = max(rows) + 1 - self._first  # rows that are read: some of them may be others'
        self._rows = tuple(row - self._first for row in rows)
        self._tokens = tuple(tokens)
        self._in_order = self._rows == tuple(range(self._count))
        token_of = dict(zip(self._rows, tokens, strict=True))
        self._asking = tuple(token_of.get(row, tokens[0]) for row in range(self._count))
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._places_of: dict[int, Tensor] = {}  # by the number of heads
        self._mask: Tensor | None = None

    def append(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position for each, of [1, heads, N, size]. Returns pasts: [rows read, heads, longest, size]."""
        grown = []
        for side, states in zip(self.slots.layers[layer_idx], (keys, values), strict=True):
            new = states if states.shape[2] == len(self._tokens) else self._picked(states, 2, self._tokens)
            _, heads, count, size = new.shape
            places = self._places(heads, states.device)
            side.view(-1, size).index_copy_(0, places, new.reshape(heads * count, size))
            grown.append(side.narrow(0, self._first, self._count).narrow(2, 0, max(self.lengths)))
        return grown[0], grown[1]

    def part(self, states: Tensor, number: int) -> Tensor:
        """Return one segment's past, [1, heads, length, size], of those that `append` returned."""
        at = self.numbers.index(number)
        row = self._rows[at]
        return states[row : row + 1, :, : self.lengths[at]]

    def queries(self, states: Tensor) -> Tensor:
        """Return [1, heads, N, size] as [rows read, heads, 1, size]; others' rows get any."""
        if not self._in_order or states.shape[2] != self._count:
            states = self._picked(states, 2, self._asking)
        return states.transpose(0, 2)

    def answers(self, output: Tensor) -> Tensor:
        """Return the segments' part of [rows read, ...], in the order of `numbers`."""
        return output if self._in_order else self._picked(output, 0, self._rows)

    def mask(self, like: Tensor) -> Tensor | None:
        """Return the mask that attention adds, [rows read, 1, 1, longest]; None where all positions are real."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        if self._mask is None:
            lengths = [longest] * self._count
            for row, length in zip(self._rows, self.lengths, strict=True):
                lengths[row] = length
            hidden = torch.arange(longest) >= torch.tensor(lengths)[:, None]
            nothing = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
            self._mask = nothing[:, None, None].to(like.device)
        return self._mask

    def _picked(self, states: Tensor, dim: int, numbers: tuple[int, ...]) -> Tensor:
        if numbers not in self._indices:  # one copy to a device for all layers
            self._indices[numbers] = torch.tensor(numbers, device=states.device)
        return states.index_select(dim, self._indices[numbers])

    def _places(self, heads: int, device: torch.device) -> Tensor:
        """Return where new positions go in [all rows * heads * capacity]: int64 [heads * segments]."""
        if heads not in self._places_of:
            rows, ends = torch.tensor(self._rows) + self._first, torch.tensor(self.lengths) - 1
            places = (rows * heads + torch.arange(heads)[:, None]) * self.slots.capacity + ends
            self._places_of[heads] = places.flatten().to(device)
        return self._places_of[heads]


class Together:
    """Gives rows to sessions that step together. Used by a model's one compute thread."""

    def __init__(self, limits: GrowingLimits) -> None:
        self._limits = limits
        self._given: list[ref[Slots]] = []

    def join(self, caches: Sequence[SpanCache], numbers: Sequence[int], tokens: Sequence[int]) -> Joined | None:
        """Bring those of some single steps whose pasts are short into the same slots. None for fewer than two.

        numbers, tokens: of their segments and positions in the packed step.
        """
        small_bytes = self._limits.small_bytes
        layers = [cache.joinable(small_bytes) for cache in caches]
        common = next(filter(None, layers), ())
        members = [at for at, own in enumerate(layers) if own == common]
        if not common or len(members) < 2:
            return None
        together = [caches[at] for at in members]
        slots = self._found(together) or self._new(common, together)
        return Joined(slots, together, [numbers[at] for at in members], [tokens[at] for at in members])

    def _found(self, caches: Sequence[SpanCache]) -> Slots | None:
        """Return the slots where most of these lie, and bring the others there. None where they do not fit."""
        all_slots = [cache.slot.slots for cache in caches if cache.slot is not None]
        if not all_slots:
            return None
        slots = max(set(all_slots), key=all_slots.count)
        rows = [cache.slot.row for cache in caches if cache.slot is not None and cache.slot.slots is slots]
        others = [cache for cache in caches if cache.slot is None or cache.slot.slots is not slots]
        free = slots.free(rows)[: len(others)] if others else []
        if len(free) < len(others) or not slots.is_writable or max(c.length for c in caches) >= slots.capacity:
            return None
        rows += free
        if max(rows) + 1 - min(rows) > self._limits.joined_spread * len(rows):
            return None
        for row, cache in zip(free, others, strict=True):
            slots.take(row, cache)
        return slots

    def _new(self, layers: Sequence[int], caches: Sequence[SpanCache]) -> Slots:
        """Copy pasts to new rows, with room for more positions and more sessions."""
        room = self._limits.joined_room
        capacity = (max(cache.length for cache in caches) // room + 1) * room
        rows = len(caches) + len(caches) // 4
        slots = Slots({layer_idx: caches[0].past(layer_idx) for layer_idx in layers}, rows, capacity)
        for row, cache in enumerate(caches):
            slots.take(row, cache)
        self._given.append(ref(slots))
        self._part()
        return slots

    def _part(self) -> None:
        """Give memory of their own to those whose neighbours have left, so that they do not keep all rows."""
        kept = []
        for given in self._given:
            slots = given()
            held = [] if slots is None else slots.held()
            if slots is not None and self._limits.joined_rows_max * len(held) >= slots.rows:
                kept.append(given)
                continue
            for cache in held:
                cache.come_out()
        self._given = kept
