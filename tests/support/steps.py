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


CUTS = ((24, (16,)), (24, (7,)), (80, (3, 45)))  # lengths of prompts, and where they are cut


def cuts_that_show(span: Span, cuts: Sequence[tuple[int, Sequence[int]]] = CUTS) -> list[tuple[int, Sequence[int]]]:
    """Return the cuts of prompts by which their outputs have other bits."""
    found = []
    for length, at in cuts:
        hidden = random(1, length, span.hidden_size, seed=length).to(span.dtype)
        if not torch.equal(through(span, *hidden.tensor_split(tuple(at), dim=1)), through(span, hidden)):
            found.append((length, at))
    return found


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
