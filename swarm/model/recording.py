"""Recordings of a parent's calls: the arguments that it gives its blocks, beside their hidden state."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.blocks import Blocks
from swarm.model.cache import SpanCache
from swarm.model.direct import Record
from swarm.model.hollow import Placeholder, decoder_of
from swarm.model.packed import PackedCache, Segment, packed_positions
from swarm.model.span import Shared, originals, with_blocks


class ParentRecorder:
    """Calls the parent of some hosted blocks with recorders in the place of its blocks, which compute nothing."""

    def __init__(self, shared: Shared, blocks: Blocks) -> None:
        decoder, list_name = decoder_of(shared.model)
        recorders = [_Recorder(block, shared.traits.returns) for block in originals(getattr(decoder, list_name))]
        self._shared = shared
        self._recorders = {index: recorders[index] for index in blocks}
        self._decoder: Callable[..., Any] = with_blocks(decoder, list_name, list(recorders))

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The blocks, by their index."""
        return {index: recorder.original for index, recorder in self._recorders.items()}

    def record(self, cache: SpanCache, positions: Tensor, batch: int) -> Record:
        """Return the blocks' arguments for a step at these positions, int64 [1, tokens], of `batch` rows."""
        return self._record(cache.inner, positions, batch)

    def recorded(self, cache: SpanCache, position: int) -> Record:
        """Return the blocks' arguments for one decode step at this position."""
        return self.record(cache, torch.tensor([[position]], device=self._shared.weights.device), 1)

    def recorded_packed(self, segments: Sequence[Segment]) -> Record:
        """Return the blocks' arguments for a packed step."""
        positions = packed_positions(segments)[None]
        packing = self._shared.packing
        with packing.on():
            return self._record(PackedCache(segments, packing.solo), positions, 1)

    def _record(self, inner: Any, positions: Tensor, batch: int) -> Record:  # noqa: ANN401 - as a cache's `inner`
        traits, weights = self._shared.traits, self._shared.weights
        shape = batch, positions.shape[1], traits.embedding_size
        dummy = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        arguments: dict[str, Any] = {"use_cache": True, traits.cache_argument: inner}
        if traits.takes_positions:
            arguments["position_ids"] = positions
        self._decoder(inputs_embeds=dummy, **arguments)
        return [recorder.call for recorder in self._recorders.values()]


class _Recorder(Placeholder):
    """Takes the place of a hosted block and keeps the parent's arguments, beside its hidden state."""

    call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the family's blocks
        """Hand the hidden state on."""
        self.call = args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}
        return super().forward(*args, **kwargs)
