"""The short way for decode: call the hosted blocks with the arguments that their parent would give them.

A parent spends 170 to 550 us a step on masks, rotary tables and its own calls before the first block runs, and again
on every hop. For one token without padding all of that is a function of the position and of the batch's size. So the
parent's arguments are recorded: constants as they are, tensors for a whole stretch of positions. Any other dependence
shows as a difference between recordings, and then the parent is called for every step.

`Span.forward_through_parent` is the slow twin. A span takes the short way only if both gave the same bits when it was
loaded, and on a stretch only after its first, middle and last positions agreed with the parent's arguments for them
alone.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from swarm.blocks import Blocks
from swarm.limits import limit
from swarm.model.cache import SpanCache

_Path = tuple[int | str, ...]  # block, 0 for positional and 1 for keyword arguments, then indices and keys
Record = list[tuple[tuple[Any, ...], dict[str, Any]]]  # per block: the parent's arguments
Recorder = Callable[[SpanCache, Tensor, int], Record]
"""`record(cache, positions, batch)`, positions [1, tokens]: the hosted blocks' record of one call."""


@dataclass(frozen=True, slots=True)
class DirectLimits:
    """How much the short way remembers."""

    stretch_positions: int = limit(256, "positions", "tabulated at a time: about 2 ms of the parent's time")
    stretches_max: int = limit(64, "stretches", "the least recently used goes; 256 KiB each for a head of 128 in fp32")
    tables_bytes_max: int = limit(32 << 20, "bytes", "of all stretches: masks among them have the length of the past")


@dataclass(frozen=True, slots=True)
class _Changing:
    """In a template, a tensor that the position decides: number `index` of a stretch."""

    index: int


@dataclass(frozen=True, slots=True)
class _Past:
    """In a template, the session's cache."""


@dataclass(frozen=True, slots=True)
class _Fresh:
    """In a template, an empty container that the parent makes for every call."""

    kind: type


@dataclass(frozen=True, slots=True)
class _Table:
    """A tensor at all positions of a stretch.

    It is always the same; or, where it has a row for each position along axis `row`, one of these; or, where it grows
    along an axis, at offset i its first `length` + i entries. Views are made when they are needed: thousands of small
    tensors that stay for long keep pages of the heap.
    """

    tensor: Tensor
    row: int | None = None
    axis: int | None = None
    length: int = 0

    def at(self, offset: int) -> Tensor:
        """The tensor at one position of the stretch."""
        if self.row is not None:
            return self.tensor.narrow(self.row, offset, 1)
        return self.tensor if self.axis is None else self.tensor.narrow(self.axis, 0, self.length + offset)

    def has(self, offset: int) -> bool:
        """Whether there is a tensor for this offset."""
        if self.row is not None:
            return offset < self.tensor.shape[self.row]
        return self.axis is None or self.length + offset <= self.tensor.shape[self.axis]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The blocks' arguments at positions [first, stop). Blocks with the same arguments share a template."""

    first: int
    stop: int
    batch: int
    tables: tuple[_Table, ...]
    templates: tuple[Any, ...]
    template_of: dict[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.tensor.numel() * table.tensor.element_size() for table in self.tables)


class DirectPath:
    """Calls a span's blocks for one token, with the arguments that `record` found. Made by `learned`."""

    def __init__(
        self,
        layers: dict[int, nn.Module],
        record: Recorder,
        new_cache: Callable[[], SpanCache],
        device: torch.device,
        limits: DirectLimits = DirectLimits(),
    ) -> None:
        self._limits = limits
        self._forwards = {index: layer.forward for index, layer in layers.items()}
        self._record = record
        self._new_cache = new_cache
        self._device = device
        windows = {x.sliding_window for x in new_cache().layers if isinstance(x, DynamicSlidingWindowLayer)}
        # Masks may change at the first position, and where a window fills up.
        self._edges = sorted({0, 1, *(edge for window in windows for edge in (window - 1, window) if edge > 1)})
        self._stretches: OrderedDict[tuple[int, int], _Stretch | None] = OrderedDict()
        self._latest: _Stretch | None = None

    def learned(self) -> "DirectPath | None":
        """Try the first positions. Returns itself, or None where position and batch do not decide the arguments."""
        return self if self._tabulate(*self._bounds(1), batch=1) is not None else None

    def step(self, hidden: Tensor, cache: SpanCache, blocks: Blocks) -> Tensor | None:
        """Run blocks on the position that comes next. hidden: [batch, 1, hidden_size]. Returns the same shape.

        None means that the parent has to be called: without a past, or where its arguments cannot be foretold.
        """
        inner, batch = cache.inner, hidden.shape[0]
        position = inner.seen
        if not position:
            return None
        stretch = self._latest
        if stretch is None or not stretch.first <= position < stretch.stop or stretch.batch != batch:
            stretch = self._latest = self._stretch(position, batch)
        if stretch is None:
            return None
        offset = position - stretch.first
        tensors = [
            table.at(offset) if table.row is None else table.tensor.narrow(table.row, offset, 1)
            for table in stretch.tables
        ]
        filled = [_fill(template, tensors, inner) for template in stretch.templates]
        inner.pending = 1
        for index in range(blocks.start, blocks.stop):
            args, kwargs = filled[stretch.template_of[index]]
            result = self._forwards[index](hidden, *args, **kwargs)
            hidden = result[0] if isinstance(result, tuple) else result
        return hidden

    def _bounds(self, position: int) -> tuple[int, int]:
        """Return the stretch that a position belongs to."""
        length = self._limits.stretch_positions
        first = position // length * length
        at = bisect_right(self._edges, position)
        following = self._edges[at] if at < len(self._edges) else first + length
        return max(first, self._edges[at - 1]), min(first + length, following)

    def _stretch(self, position: int, batch: int) -> _Stretch | None:
        first, stop = self._bounds(position)
        key = first, batch
        if key in self._stretches:
            self._stretches.move_to_end(key)
            return self._stretches[key]
        try:
            stretch = self._tabulate(first, stop, batch)
        except Exception:  # noqa: BLE001 - nothing has happened to the session; the parent does the step
            stretch = None
        limits = self._limits
        if stretch is not None and stretch.nbytes > limits.tables_bytes_max:
            stretch = None
        self._stretches[key] = stretch
        while len(self._stretches) > limits.stretches_max or self._nbytes() > limits.tables_bytes_max:
            self._stretches.popitem(last=False)
        return stretch

    def _nbytes(self) -> int:
        return sum(stretch.nbytes for stretch in self._stretches.values() if stretch is not None)

    def _tabulate(self, first: int, stop: int, batch: int) -> _Stretch | None:
        """Record a stretch of positions at once, and some of them alone. Returns None where they disagree."""
        probes = sorted({first, (first + stop) // 2, stop - 1})
        singles, found = [], []
        for position in probes:
            cache, calls = self._recorded(position, position + 1, past=position, batch=batch)
            singles.append(calls)
            found.append(_Templates(calls, cache))
        templates, paths = found[0].templates, found[0].paths
        if found[0].unknown or not all(_alike(other.templates, templates) for other in found):
            return None
        # Rows come from these positions without any past, or there would be masks of their number times its length.
        bulk = self._recorded(first, stop, past=0, batch=batch)[1]
        offsets = [position - first for position in probes]
        tables = [_table(_at(bulk, path), [_at(calls, path) for calls in singles], offsets) for path in paths]
        followed = tuple(table for table in tables if table is not None)
        if len(followed) < len(tables):
            return None
        distinct, numbers = _without_repeats(templates)
        template_of = dict(zip(self._forwards, numbers, strict=True))
        return _Stretch(first, stop, batch, followed, tuple(distinct), template_of)

    def _recorded(self, first: int, stop: int, *, past: int, batch: int) -> tuple[SpanCache, Record]:
        """Record a step of some positions, on a cache that only claims to have a past."""
        cache = self._new_cache()
        pretend(cache, past)
        return cache, self._record(cache, torch.arange(first, stop, device=self._device)[None], batch)


def _table(bulk: Any, singles: list[Tensor], offsets: list[int]) -> _Table | None:  # noqa: ANN401 - a tensor, if all is well
    """Find how a tensor changes over a stretch, given it at some offsets alone. Returns None if no table fits."""
    for table in _candidates(bulk, singles, offsets[-1] + 1):
        if all(_is_at(table, offset, single) for offset, single in zip(offsets, singles, strict=True)):
            return table
    return None


def _candidates(bulk: Any, singles: list[Tensor], positions: int) -> Iterator[_Table]:  # noqa: ANN401 - as in `_table`
    """Yield a tensor that is always the same, one that grows along an axis, and the rows of the bulk recording."""
    first, last = singles[0], singles[-1]
    yield _Table(first)
    differing = [i for i in range(first.dim()) if first.dim() == last.dim() and first.shape[i] != last.shape[i]]
    if len(differing) == 1:
        yield _Table(last, axis=differing[0], length=first.shape[differing[0]])
    if isinstance(bulk, Tensor) and bulk.dim() == first.dim():
        for axis in range(bulk.dim()):
            if bulk.shape[axis] == positions:
                yield _Table(bulk, row=axis)


def _is_at(table: _Table, offset: int, single: Tensor) -> bool:
    if not table.has(offset):
        return False
    tensor = table.at(offset)
    return tensor.dtype == single.dtype and tensor.shape == single.shape and torch.equal(tensor, single)


class _Templates:
    """Recorded arguments, with markers in the places of the cache and of tensors.

    paths: where each tensor is found first. unknown: whether any argument is of a kind that cannot be foretold.
    """

    def __init__(self, calls: Record, cache: SpanCache) -> None:
        self._inner = cache.inner
        self._seen: list[Tensor] = []
        self.paths: list[_Path] = []
        self.unknown = False
        self.templates = [self._marked(call, (number,)) for number, call in enumerate(calls)]

    def _marked(self, value: Any, path: _Path) -> Any:  # noqa: ANN401 - any argument of any block
        if value is self._inner:
            return _Past()
        if isinstance(value, Tensor):
            return self._changing(value, path)
        if isinstance(value, tuple):
            return tuple(self._marked(item, (*path, at)) for at, item in enumerate(value))
        if type(value) is dict:
            return {key: self._marked(item, (*path, key)) for key, item in value.items()}
        if hasattr(value, "__setitem__") and not len(value):
            return _Fresh(type(value))
        if value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
            self.unknown = True
        return value

    def _changing(self, tensor: Tensor, path: _Path) -> _Changing:
        for index, known in enumerate(self._seen):
            if known is tensor:
                return _Changing(index)
        self._seen.append(tensor)
        self.paths.append(path)
        return _Changing(len(self._seen) - 1)


def _without_repeats(templates: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct templates, and for each template its number among them."""
    distinct: list[Any] = []
    numbers = []
    for template in templates:
        number = next((at for at, known in enumerate(distinct) if _alike(template, known)), len(distinct))
        if number == len(distinct):
            distinct.append(template)
        numbers.append(number)
    return distinct, numbers


def _at(value: Any, path: _Path) -> Any:  # noqa: ANN401 - nested arguments
    """Follow a path into recorded arguments; None where they have no such place."""
    for key in path:
        try:
            value = value[key]
        except (TypeError, KeyError, IndexError):
            return None
    return value


def _fill(template: Any, tensors: list[Tensor], inner: Any) -> Any:  # noqa: ANN401 - nested arguments
    """Put a position's tensors and a session's cache into a template: a tuple or dict, whose items may be others."""
    filled: list[Any] = []
    for item in template.values() if type(template) is dict else template:
        kind = type(item)
        if kind is _Changing:
            filled.append(tensors[item.index])
        elif kind is _Past:
            filled.append(inner)
        elif kind is dict or (kind is tuple and item):
            filled.append(_fill(item, tensors, inner))
        else:
            filled.append(item.kind() if kind is _Fresh else item)
    return dict(zip(template, filled, strict=True)) if type(template) is dict else tuple(filled)


def _alike(left: object, right: object) -> bool:
    """Compare templates; True is not 1 here."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(value, right[key]) for key, value in left.items())
    return left == right


def pretend(cache: SpanCache, length: int) -> None:
    """Make a cache claim a past of `length` positions, without any memory: enough for a parent, not for a block."""
    cache.inner.seen = length
    if not length:
        return
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
        elif isinstance(layer, CacheLayerMixin):
            layer.keys = layer.values = torch.empty(1, 1, 1, 1).expand(1, 1, length, 1)
            layer.is_initialized = True
