"""Keys and values that grow in place: a decode step writes one position, and does not copy the past.

The stock layers put the past and the new positions together in a new tensor at every step, and so it is here while
there is so little that copying it costs less than the bookkeeping. From then on a layer holds a buffer with room behind
its last position. In a computer's own memory that room is address space alone: the system gives a page when it is first
written to, so a buffer is reserved several times as long as it is, and holds only the pages that are used. Devices have
no such thing; there one part in sixteen is to spare. Layers with a sliding window move on through their buffer and
start anew when they reach its end.

A gather or a rollback makes new tensors or views, as it does in the stock layers: a view that still lies in the buffer
goes on there, any other tensor gets a buffer of its own with the next step. The pages behind a rollback are still held.
So where it leaves a good part of them unused, the rest moves to memory of its own.
"""

import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from swarm.limits import limit

PAGE_TOKENS = 16  # memory is taken and charged in units of so many positions, per row
BLOCK_TOKENS = 32  # an aligned layer shows the past from a multiple of so many positions on (swarm.model.aligned)


@dataclass(frozen=True, slots=True)
class GrowingLimits:
    """How much room a growing layer takes ahead."""

    small_bytes: int = limit(64 * 1024, "bytes", "less of one layer's keys is copied at each step, in 3 us, not grown")
    slack_share: int = limit(16, "parts", "of a buffer on a device, of which one is to spare")
    window_slack_share: int = limit(4, "parts", "of a window's buffer, of which one is to spare before it moves back")
    reserved_times: int = limit(4, "times", "the length of a layer that is reserved as address space")
    unused_share: int = limit(4, "parts", "of a used buffer; a rollback that leaves more than one unused copies")
    unused_tokens_min: int = limit(64, "tokens", "of all rows; a rollback that leaves fewer unused does not copy")
    joined_room: int = limit(32, "positions", "to spare at most, where short pasts of many sessions lie together")
    joined_spread: float = limit(1.5, "times", "as many rows as a batch has are read at most; else it moves")
    joined_rows_max: int = limit(3, "rows", "for each that is used, at most; else the used ones move")
    reserved_tokens_min: int = limit(1024, "positions", "reserved as address space at least")


def pages(tokens: int) -> int:
    """Round tokens up to whole pages."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def reserve(numbers: int, like: Tensor) -> mmap.mmap | None:
    """Reserve pages of a computer's own memory for so many numbers; they go back at once when they are freed.

    They take no memory until they are written to, not even as one huge page that a system may prefer. None on devices
    and other systems, and where there are no more mappings, or no more memory is promised than there is.
    """
    if like.device.type != "cpu" or sys.platform != "linux":
        return None
    with suppress(OSError):
        space = mmap.mmap(-1, numbers * like.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        space.madvise(mmap.MADV_NOHUGEPAGE)
        return space
    return None


class _Buffer:
    """Memory for the keys, or the values, of one layer: [rows, heads, capacity, size]."""

    def __init__(self, limits: GrowingLimits, *, window: bool = False) -> None:
        """window: it moves through its buffer and writes to all of it, so it reserves no address space."""
        self._limits = limits
        self._slack_share = limits.window_slack_share if window else limits.slack_share
        self._reserves = not window
        self._memory: Tensor | None = None
        self._used = 0  # positions of it that were written to before a rollback

    def append(self, past: Tensor | None, new: Tensor) -> Tensor:
        """Return past and new positions as one view of the buffer. past: [rows, heads, length, size], or empty."""
        length = past.shape[-2] if past is not None and past.dim() == new.dim() else 0
        if length and past is not None and past.nbytes < self._limits.small_bytes:
            self._memory = None
            return torch.cat([past, new], dim=-2)
        total = length + new.shape[-2]
        start = self._start_of(past, new) if past is not None and length else -1
        if start < 0 or self._memory is None or start + total > self._memory.shape[-2]:
            self._memory, start, self._used = self._room_for(total, new), 0, 0
            if past is not None and length:
                self._memory.narrow(2, 0, length).copy_(past)
        self._memory.narrow(2, start + length, new.shape[-2]).copy_(new)
        return self._memory.narrow(2, start, total)

    def cropped(self, before: int, kept: Tensor) -> Tensor:
        """Return what a rollback has left of so many positions, in memory of its own where much more was used."""
        self._used = max(self._used, before)
        unused = self._used - kept.shape[-2]
        is_little = unused * self._limits.unused_share <= self._used
        if self._memory is None or is_little or unused * len(kept) < self._limits.unused_tokens_min:
            return kept
        self._memory = None
        return kept.clone()

    def fitted(self, kept: Tensor) -> Tensor:
        """Return this view of the buffer, in memory of its own where the buffer is much longer."""
        memory, length = self._memory, kept.shape[-2]
        if memory is None or memory.shape[-2] <= length + 2 * max(PAGE_TOKENS, length // self._slack_share):
            return kept
        self._memory = None
        return kept.clone()

    def _room_for(self, total: int, new: Tensor) -> Tensor:
        """Memory for so many positions and some more."""
        rows, heads, _, size = new.shape
        tokens = max(self._limits.reserved_tokens_min, pages(self._limits.reserved_times * total))
        if self._reserves and (space := reserve(rows * heads * tokens * size, new)) is not None:
            return torch.frombuffer(space, dtype=new.dtype).view(rows, heads, tokens, size)
        return new.new_empty(rows, heads, pages(total) + total // self._slack_share // PAGE_TOKENS * PAGE_TOKENS, size)

    def _start_of(self, past: Tensor, new: Tensor) -> int:
        """At which position of the buffer this view of it begins; -1 if it is none that can be written behind."""
        memory = self._memory
        if memory is None or memory.shape[0] != new.shape[0] or past.stride() != memory.stride():
            return -1
        if memory.is_inference() != torch.is_inference_mode_enabled():
            return -1
        offset, step = past.data_ptr() - memory.data_ptr(), memory.shape[3] * memory.element_size()
        return offset // step if 0 <= offset < memory.shape[2] * step else -1


class GrowingLayer(DynamicLayer):
    """A stock layer whose `update` does not copy the past."""

    def __init__(self, limits: GrowingLimits = GrowingLimits()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limits = limits
        self._buffers: tuple[_Buffer, _Buffer] | None = None  # once they are worth their bookkeeping

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Append; returns all keys and values."""
        if key_states.requires_grad and torch.is_grad_enabled():
            stock: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return stock
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        small = self._limits.small_bytes
        if keys.dim() == key_states.dim() and keys.shape[-2] and max(keys.nbytes, values.nbytes) < small:
            self._buffers = None
            self.keys = torch.cat([keys, key_states], dim=-2)
            self.values = torch.cat([values, value_states], dim=-2)
            return self.keys, self.values
        if self._buffers is None:
            self._buffers = _Buffer(self._limits), _Buffer(self._limits)
        self.keys = self._buffers[0].append(keys, key_states)
        self.values = self._buffers[1].append(values, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Cut the last positions off, as the stock layer does, and give their memory back if it is much.

        tokens_to_remove: their number, negative.
        """
        before = 0 if self.keys is None else self.keys.shape[-2]
        super().crop(tokens_to_remove)
        if self._buffers is not None:
            keys, values = self.past
            self.keys, self.values = self._buffers[0].cropped(before, keys), self._buffers[1].cropped(before, values)

    @property
    def past(self) -> tuple[Tensor, Tensor]:
        """Keys and values, once there are any."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def is_short(self, length: int, small_bytes: int) -> bool:
        """Whether this is the past of one row and so many positions, in fewer bytes for each of keys and values."""
        keys, values = self.keys, self.values
        if keys is None or values is None or not keys.numel() or keys.shape[0] > 1 or keys.shape[-2] != length:
            return False
        return max(keys.nbytes, values.nbytes) < small_bytes

    def hold(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Take these for the whole past, [1, heads, length, size]. None: it is elsewhere."""
        self._buffers = None
        self.keys, self.values = keys, values


class GrowingSlidingLayer(DynamicSlidingWindowLayer):
    """A stock layer with a window whose `update` seldom copies it.

    One that is aligned shows several new positions the past from a multiple of `BLOCK_TOKENS` on: up to 62 more.
    """

    def __init__(self, sliding_window: int, limits: GrowingLimits = GrowingLimits(), *, aligned: bool = False) -> None:
        super().__init__(sliding_window)
        self._aligned = aligned
        self._buffers = _Buffer(limits, window=True), _Buffer(limits, window=True)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Append; returns the keys and values that the new positions can see, as `get_mask_sizes` says."""
        if key_states.requires_grad and torch.is_grad_enabled():
            stock: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return stock
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        visible, _ = self.get_mask_sizes(new)
        self.cumulative_length += new
        keys, values = self._buffers
        all_keys, all_values = keys.append(self.keys, key_states), values.append(self.values, value_states)
        kept = all_keys.shape[-2] if self.record_past else self.lookback
        self.keys, self.values = _last(all_keys, kept), _last(all_values, kept)
        if new > 1:
            self.fit()
        return _last(all_keys, visible), _last(all_values, visible)

    def fit(self) -> None:
        """Let a buffer go that a long piece has made, and that is much longer than what is kept of it."""
        keys, values = self.keys, self.values
        if keys is not None and values is not None and keys.dim() > 1:
            self.keys, self.values = self._buffers[0].fitted(keys), self._buffers[1].fitted(values)

    @property
    def lookback(self) -> int:
        """Positions that later ones may be shown."""
        return self.sliding_window - 1 + (2 * (BLOCK_TOKENS - 1) if self._aligned else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions so many new ones are shown, themselves among them, and which is the first."""
        past, seen = self.cumulative_length, min(self.cumulative_length, self.sliding_window - 1)
        if self._aligned and query_length > 1:
            block = past // BLOCK_TOKENS * BLOCK_TOKENS
            first = max(0, block - self.sliding_window + 1) // BLOCK_TOKENS * BLOCK_TOKENS
            seen = max(seen, min(past - first, self._held))  # after many rollbacks in a row there may be less
        return seen + query_length, past - seen

    @property
    def _held(self) -> int:
        keys = self.keys
        return keys.shape[-2] if keys is not None and keys.dim() > 1 else 0


def growing(layer: Any, limits: GrowingLimits = GrowingLimits(), *, aligned: bool = False) -> Any:  # noqa: ANN401 - a cache layer of any family
    """Return the layer that takes the place of a stock one, still empty; any other is returned as it is."""
    if type(layer) is DynamicLayer:
        return GrowingLayer(limits)
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingSlidingLayer(layer.sliding_window, limits, aligned=aligned)
    return layer


def _last(states: Tensor, count: int) -> Tensor:
    length = states.shape[-2]
    return states if length <= count else states.narrow(2, length - count, count)
