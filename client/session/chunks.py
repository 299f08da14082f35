"""A long step travels as several messages, so that hops work on its parts at the same time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.protocol.tensors import CHUNK_BYTES

CHUNK_S = 0.05
CHUNK_TOKENS_MIN = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a step that travels as one message."""

    hidden: Tensor
    positions: Tensor | None
    mask: Tensor | None
    keep: int
    rows: tuple[int, ...] | None
    want: int


def cut(
    hidden: Tensor,
    *,
    positions: Tensor | None,
    mask: Tensor | None,
    keep: int,
    rows: Sequence[int] | None,
    want: int,
    tokens_per_s: float | None = None,
) -> Iterator[Chunk]:
    """Cut a step into even parts of CHUNK_BYTES at most. Rollback and gather go with the first.

    tokens_per_s: what the slowest hop computes. A part then keeps it busy for about CHUNK_S, so that the next hop can
    begin soon; but it has CHUNK_TOKENS_MIN at least, as smaller ones would read all weights for too little.
    """
    batch, tokens, width = hidden.shape
    size = max(1, CHUNK_BYTES // (batch * width * hidden.element_size()))
    if tokens_per_s is not None:
        size = min(size, max(CHUNK_TOKENS_MIN, int(CHUNK_S * tokens_per_s)) // batch or 1)
    if tokens <= size:
        yield Chunk(hidden, positions, mask, keep, None if rows is None else tuple(rows), want)
        return
    parts = -(-tokens // size)
    size = -(-tokens // parts)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield Chunk(
            hidden=hidden[:, start:stop],
            positions=None if positions is None else positions[:, start:stop],
            mask=None if mask is None else mask[:, start:stop],
            keep=keep + start,
            rows=tuple(rows) if rows is not None and start == 0 else None,
            want=max(0, min(stop - start, stop - (tokens - want))),
        )
