"""One session's past on some blocks: their cache, and the attention mask of all its positions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.model.cache import SpanCache
from swarm.model.span import Span


@dataclass(slots=True)
class SpanPast:
    """A session's past on one span. Belongs to one thread at a time, as its cache does."""

    cache: SpanCache
    mask: Tensor | None = field(default=None)  # uint8 [rows, length]; None: no padding so far

    def rewind(self, keep: int, rows: Sequence[int] | None) -> None:
        """Go back to `keep` positions, then gather rows. Raises RollbackImpossible, and then nothing has changed."""
        if keep < self.cache.length:
            self.cache.keep(keep)
            self.mask = self.mask[:, :keep] if self.mask is not None and keep else None
        if rows is not None and self.cache.length:
            index = torch.tensor(rows)
            self.cache.gather(index)
            self.mask = self.mask[index] if self.mask is not None else None

    def forward(self, span: Span, new: Activations) -> Tensor:
        """Run new positions through the span, on its device. Returns hidden states of the same shape."""
        padded = new.mask is not None or self.mask is not None
        full_mask = self._extend_mask(new.mask, new.rows, new.tokens) if padded else None
        device = span.device
        return span.forward(
            fitting(new.hidden, span),
            cache=self.cache,
            positions=new.positions.to(device) if new.positions is not None else None,
            mask=full_mask.to(device) if full_mask is not None else None,
        )

    def _extend_mask(self, new: Tensor | None, rows: int, tokens: int) -> Tensor:
        """Append the new columns. Returns the whole mask."""
        past = self.mask if self.mask is not None else torch.ones(rows, self.cache.length, dtype=torch.uint8)
        fresh = new.to("cpu") if new is not None else torch.ones(rows, tokens, dtype=torch.uint8)
        self.mask = torch.cat([past, fresh], dim=1)
        return self.mask


def fitting(hidden: Tensor, span: Span) -> Tensor:
    """Return hidden states on the span's device, in a dtype that its blocks take: hops of other classes send others."""
    return hidden.to(span.device, fitting_dtype(hidden.dtype, span))


def fitting_dtype(sent: torch.dtype, span: Span) -> torch.dtype:
    """Return the dtype in which a span's blocks take hidden states that were sent in another one."""
    is_taken = sent == span.dtype or (sent == torch.float32 and span.traits.has_wide_residual)
    return sent if is_taken else span.dtype
