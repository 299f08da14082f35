"""A span that runs: hidden states in, hidden states out, through the family's own code.

The hollow parent is called with dummy embeddings of the right shape, so that masks, rotary tables and alibi come from
it. The first hosted block gets the real hidden state instead of the parent's; the last one keeps its output and ends
the call, so that neither the parent's epilogue nor its placeholders behind the span run.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.errors import BadBlocks
from swarm.limits import limit
from swarm.model.cache import SpanCache, new_cache
from swarm.model.classes import class_of_model
from swarm.model.direct import DirectLimits, DirectPath
from swarm.model.growing import GrowingLimits
from swarm.model.hollow import Placeholder, decoder_of, text_config
from swarm.model.integer import bytes_of_integers, integers_of
from swarm.model.packed import PackedCache, Packing, Segment, configs_of, packed_positions
from swarm.model.steady import steady_bytes
from swarm.model.traits import Traits


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """How much a span keeps beside its weights."""

    parts_max: int = limit(64, "parts", "remembered, the oldest goes: clients choose them, each has modules of its own")
    direct: DirectLimits = field(default_factory=DirectLimits)
    growing: GrowingLimits = field(default_factory=GrowingLimits)


@dataclass(frozen=True, slots=True)
class Weights:
    """The facts of a loaded span's weights."""

    dtype: torch.dtype
    device: torch.device
    n_bytes: int  # memory that several tensors share counts once

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Weights":
        """Look at a loaded model."""
        tensors = [*model.parameters(), *model.buffers()]
        # Of one-byte floats are only quantised weights, never hidden states.
        wide = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.element_size() > 1]
        asked = getattr(text_config(model.config), "dtype", None)  # a family may keep some in float32 all the same
        dtype = asked if asked in wide else next(iter(wide), torch.float32)
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        integers = bytes_of_integers(model) + steady_bytes(model)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return cls(dtype, device, sum(storages.values()) + integers)


@dataclass(slots=True)
class Shared:
    """A loaded hollow model, and all that a span and its parts have in common. blocks: those that are loaded.

    direct: the short way of decode steps; None: the parent does every step. packs: whether steps of many sessions can
    run as one. Both are found out by `swarm.model.probe`. aligned: whether caches are for `swarm.model.aligned`.
    """

    model: PreTrainedModel  # the hollow parent
    traits: Traits
    blocks: Blocks
    limits: SpanLimits
    weights: Weights
    numeric_class: NumericClass
    packing: Packing
    direct: DirectPath | None = None
    packs: bool = False
    aligned: bool = False
    parts: "dict[Blocks, Span]" = field(default_factory=dict)  # the latest ones; sessions hold on to theirs

    def change_attention(self, old: str, new: str) -> bool:
        """Use attention implementation `new` instead of `old`, in all parts. Returns whether any was in use."""
        configs = [config for config in configs_of(self.model) if config._attn_implementation == old]
        for config in configs:
            config._attn_implementation_internal = new
        self.packing = Packing(configs_of(self.model), self.packing.joins)
        return bool(configs)


class Span:
    """One hosted block range. Not re-entrant: one compute thread runs a span and all of its parts.

    Call it inside `torch.inference_mode()`, entered once around the loop that serves: entering it a step costs 15 %.
    """

    def __init__(self, shared: Shared, blocks: Blocks) -> None:
        """Make a span of some of the loaded blocks."""
        decoder, list_name = decoder_of(shared.model)
        self.shared, self.blocks = shared, blocks
        self.traits, self.hidden_size = shared.traits, shared.traits.hidden_size
        self.dtype, self.device = shared.weights.dtype, shared.weights.device
        self._run = _Run()
        self._decoder = _decoder_for(decoder, list_name, blocks, shared.traits.returns, self._run)

    @classmethod
    def of(cls, model: PreTrainedModel, traits: Traits, blocks: Blocks, limits: SpanLimits = SpanLimits()) -> "Span":
        """Take over a hollow model whose `blocks` are loaded."""
        weights = Weights.of(model)
        numeric_class = class_of_model(model, weights.dtype)
        # Attention to pasts that are joined adds up in another order: steps of integers give the same bits as alone.
        packing = Packing(configs_of(model), limits.growing if integers_of(model) is None else None)
        return cls(Shared(model, traits, blocks, limits, weights, numeric_class, packing), blocks)

    @property
    def model(self) -> PreTrainedModel:
        """The hollow parent."""
        return self.shared.model

    @property
    def numeric_class(self) -> NumericClass:
        """How it computes: dtype and quantisation."""
        return self.shared.numeric_class

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all loaded blocks."""
        return self.shared.weights.n_bytes

    @property
    def packs(self) -> bool:
        """Whether steps of many sessions can run as one."""
        return self.shared.packs

    @property
    def is_direct(self) -> bool:
        """Whether decode steps go to the blocks without their parent."""
        return self.shared.direct is not None

    def part(self, blocks: Blocks) -> "Span":
        """Return the span of some of these blocks. It shares the weights and the compute thread; caches do not mix.

        Raises BadBlocks when a block is not hosted here.
        """
        if blocks not in self.blocks:
            raise BadBlocks(str(blocks), f"this span has blocks {self.blocks}")
        if blocks == self.blocks:
            return self
        parts = self.shared.parts
        if blocks not in parts:
            if len(parts) >= self.shared.limits.parts_max:
                del parts[next(iter(parts))]
            parts[blocks] = Span(self.shared, blocks)
        return parts[blocks]

    def new_cache(self, rollback_max: int = 0) -> SpanCache:
        """Make an empty cache for one session on this span.

        rollback_max: the most positions that `SpanCache.keep` will have to take back at a time. More than 0 makes
        sliding-window and convolution layers keep as much more, and convolutions run their slower path.
        """
        module, growing = type(self._decoder).__module__, self.shared.limits.growing
        config, aligned = self.shared.model.config, self.shared.aligned
        return new_cache(config, module, self.blocks, rollback_max, growing, aligned=aligned)

    def forward(
        self, hidden: Tensor, *, cache: SpanCache | None, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Run the blocks on one step.

        hidden: [batch, tokens, hidden_size], the span's dtype and device. Returns the same shape.
        cache: from `new_cache` of this very span; it grows by `tokens`. None computes without a past.
        positions: int64 [batch or 1, tokens]; None counts on from the cache's length.
        mask: [batch, cache.length + tokens], 1 where a position is real and 0 where it is padding; None for all real.
        """
        if mask is None and cache is not None and hidden.shape[1] == 1:
            output = self.forward_directly(hidden, cache, positions)
            if output is not None:
                return output
        return self.forward_through_parent(hidden, cache=cache, positions=positions, mask=mask)

    def forward_through_parent(
        self, hidden: Tensor, *, cache: SpanCache | None, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Do the same as `forward` by calling the whole hollow parent, as `forward` itself does without a short way."""
        past = cache.length if cache is not None else 0
        batch, tokens, width = hidden.shape
        assert width == self.hidden_size, f"hidden states of width {width}, the model's is {self.hidden_size}"
        assert mask is None or mask.shape == (batch, past + tokens), f"mask {tuple(mask.shape)}, past {past}"
        arguments: dict[str, Any] = {"use_cache": cache is not None, "attention_mask": mask}
        if cache is not None:
            arguments[self.traits.cache_argument] = cache.inner
        if self.traits.takes_positions:
            if positions is None:
                positions = torch.arange(past, past + tokens, device=hidden.device)[None]
            arguments["position_ids"] = positions
        run = self._run
        run.hidden, run.cache = hidden, cache
        dummy = hidden.new_zeros(batch, tokens, self.traits.embedding_size)
        try:
            self._decoder(inputs_embeds=dummy, **arguments)
        except SpanDone as done:
            output = done.hidden
        finally:
            run.hidden = run.cache = None
        if cache is not None:
            cache.advance(tokens)
        return output

    def forward_packed(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Run steps of many sessions of this very span as one; their caches grow.

        Returns the output of each one's `forward`, within the arithmetic's tolerance. If it raises, no cache has
        changed. Only where `packs`.
        """
        hidden = torch.cat([segment.hidden.reshape(1, segment.size, self.hidden_size) for segment in segments], dim=1)
        packing = self.shared.packing
        arguments: dict[str, Any] = {self.traits.cache_argument: PackedCache(segments, packing.solo, packing.together)}
        if self.traits.takes_positions:
            arguments["position_ids"] = packed_positions(segments)[None]
        befores = [segment.cache.snapshot() for segment in segments]
        self._run.hidden = hidden
        dummy = hidden.new_zeros(1, hidden.shape[1], self.traits.embedding_size)
        try:
            try:
                with packing.on():
                    self._decoder(inputs_embeds=dummy, use_cache=True, **arguments)
            except SpanDone as done:
                parts = done.hidden.split([segment.size for segment in segments], dim=1)
            # Copies: a session's output that is kept must not keep the others' with it.
            outputs = [part.clone().view(segment.hidden.shape) for part, segment in zip(parts, segments, strict=True)]
        except Exception:
            for segment, before in zip(segments, befores, strict=True):
                segment.cache.restore(before)
            raise
        finally:
            self._run.hidden = None
        for segment in segments:
            segment.cache.advance(segment.tokens)
        return outputs

    def forward_directly(self, hidden: Tensor, cache: SpanCache, positions: Tensor | None = None) -> Tensor | None:
        """Run one decode step without the parent. Returns None, unchanged, where that is not known to be right.

        It has to be the plain next position of every row. Arguments as `forward`'s; hidden: [batch, 1, hidden_size].
        """
        direct = self.shared.direct
        if direct is None or torch.is_grad_enabled():
            return None
        if positions is not None and any(position != cache.length for (position,) in positions.tolist()):
            return None
        output = direct.step(hidden, cache, self.blocks)
        if output is not None:
            cache.advance(1)
        return output


class SpanDone(BaseException):
    """The last hosted block has run: no error, and no `Exception`, so that no parent takes it for one."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Run:
    """The running step, as the blocks of one decoder see it."""

    hidden: Tensor | None = None
    cache: SpanCache | None = None


class _Hosted(Placeholder):
    """Wraps a hosted block at an edge of the span. The block itself is shared between all parts of a span."""

    def __init__(self, block: nn.Module, returns: int, run: _Run, *, first: bool, last: bool) -> None:
        super().__init__(block, returns)
        self._run_state = run
        self._first = first
        self._last = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the family's blocks
        """Give the first block the real hidden state; end the parent's call after the last."""
        if self._first:
            run = self._run_state
            if run.cache is not None:
                assert run.hidden is not None
                run.cache.inner.pending = run.hidden.shape[1]
            if args:
                args = (run.hidden, *args[1:])
            else:
                kwargs["hidden_states"] = run.hidden
        result = self.original(*args, **kwargs)
        if self._last:
            raise SpanDone(result[0] if isinstance(result, tuple) else result)
        return result


def _decoder_for(decoder: PreTrainedModel, list_name: str, blocks: Blocks, returns: int, run: _Run) -> PreTrainedModel:
    """Return a shallow copy of the decoder that runs `blocks` alone and shares everything else."""
    slots: list[nn.Module] = []
    for index, block in enumerate(originals(getattr(decoder, list_name))):
        if index not in blocks:
            slots.append(Placeholder(block, returns))
        elif index in (blocks.start, blocks.stop - 1):
            first, last = index == blocks.start, index == blocks.stop - 1
            slots.append(_Hosted(block, returns, run, first=first, last=last))
        else:
            slots.append(block)
    return with_blocks(decoder, list_name, slots)


def with_blocks(decoder: PreTrainedModel, list_name: str, blocks: list[nn.Module]) -> PreTrainedModel:
    """Return a shallow copy of the decoder with other blocks."""
    shallow = copy.copy(decoder)
    shallow.__dict__["_modules"] = dict(decoder._modules)
    setattr(shallow, list_name, nn.ModuleList(blocks))
    return shallow


def originals(layers: nn.ModuleList) -> list[nn.Module]:
    """Return the blocks; for those that are elsewhere, the originals of their placeholders."""
    return [layer.original if isinstance(layer, Placeholder) else layer for layer in layers]
