"""A span's cache: the keys, values and states of the hosted blocks alone, at the blocks' absolute indices.

A plain `DynamicCache` is silently wrong when block 0 is not hosted: parents ask layer 0 how long the past is. Here
the blocks that are elsewhere are dummies, and the questions of parents are answered from a counter of positions.

Rolling back needs the past that sliding-window and convolution layers would throw away. They record it from the first
step on if the session was opened with a rollback; after each step everything beyond the window and that rollback is
dropped. Recording makes convolutions take another path through their family's code, so it is off where no rollback
was agreed.
"""

import sys
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from swarm.blocks import Blocks
from swarm.errors import RollbackImpossible
from swarm.model.growing import GrowingLayer, GrowingLimits, GrowingSlidingLayer, growing
from swarm.model.slots import Slot

_Snapshot = tuple[Slot | None, list[tuple[Any, dict[str, Any]]]]


class SpanCache:
    """One session's past on one span. Belongs to one thread at a time.

    rollback_max: how many positions `keep` can remove at a time where the span has sliding-window or convolution
    layers.
    """

    def __init__(self, inner: Any, rollback_max: int) -> None:  # noqa: ANN401 - `_Inner`, or a family's own class
        self._inner = inner
        self.rollback_max = rollback_max
        self.slot: Slot | None = None  # where some layers' past is; they are without one meanwhile

    @property
    def inner(self) -> Any:  # noqa: ANN401 - as above
        """The cache that a parent gets, with the whole past."""
        if self.slot is not None:
            self.come_out()
        return self._inner

    @property
    def length(self) -> int:
        """Positions that every block of the span has seen."""
        return int(self._inner.seen)

    @property
    def layers(self) -> list[Any]:
        """The cache layers of the hosted blocks that keep anything, with the whole past."""
        return _real(self.inner)

    @property
    def bare_layers(self) -> list[Any]:
        """The layers of all blocks of the model, as they are: some without a past while that is in a slot."""
        layers: list[Any] = self._inner.layers
        return layers

    @property
    def can_roll_back(self) -> bool:
        """Whether `keep` can remove some positions and leave no trace: never once a recurrent state was written."""
        if self.length == 0:
            return True
        return bool(self._inner.is_croppable) and (self.rollback_max > 0 or not any(map(_forgets, _real(self._inner))))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the cache."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def advance(self, n_positions: int) -> None:
        """Count the positions of a step that went through; drop the past that no rollback can ask for any more."""
        inner = self._inner
        inner.seen += n_positions
        inner.pending = 0
        if not self.rollback_max:  # then no layer records
            return
        for layer in _real(inner):
            if getattr(layer, "record_past", False):
                _trim(layer, self.rollback_max)

    def keep(self, n_positions: int) -> None:
        """Roll back to the first `n_positions` positions. Raises RollbackImpossible, and then nothing has changed."""
        removed = self.length - n_positions
        if not 0 <= n_positions <= self.length:
            raise RollbackImpossible(f"a cache of {self.length} positions cannot keep {n_positions}")
        if n_positions == 0:
            self._inner, self.slot = self._inner.fresh(), None
        elif removed:
            if not self.can_roll_back:
                raise RollbackImpossible("this model's recurrent state cannot be rolled back: replay the session")
            layers = _real(self._inner)
            if removed > self.rollback_max and any(map(_forgets, layers)):
                raise RollbackImpossible(f"cannot roll back {removed} positions, {self.rollback_max} were agreed on")
            if not all(_remembers(layer, removed) for layer in layers):
                raise RollbackImpossible("a layer's past is gone after several rollbacks in a row: replay the session")
            apart = () if self.slot is None else self.slot.slots.numbers  # there, the past ends where its length says
            for layer_idx, layer in enumerate(self._inner.layers):
                if layer_idx not in apart and not isinstance(layer, DummyLayer):
                    _remove_last(layer, removed)
            self._inner.seen = n_positions

    def snapshot(self) -> "_Snapshot":
        """Return the state that `restore` puts back after a broken step. Keys and values only; copies nothing."""
        return self.slot, [(layer, dict(vars(layer))) for layer in _real(self._inner)]

    def restore(self, snapshot: "_Snapshot") -> None:
        """Undo all later changes of the layers. What was written to a slot since then lies behind the past's end."""
        self.slot, layers = snapshot
        for layer, before in layers:
            layer.__dict__.clear()
            layer.__dict__.update(before)

    def gather(self, rows: Tensor) -> None:
        """Replace row i of the batch by row `rows[i]`. rows: int64 [any length]; reorders, repeats and selects."""
        self.inner.reorder_cache(rows)

    # For `swarm.model.together`

    def joinable(self, small_bytes: int) -> tuple[int, ...]:
        """The layers that keep all of one row's past, if it is short in each: in fewer bytes of keys, and of values."""
        if self.slot is not None:
            slots = self.slot.slots
            return slots.numbers if self.length * slots.position_bytes < small_bytes else ()
        layers = self._inner.layers
        return tuple(
            at
            for at, layer in enumerate(layers)
            if type(layer) is GrowingLayer and layer.is_short(self.length, small_bytes)
        )

    def past(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of such a layer, [1, heads, length, size], where they are."""
        if self.slot is not None:
            return self.slot.slots.past(layer_idx, self.slot.row, self.length)
        past: tuple[Tensor, Tensor] = self._inner.layers[layer_idx].past
        return past

    def enter(self, slot: Slot) -> None:
        """Have the past of some layers in a slot, to which it was copied."""
        self.slot = slot
        for layer_idx in slot.slots.numbers:
            self._inner.layers[layer_idx].hold(None, None)

    def come_out(self) -> None:
        """Have all of the past in the layers again, in memory of its own. Only where there is a slot."""
        assert self.slot is not None
        for layer_idx in self.slot.slots.numbers:
            keys, values = self.past(layer_idx)
            self._inner.layers[layer_idx].hold(keys.clone(), values.clone())
        self.slot = None

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for holder in [*self.layers, self._inner]:
            for value in vars(holder).values():
                items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
                found += [item for item in items if isinstance(item, Tensor) and item.dim() > 0]
        return found


def new_cache(
    config: PretrainedConfig,
    decoder_module: str,
    blocks: Blocks,
    rollback_max: int,
    limits: GrowingLimits = GrowingLimits(),  # noqa: B008 - frozen
    *,
    aligned: bool = False,
) -> SpanCache:
    """Make an empty cache for some blocks of a model.

    config: the whole model's; decoder_module: name of the Python module that defines its decoder. aligned: for blocks
    that attend as `swarm.model.aligned` does.
    """
    special = getattr(sys.modules[decoder_module], "MiniMaxCache", None)
    if special is not None:  # the one family whose decoder insists on its own class
        return SpanCache(_minimax_inner(special), rollback_max)
    return SpanCache(_Inner(config, blocks, limits, record=rollback_max > 0, aligned=aligned), rollback_max)


class _Inner(DynamicCache):
    """The cache that the parent sees: of all its blocks, of which those elsewhere are dummies."""

    def __init__(
        self, config: PretrainedConfig, blocks: Blocks, limits: GrowingLimits, *, record: bool, aligned: bool
    ) -> None:
        super().__init__(config=config)
        self.arguments = (config, blocks, limits, record, aligned)
        self.start = blocks.start
        self.layers = [
            growing(layer, limits, aligned=aligned) if i in blocks else DummyLayer()
            for i, layer in enumerate(self.layers)
        ]
        self.seen = 0
        self.pending = 0  # positions of the running step: the blocks before this span have seen them
        for layer in self.layers:
            if record and hasattr(layer, "record_past"):
                layer.record_past = True

    def fresh(self) -> "_Inner":
        """Make an empty cache of the same kind."""
        config, blocks, limits, record, aligned = self.arguments
        return _Inner(config, blocks, limits, record=record, aligned=aligned)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the past's length as layer `layer_idx` has it, hosted or not."""
        layer = self._hosted(layer_idx)
        return self._seen_by(layer_idx) if layer is None else int(layer.get_seq_length())

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that a mask for layer `layer_idx` covers, hosted or not."""
        layer = self._hosted(layer_idx)
        if layer is None:
            return self._seen_by(layer_idx) + query_length, 0
        return layer.get_mask_sizes(query_length)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a past; for the whole model all hosted layers have the same one."""
        if layer_idx is None and not any(isinstance(x, LinearAttentionCacheLayerMixin) for x in self.layers):
            return self.seen > 0
        return bool(super().has_previous_state(layer_idx, state_idx))

    def _hosted(self, layer_idx: int) -> CacheLayerMixin | None:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer if isinstance(layer, CacheLayerMixin) else None

    def _seen_by(self, layer_idx: int) -> int:
        return self.seen + (self.pending if layer_idx < self.start else 0)


def _real(inner: Any) -> list[Any]:  # noqa: ANN401 - as `SpanCache.inner`
    return [layer for layer in inner.layers if not isinstance(layer, DummyLayer)]


def _minimax_inner(special: type[DynamicCache]) -> Any:  # noqa: ANN401 - an instance of a family's own class
    """Make MiniMax's cache: its linear layers keep a list of states beside the layers, and it does not gather."""

    class MiniMaxInner(special):  # type: ignore[valid-type, misc]
        seen = 0
        pending = 0

        def fresh(self) -> "MiniMaxInner":
            return MiniMaxInner()

        def get_seq_length(self, layer_idx: int = 0) -> int:
            del layer_idx  # the stock class asks layer 0, which is a linear one and does not count
            return self.seen

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            del layer_idx
            return self.seen + query_length, 0

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self.linear_cache: list[Any] = [
                state.index_select(0, beam_idx.to(state.device)) if isinstance(state, Tensor) else state
                for state in self.linear_cache
            ]

    return MiniMaxInner()


def _forgets(layer: object) -> bool:
    """Whether a layer drops its past as it goes unless it records."""
    return isinstance(layer, (DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin))


def _remembers(layer: Any, removed: int) -> bool:  # noqa: ANN401 - a cache layer of any family
    """Whether a layer still has the past that its next step needs, once its last positions are gone."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = [(state, layer.conv_kernel_size[index]) for index, state in layer.conv_states.items()]
        return all(state is None or state.shape[-1] - removed >= (kernel or 0) for state, kernel in states)
    if not isinstance(layer, DynamicSlidingWindowLayer) or layer.keys is None:
        return True
    return layer.keys.shape[-2] - removed >= min(layer.sliding_window - 1, layer.cumulative_length - removed)


def _remove_last(layer: Any, removed: int) -> None:  # noqa: ANN401 - a cache layer of any family
    """Cut the last positions off; unlike `crop`, leave the rest of the recorded past for the next rollback."""
    convolves, slides = isinstance(layer, LinearAttentionCacheLayerMixin), isinstance(layer, DynamicSlidingWindowLayer)
    if not convolves and not slides:
        layer.crop(-removed)
        return
    if convolves:
        for index, state in layer.conv_states.items():
            layer.conv_states[index] = None if state is None else state[..., :-removed]
    if getattr(layer, "keys", None) is not None:
        layer.keys = layer.keys[..., :-removed, :]
        layer.values = layer.values[..., :-removed, :]
    if slides:
        layer.cumulative_length -= removed


def _trim(layer: Any, rollback_max: int) -> None:  # noqa: ANN401 - a cache layer of any family
    """Drop the past that neither the next step nor a rollback needs. Views: the next step copies the rest anyway."""
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.values is not None:
        kept = getattr(layer, "lookback", layer.sliding_window - 1) + rollback_max
        layer.keys = layer.keys[..., -kept:, :]
        layer.values = layer.values[..., -kept:, :]
        if isinstance(layer, GrowingSlidingLayer):
            layer.fit()
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for index, state in layer.conv_states.items():
            if state is not None:
                layer.conv_states[index] = state[..., -((layer.conv_kernel_size[index] or 0) + rollback_max) :]
