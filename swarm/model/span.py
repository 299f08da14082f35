"""A span that runs: hidden states in, hidden states out, through the family's own code.

The hollow parent is called with dummy embeddings of the right shape, so that masks, rotary tables and alibi come from
it. The first hosted block gets the real hidden state instead of what the parent hands it; the last one keeps its
output and ends the call, so that neither the parent's epilogue nor its placeholders behind the span run.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.errors import BadBlocks
from swarm.model.cache import SpanCache, new_cache
from swarm.model.hollow import Placeholder, decoder_of
from swarm.model.traits import Traits


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
        self._parts: dict[Blocks, Span] = {blocks: self}
        weights = [*model.parameters(), *model.buffers()]
        self.dtype: torch.dtype = next((w.dtype for w in weights if w.is_floating_point()), torch.float32)
        self.device: torch.device = next((w.device for w in weights), torch.device("cpu"))
        self.weight_bytes = _storage_bytes(weights)
        self.numeric_class = _numeric_class(model, self.dtype)

    def part(self, blocks: Blocks) -> "Span":
        """Return the span of some of these blocks. It shares the weights and the compute thread; caches do not mix.

        Raises BadBlocks when a block is not hosted here.
        """
        if blocks not in self.blocks:
            raise BadBlocks(str(blocks), f"this span has blocks {self.blocks}")
        if blocks not in self._parts:
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
    shallow = copy.copy(decoder)
    shallow.__dict__["_modules"] = dict(decoder._modules)
    slots: list[nn.Module] = []
    for index, block in enumerate(getattr(decoder, list_name)):
        original = block.original if isinstance(block, Placeholder) else block
        if index not in blocks:
            slot: nn.Module = Placeholder(original, returns)
        elif index in (blocks.start, blocks.stop - 1):
            slot = _Hosted(original, returns, run, first=index == blocks.start, last=index == blocks.stop - 1)
        else:
            slot = block
        slots.append(slot)
    setattr(shallow, list_name, nn.ModuleList(slots))
    return shallow


def _storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' memory; what several share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _numeric_class(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Name dtype and quantisation: spans of different classes compute different numbers."""
    name = str(dtype).removeprefix("torch.")
    quantization = getattr(model.config, "quantization_config", None)
    method = getattr(quantization, "quant_method", None) if quantization is not None else None
    return f"{name}+{getattr(method, 'value', method)}" if method else name
