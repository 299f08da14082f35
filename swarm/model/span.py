"""A span that runs: hidden states in, hidden states out, through the family's own code.

The hollow parent is called with dummy embeddings of the right shape, so that masks, rotary tables and alibi come from
it. The first hosted block gets the real hidden state instead of what the parent hands it; the last one keeps its
output and ends the call, so that neither the parent's epilogue nor its placeholders behind the span run.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from swarm.blocks import Blocks
from swarm.errors import BadBlocks
from swarm.model.cache import SpanCache, new_cache
from swarm.model.direct import DirectPath, Record
from swarm.model.hollow import Placeholder, decoder_of
from swarm.model.packed import PackedCache, Packing, Segment, configs_of
from swarm.model.traits import Traits

PARTS_MAX = 64  # remembered: strangers choose them, and each has a module for every block of the model


class Span:
    """One hosted block range. Not re-entrant: one compute thread runs a span and all of its parts.

    Call it inside `torch.inference_mode()`, entered once around the loop that serves: entering it a step costs 15 %.
    """

    def __init__(self, model: PreTrainedModel, traits: Traits, blocks: Blocks) -> None:
        """Take over a hollow model whose `blocks` are loaded."""
        decoder, list_name = decoder_of(model)
        self.traits = traits
        self.blocks = blocks
        self.hidden_size = traits.hidden_size
        self.model = model  # the hollow parent
        self._list_name = list_name
        self._run = _Run()
        self._decoder = _decoder_for(decoder, list_name, blocks, traits.returns, self._run)
        self._direct: DirectPath | None = None
        self._packing = Packing(configs_of(model))
        self.packs = False  # whether steps of many sessions can run as one; `swarm.model.probe` finds out
        self._whole = blocks
        self._parts: dict[Blocks, Span] = {blocks: self}  # the latest ones; sessions hold on to theirs
        weights = [*model.parameters(), *model.buffers()]
        # Of one-byte floats are only quantised weights, never hidden states.
        wide = (weight.dtype for weight in weights if weight.is_floating_point() and weight.element_size() > 1)
        self.dtype: torch.dtype = next(wide, torch.float32)
        self.device: torch.device = next((w.device for w in weights), torch.device("cpu"))
        self.weight_bytes = _storage_bytes(weights)
        self.numeric_class = numeric_class_of(model.config, self.dtype)

    def part(self, blocks: Blocks) -> "Span":
        """Return the span of some of these blocks. It shares the weights and the compute thread; caches do not mix.

        Raises BadBlocks when a block is not hosted here.
        """
        if blocks not in self.blocks:
            raise BadBlocks(str(blocks), f"this span has blocks {self.blocks}")
        if blocks not in self._parts:
            if len(self._parts) > PARTS_MAX:
                del self._parts[next(known for known in self._parts if known != self._whole)]
            part = copy.copy(self)
            part.blocks = blocks
            part._run = _Run()
            decoder, _ = decoder_of(self.model)
            part._decoder = _decoder_for(decoder, self._list_name, blocks, self.traits.returns, part._run)
            self._parts[blocks] = part
        return self._parts[blocks]

    def new_cache(self, rollback_max: int = 0) -> SpanCache:
        """Make an empty cache for one session on this span.

        rollback_max: the most positions that `SpanCache.keep` will have to take back at a time. More than 0 makes
        sliding-window and convolution layers keep as much more, and convolutions run their slower path.
        """
        return new_cache(self.model.config, type(self._decoder).__module__, self.blocks, rollback_max)

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
        """Do what `forward` does by calling the whole hollow parent, as it does itself where it knows no short way."""
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

        Returns what each one's `forward` would, within the arithmetic's tolerance. Whatever this raises, no cache has
        changed. Only where `packs`.
        """
        hidden = torch.cat([segment.hidden.reshape(1, segment.size, self.hidden_size) for segment in segments], dim=1)
        arguments: dict[str, Any] = {self.traits.cache_argument: PackedCache(segments, self._packing.usual)}
        if self.traits.takes_positions:
            arguments["position_ids"] = torch.cat([segment.packed_positions() for segment in segments])[None]
        befores = [segment.cache.snapshot() for segment in segments]
        self._run.hidden = hidden
        dummy = hidden.new_zeros(1, hidden.shape[1], self.traits.embedding_size)
        try:
            with self._packing.on():
                self._decoder(inputs_embeds=dummy, use_cache=True, **arguments)
        except SpanDone as done:
            output = done.hidden
        except Exception:
            for segment, before in zip(segments, befores, strict=True):
                segment.cache.restore(before)
            raise
        finally:
            self._run.hidden = None
        for segment in segments:
            segment.cache.advance(segment.tokens)
        parts = output.split([segment.size for segment in segments], dim=1)
        # Copies: whoever keeps a session's output must not keep the others' with it.
        return [part.clone().view(segment.hidden.shape) for part, segment in zip(parts, segments, strict=True)]

    def change_attention(self, old: str, new: str) -> bool:
        """Use attention implementation `new` instead of `old`, in all parts. Returns whether any was in use."""
        configs = [config for config in configs_of(self.model) if config._attn_implementation == old]
        for config in configs:
            config._attn_implementation_internal = new
        packing = Packing(configs_of(self.model))
        for part in self._parts.values():
            part._packing = packing
        self._packing = packing
        return bool(configs)

    def allow_packing(self, allowed: bool) -> None:
        """Let all parts run packed steps, or none."""
        for part in self._parts.values():
            part.packs = allowed

    @property
    def is_direct(self) -> bool:
        """Whether decode steps go to the blocks without their parent."""
        return self._direct is not None

    def learn_direct_path(self) -> None:
        """Find out whether decode steps can go without the parent; `swarm.model.probe` then proves it or drops it."""
        assert all(part in self.blocks for part in self._parts), "only the whole span knows all of its blocks"
        record, layers = self._recorder()
        direct = None
        with contextlib.suppress(Exception), torch.inference_mode():  # a parent may not bear what is tried on it here
            direct = DirectPath(layers, lambda cache, *step: record(cache.inner, *step), self.new_cache, self.device)
        for part in self._parts.values():
            part._direct = direct

    def recorded(self, cache: SpanCache, position: int) -> Record:
        """What the parent calls its blocks with in one decode step at this position."""
        record, _ = self._recorder()
        return record(cache.inner, torch.tensor([[position]], device=self.device), 1)

    def recorded_packed(self, segments: Sequence[Segment]) -> Record:
        """What the parent calls its blocks with in a packed step."""
        record, _ = self._recorder()
        positions = torch.cat([segment.packed_positions() for segment in segments])[None]
        with self._packing.on():
            return record(PackedCache(segments, self._packing.usual), positions, 1)

    def _recorder(self) -> tuple[Callable[[Any, Tensor, int], Record], dict[int, nn.Module]]:
        """Return what records a call of the parent (cache, positions, batch), and the blocks."""
        decoder, _ = decoder_of(self.model)
        recorders = [_Recorder(block, self.traits.returns) for block in _originals(getattr(decoder, self._list_name))]
        shallow = _with_blocks(decoder, self._list_name, list(recorders))

        def record(inner: Any, positions: Tensor, batch: int) -> Record:  # noqa: ANN401 - as a cache's `inner`
            shape = batch, positions.shape[1], self.traits.embedding_size
            dummy = torch.zeros(shape, dtype=self.dtype, device=self.device)
            arguments: dict[str, Any] = {"use_cache": True, self.traits.cache_argument: inner}
            if self.traits.takes_positions:
                arguments["position_ids"] = positions
            shallow(inputs_embeds=dummy, **arguments)
            return [recorders[index].call for index in self.blocks]

        return record, {index: recorders[index].original for index in self.blocks}

    def forget_direct_path(self) -> None:
        """Let the parent do every step, in all parts."""
        for part in self._parts.values():
            part._direct = None

    def forward_directly(self, hidden: Tensor, cache: SpanCache, positions: Tensor | None = None) -> Tensor | None:
        """Run one decode step without the parent; None, and nothing has happened, where that is not known to be right.

        It has to be the plain next position of every row. Arguments as `forward`'s; hidden: [batch, 1, hidden_size].
        """
        if self._direct is None or not cache.length or torch.is_grad_enabled():
            return None
        if positions is not None and any(position != cache.length for (position,) in positions.tolist()):
            return None
        output = self._direct.step(hidden, cache, self.blocks)
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


class _Recorder(Placeholder):
    """Stands for a hosted block and keeps what the parent calls it with, beside its hidden state."""

    call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the family's blocks take and return
        """Hand the hidden state on."""
        self.call = args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}
        return super().forward(*args, **kwargs)


class _Hosted(Placeholder):
    """Stands before a hosted block at an edge of the span. The block itself is shared between all parts of a span."""

    def __init__(self, block: nn.Module, returns: int, run: _Run, *, first: bool, last: bool) -> None:
        super().__init__(block, returns)
        self._run_state = run
        self._first = first
        self._last = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the family's blocks take and return
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
    for index, block in enumerate(_originals(getattr(decoder, list_name))):
        if index not in blocks:
            slots.append(Placeholder(block, returns))
        elif index in (blocks.start, blocks.stop - 1):
            first, last = index == blocks.start, index == blocks.stop - 1
            slots.append(_Hosted(block, returns, run, first=first, last=last))
        else:
            slots.append(block)
    return _with_blocks(decoder, list_name, slots)


def _with_blocks(decoder: PreTrainedModel, list_name: str, blocks: list[nn.Module]) -> PreTrainedModel:
    """Return a shallow copy of the decoder with other blocks."""
    shallow = copy.copy(decoder)
    shallow.__dict__["_modules"] = dict(decoder._modules)
    setattr(shallow, list_name, nn.ModuleList(blocks))
    return shallow


def _originals(layers: nn.ModuleList) -> list[nn.Module]:
    """The blocks, and for those that are elsewhere what their placeholders stand for."""
    return [layer.original if isinstance(layer, Placeholder) else layer for layer in layers]


def _storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' memory; what several share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def numeric_class_of(config: PretrainedConfig, dtype: torch.dtype) -> str:
    """Name dtype and quantisation: spans of different classes compute different numbers."""
    name = str(dtype).removeprefix("torch.")
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return name
    facts = quantization if isinstance(quantization, dict) else quantization.to_dict()
    bits = [f"{width}bit" for width in (4, 8) if facts.get(f"load_in_{width}bit") or facts.get("bits") == width]
    method = facts.get("quant_method", "quantized")
    return "-".join([f"{name}+{getattr(method, 'value', method)}", *bits])
