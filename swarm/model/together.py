"""Single steps of many sessions with short pasts: which lie in rows side by side, and how they are written and read.

A batch whose sessions have rows side by side is computed in place. Any other one gets new rows, to which its pasts are
copied; that is a batch's first step, and one in as many as a row has to spare. Long pasts stay apart: reading them
takes longer than the call that is saved.

Rows keep each other's memory. Those whose neighbours have left for other rows move to memory of their own.
"""

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from swarm.model.cache import SpanCache
from swarm.model.growing import GrowingLimits
from swarm.model.slots import Slot, Slots


class Joined:
    """Some segments of a packed step, in the order of their rows. Made for one step."""

    def __init__(self, caches: Sequence[SpanCache], numbers: list[int], tokens: list[int]) -> None:
        """caches: in slots side by side. numbers: of their segments. tokens: where their positions are in the step."""
        assert caches[0].slot is not None
        self.first = caches[0].slot
        self.numbers = numbers
        self.lengths = [cache.length + 1 for cache in caches]  # with the new position
        self._tokens = tokens
        self._is_sorted = tokens == list(range(len(tokens)))
        self._places_of: dict[int, Tensor] = {}  # by the number of heads
        self._mask: Tensor | None = None

    def append(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position for each, of [1, heads, N, size]. Returns all: [segments, heads, longest, size]."""
        grown = []
        for rows, states in zip(self.first.slots.layers[layer_idx], (keys, values), strict=True):
            new = self.chosen(states)
            _, heads, count, size = new.shape
            places = self._places(heads, states.device)
            rows.view(-1, size).index_copy_(0, places, new.reshape(heads * count, size))
            grown.append(rows.narrow(0, self.first.row, count).narrow(2, 0, max(self.lengths)))
        return grown[0], grown[1]

    def mask(self, like: Tensor) -> Tensor | None:
        """What attention adds, [segments, 1, 1, longest]: nothing where a position is real. None if all are as long."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        if self._mask is None:
            hidden = torch.arange(longest) >= torch.tensor(self.lengths)[:, None]
            nothing = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
            self._mask = nothing[:, None, None].to(like.device)
        return self._mask

    def chosen(self, states: Tensor) -> Tensor:
        """Return these segments' part of [1, heads, N, size], in the order of rows."""
        if self._is_sorted and states.shape[2] == len(self._tokens):
            return states
        return states.index_select(2, torch.tensor(self._tokens, device=states.device))

    def spread(self, states: Tensor) -> Tensor:
        """Return states [segments, ...] in the order of the segments; only where all are joined."""
        if self._is_sorted:
            return states
        order = sorted(range(len(states)), key=self.numbers.__getitem__)
        return states.index_select(0, torch.tensor(order, device=states.device))

    def _places(self, heads: int, device: torch.device) -> Tensor:
        """Return where new positions go in [rows * heads * capacity]: int64 [heads * segments]."""
        if heads not in self._places_of:
            slots, row = self.first
            rows = torch.arange(row, row + len(self.numbers))
            places = (rows * heads + torch.arange(heads)[:, None]) * slots.capacity + torch.tensor(self.lengths) - 1
            self._places_of[heads] = places.flatten().to(device)
        return self._places_of[heads]


class Together:
    """Gives rows to sessions that step together. Used by a model's one compute thread."""

    def __init__(self, limits: GrowingLimits) -> None:
        self._limits = limits
        self._given: list[tuple[ref[Slots], list[ref[SpanCache]]]] = []

    def join(self, caches: Sequence[SpanCache], numbers: Sequence[int], tokens: Sequence[int]) -> Joined | None:
        """Bring those of some single steps whose pasts are short into rows side by side. None for fewer than two.

        numbers, tokens: of their segments and positions in the packed step.
        """
        small_bytes = self._limits.small_bytes
        layers = [cache.joinable(small_bytes) for cache in caches]
        common = next(filter(None, layers), ())
        members = [at for at, own in enumerate(layers) if own == common]
        if not common or len(members) < 2:
            return None
        members.sort(key=lambda at: _row_of(caches[at]))
        together = [caches[at] for at in members]
        if not _in_place(together):
            self._move(common, together)
        return Joined(together, [numbers[at] for at in members], [tokens[at] for at in members])

    def _move(self, layers: Sequence[int], caches: Sequence[SpanCache]) -> None:
        """Copy pasts to new rows, with room for more."""
        room = self._limits.joined_room
        capacity = (max(cache.length for cache in caches) // room + 1) * room
        slots = Slots({index: _rows([cache.past(index) for cache in caches], capacity) for index in layers})
        for row, cache in enumerate(caches):
            cache.enter(Slot(slots, row))
        self._given.append((ref(slots), list(map(ref, caches))))
        self._part()

    def _part(self) -> None:
        """Give memory of their own to those whose neighbours are gone, so that they do not keep all rows."""
        kept = []
        for given, holders in self._given:
            slots = given()
            if slots is None:
                continue
            held = [cache for holder in holders if (cache := holder()) is not None]
            here = [cache for cache in held if cache.slot is not None and cache.slot.slots is slots]
            if 2 * len(here) >= slots.rows:
                kept.append((given, holders))
                continue
            for cache in here:
                cache.come_out()
        self._given = kept


def _row_of(cache: SpanCache) -> int:
    return -1 if cache.slot is None else cache.slot.row


def _rows(pasts: Sequence[tuple[Tensor, Tensor]], capacity: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of some sessions, [1, heads, their length, size], as rows of so many positions."""
    pair = []
    for side in (0, 1):
        _, heads, _, size = pasts[0][side].shape
        rows = pasts[0][side].new_zeros(len(pasts), heads, capacity, size)
        for row, past in zip(rows, pasts, strict=True):
            row.narrow(1, 0, past[side].shape[2]).copy_(past[side][0])
        pair.append(rows)
    return pair[0], pair[1]


def _in_place(caches: Sequence[SpanCache]) -> bool:
    """Whether these caches, sorted by their rows, lie side by side, with room for one position more."""
    first = caches[0].slot
    if first is None or not first.slots.is_writable:
        return False
    slots, length_max = first.slots, first.slots.capacity - 1
    return all(
        cache.slot is not None and cache.slot.slots is slots and cache.slot.row == row and cache.length <= length_max
        for row, cache in enumerate(caches, first.row)
    )
