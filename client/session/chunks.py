"""A long step travels as several messages, so that hops work on its parts at the same time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.activations import Activations
from swarm.client.session.limits import ChunkLimits


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a step that travels as one message."""

    activations: Activations
    keep: int
    rows: tuple[int, ...] | None
    want: int


def cut(
    activations: Activations,
    *,
    keep: int,
    rows: Sequence[int] | None,
    want: int,
    tokens_per_s: float | None = None,
    limits: ChunkLimits,
) -> Iterator[Chunk]:
    """Cut a step into even parts. Rollback and gather go with the first.

    tokens_per_s: what the slowest hop computes. A part keeps it busy for about `chunk_s`, so that the next hop can
    begin soon.
    """
    batch, tokens, width = activations.hidden.shape
    size = max(1, limits.chunk_bytes // (batch * width * activations.hidden.element_size()))
    if tokens_per_s is not None:
        size = min(size, max(limits.chunk_tokens_min, int(limits.chunk_s * tokens_per_s)) // batch or 1)
    if tokens <= size:
        yield Chunk(activations, keep, None if rows is None else tuple(rows), want)
        return
    parts = -(-tokens // size)
    size = -(-tokens // parts)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield Chunk(
            activations=activations.part(start, stop),
            keep=keep + start,
            rows=tuple(rows) if rows is not None and start == 0 else None,
            want=max(0, min(stop - start, stop - (tokens - want))),
        )
