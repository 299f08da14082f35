"""Steps of a span: in pieces, alone, and packed with those of other sessions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.model.packed import Segment
from swarm.model.span import Span


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draw hidden states."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def through(span: Span, *chunks: Tensor) -> Tensor:
    """Compute chunks of one prompt, one behind the other."""
    cache = span.new_cache()
    with torch.inference_mode():
        return torch.cat([span.forward(chunk, cache=cache) for chunk in chunks], dim=1)


def alone_and_packed(span: Span, lengths: Sequence[int] = (7, 3, 11)) -> list[tuple[Tensor, Tensor]]:
    """The outputs of some sessions' steps, each alone and as one. lengths: of the pasts."""
    assert span.packs
    prompts = [random(1, tokens, span.hidden_size, seed=tokens).to(span.dtype) for tokens in lengths]
    steps = [random(1, 1, span.hidden_size, seed=tokens + 50).to(span.dtype) for tokens in lengths]
    alone, caches = [], []
    with torch.inference_mode():
        for prompt, step in zip(prompts, steps, strict=True):
            cache = span.new_cache()
            span.forward(prompt, cache=cache)
            alone.append(span.forward(step, cache=cache))
            caches.append(span.new_cache())
            span.forward(prompt, cache=caches[-1])
        packed = span.forward_packed([Segment(step, cache) for step, cache in zip(steps, caches, strict=True)])
    return list(zip(alone, packed, strict=True))
