"""A long step travels as several messages, so that hops work on its parts at the same time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.activations import Activations
from swarm.client.session.limits import ChunkLimits


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a step that travels as one message. ids: its token ids, for a journal that keeps them instead."""

    activations: Activations
    keep: int
    rows: tuple[int, ...] | None
    want: int
    ids: Tensor | None = None

    @property
    def kept(self) -> Activations:
        """The entry of the client's journal."""
        return self.activations if self.ids is None else self.activations.with_hidden(self.ids[:, :, None])


def cut(
    activations: Activations,
    *,
    keep: int,
    rows: Sequence[int] | None,
    want: int,
    tokens_per_s: float | None = None,
    limits: ChunkLimits,
    ids: Tensor | None = None,
) -> Iterator[Chunk]:
    """Cut a step into even parts. Rollback and gather go with the first.

    tokens_per_s: what the slowest hop computes. A part keeps it busy for about `chunk_s`, so that the next hop can
    begin soon. ids: [rows, tokens], for the journal.
    """
    batch, tokens, width = activations.hidden.shape
    size = max(1, limits.chunk_bytes // (batch * width * activations.hidden.element_size()))
    if tokens_per_s is not None:
        size = min(size, max(limits.chunk_tokens_min, int(limits.chunk_s * tokens_per_s)) // batch or 1)
    if tokens <= size:
        yield Chunk(activations, keep, None if rows is None else tuple(rows), want, ids)
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
            ids=None if ids is None else ids[:, start:stop],
        )
