"""A hop's own outputs, kept so that a replacement of the next hop can be brought to where that one was.

A journal is a log of steps. The client is hop 0 and keeps its embeddings; the last hop keeps none.

    add(entry)         each step once, in order, as soon as its output is known (the client: when it is put)
    past_after(step)   the session's past as it was right after one of the last steps, as pieces in order
    output_of(step)    one output, to answer a step that comes again
    truncate(step)     the steps behind it were noted and never sent
    n_bytes            memory that it takes; `n_bytes_with(entry)` before an entry is added, where there is a limit

Gathers and rollbacks are not carried out when they happen. `past_after` plays the log backwards, and
`rebuild_messages` gathers it piece by piece, as pieces are sent: a past that is gathered may be many times as large as
the log. Only a repair asks for it.

If more than `steps_unfolded_max` steps are there, the older half is folded into one piece, with its gathers carried
out. So the past is known after the last half of them only, which is more than all windows of steps in flight. Pieces
that were folded before stay as they are, unless a later step took back or gathered a part of them: the event loop has
no time to copy a whole past. A hop whose memory has no room for an entry drops the journal, never the session: then the
next journal upstream is replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, groupby

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.limits import limit
from swarm.protocol.messages import Rebuild
from swarm.protocol.tensors import CHUNK_BYTES, Coding, metas_of


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """Bounds on one journal."""

    steps_unfolded_max: int = limit(
        256, "steps", "then the older half is put together: no past is found after a step of it"
    )


@dataclass(frozen=True, slots=True)
class Past:
    """Some positions of a session, from `start` on, as the next hop needs them.

    order: which of these rows the session has now, not carried out yet; None for all of them as they are.
    """

    start: int
    activations: Activations
    order: Tensor | None = None

    def part(self, first: int, last: int) -> "Past":
        """Return positions [first, last) of the session, as far as they are in this past."""
        a, b = max(0, first - self.start), last - self.start
        return Past(self.start + a, self.activations.part(a, b), self.order)

    def gathered(self, rows: Tensor) -> "Past":
        """Return the past whose row i is our row rows[i]."""
        return replace(self, order=rows if self.order is None else self.order[rows])

    def in_order(self) -> "Past":
        """Return the same with its rows where the session has them."""
        if self.order is None:
            return self
        hidden, positions, mask = self.activations.hidden, self.activations.positions, self.activations.mask
        if positions is not None and positions.shape[0] > 1:
            positions = positions[self.order]
        mask = None if mask is None else mask[self.order]
        return Past(self.start, Activations(hidden[self.order], positions, mask))

    @property
    def rows(self) -> int:
        """How many the session has."""
        return self.activations.rows if self.order is None else len(self.order)

    @property
    def stop(self) -> int:
        """The position behind the last one."""
        return self.start + self.activations.tokens

    @property
    def n_bytes(self) -> int:
        """Memory that the tensors take as they are."""
        return self.activations.n_bytes


@dataclass(frozen=True, slots=True)
class Expansion:
    """How a past is made from the smaller thing that a journal keeps in its place, such as token ids.

    make: returns hidden states [rows, tokens, hidden_size] of what the journal keeps, [rows, tokens, ...], and of the
    positions' start. position_bytes: size of one row's hidden state at one position.
    """

    make: Callable[[Tensor, int], Tensor]
    position_bytes: int

    def of(self, past: Past) -> Past:
        """Return the past as it travels."""
        return replace(past, activations=past.activations.with_hidden(self.make(past.activations.hidden, past.start)))


@dataclass(frozen=True, slots=True)
class Entry:
    """One step: the positions that stayed before it (keep = past.start), the gathered rows, and its own positions."""

    step: int
    rows: tuple[int, ...] | None
    past: Past


class Journal:
    """The outputs of one session on one hop, or the client's embeddings."""

    def __init__(self, limits: JournalLimits | None = None) -> None:
        self.n_bytes = 0
        self._folded: list[Past] = []  # in order
        self._entries: list[Entry] = []
        self._unfolded_max = (limits or JournalLimits()).steps_unfolded_max

    def add(self, entry: Entry) -> int:
        """Note a step; they come in order. Returns by how many bytes the journal has grown."""
        before = self.n_bytes
        self._entries.append(entry)
        self.n_bytes += entry.past.n_bytes
        if len(self._entries) > self._unfolded_max:
            self._fold(len(self._entries) // 2)
        return self.n_bytes - before

    def truncate(self, after_step: int) -> None:
        """Forget the steps behind this one, of the last `steps_unfolded_max` // 2: they were noted and never sent."""
        while self._entries and self._entries[-1].step > after_step:
            self.n_bytes -= self._entries.pop().past.n_bytes

    def void(self, step: int) -> None:
        """Note that a step was skipped on the way: its own positions are not there, as far as all hops go."""
        for at, entry in enumerate(self._entries):
            if entry.step == step:
                nothing = Activations(entry.past.activations.hidden[:, :0].clone())  # not to hold the rest
                self._entries[at] = replace(entry, past=Past(entry.past.start, nothing))
                self.n_bytes -= entry.past.n_bytes

    def n_bytes_with(self, entry: Entry) -> int:
        """Memory that it will take when this step is noted, too. To be asked before, where there is a limit.

        Putting steps together carries out their gathers: a past may be a thousand times as large then. Here nothing
        is copied.
        """
        if len(self._entries) < self._unfolded_max:
            return self.n_bytes + entry.past.n_bytes
        count = (len(self._entries) + 1) // 2  # as `add` will have it
        groups = self._groups(self.past_after(self._entries[count - 1].step))
        return sum(_joined_bytes(group) for group in groups) + sum(
            each.past.n_bytes for each in (*self._entries[count:], entry)
        )

    def output_of(self, step: int) -> Activations:
        """Return the activations that went on with one of the last `steps_unfolded_max` // 2 steps."""
        return next(entry.past.activations for entry in reversed(self._entries) if entry.step == step)

    def past_after(self, step: int) -> tuple[Past, ...]:
        """Return the session's past as it was right after `step`, as pieces in order; none where nothing was.

        Only for the last `steps_unfolded_max` // 2 steps: older ones have been put together.
        """
        pieces: list[Past] = []
        stop: int | None = None  # the later steps left the positions before it
        order: Tensor | None = None  # and of those, these rows
        folded = ((past, None) for past in reversed(self._folded))
        steps = ((entry.past, entry.rows) for entry in reversed(self._entries) if entry.step <= step)
        # Backwards, since then a gather changes one order, and not that of all pieces before it.
        for past, gathered in chain(steps, folded):
            if stop is None or past.start < stop:
                kept = past if stop is None or past.stop <= stop else past.part(past.start, stop)
                if kept.start < kept.stop:
                    pieces.append(kept if order is None else kept.gathered(order))
                stop = past.start
            if stop == 0:
                break
            if gathered is not None:
                rows = torch.tensor(gathered)
                order = rows if order is None else rows[order]
        return tuple(reversed(pieces))

    def _fold(self, count: int) -> None:
        """Put the first `count` steps together."""
        groups = self._groups(self.past_after(self._entries[count - 1].step))
        known = self._known
        self._folded = [group[0] if id(group[0]) in known else _joined(group, _beside(group)) for group in groups]
        self._entries = self._entries[count:]
        self.n_bytes = sum(past.n_bytes for past in (*self._folded, *(entry.past for entry in self._entries)))

    def _groups(self, pieces: Sequence[Past]) -> list[list[Past]]:
        """Group neighbouring pieces that are to be one. One that is folded already stays alone."""
        groups: list[list[Past]] = []
        known = self._known
        for is_folded, some in groupby(pieces, lambda piece: id(piece) in known):
            neighbours = list(some)
            groups += [[piece] for piece in neighbours] if is_folded else [neighbours]
        return groups

    @property
    def _known(self) -> set[int]:
        """The folded pieces, by identity: one that was cut or gathered since is another piece."""
        return set(map(id, self._folded))


def cut_off(pieces: Sequence[Past], stop: int) -> tuple[Past, ...]:
    """Return the part of a past before a position."""
    kept = (piece for piece in pieces if piece.start < stop)
    return tuple(piece if piece.stop <= stop else piece.part(piece.start, stop) for piece in kept)


def past_bytes(pieces: Sequence[Past], expansion: Expansion | None = None) -> int:
    """Return the size of a past as it travels."""
    if expansion is None:
        return sum(piece.n_bytes for piece in pieces)
    return sum(piece.rows * piece.activations.tokens for piece in pieces) * expansion.position_bytes


def rebuild_messages(
    session: str,
    epoch: int,
    pieces: Sequence[Past],
    hops: int,
    chunk_bytes: int | None = None,
    expansion: Expansion | None = None,
    coding: Coding | None = None,
) -> Iterator[tuple[Rebuild, Activations]]:
    """Write a past as messages of about CHUNK_BYTES, with their activations, each made when it is asked for.

    A journal keeps outputs as they were before they were coded: coded again, they are the same bytes.
    """
    for kept in _chunks(pieces, chunk_bytes or CHUNK_BYTES, expansion):
        part = kept if expansion is None else expansion.of(kept)
        metas = metas_of(part.activations, coding)
        message = Rebuild(
            session=session,
            epoch=epoch,
            start=part.start,
            total=pieces[-1].stop,
            hops=hops,
            hidden=metas.hidden,
            positions=metas.positions,
            mask=metas.mask,
        )
        yield message, part.activations


def _chunks(pieces: Sequence[Past], chunk_bytes: int, expansion: Expansion | None) -> Iterator[Past]:
    if not pieces:
        return
    hidden = pieces[0].activations.hidden
    position_bytes = hidden.shape[2] * hidden.element_size() if expansion is None else expansion.position_bytes
    size = max(1, chunk_bytes // (pieces[0].rows * position_bytes))
    beside = _beside(pieces)
    for first in range(pieces[0].start, pieces[-1].stop, size):
        last = first + size
        parts = [piece.part(first, last) for piece in pieces if piece.start < last and first < piece.stop]
        yield _joined(parts, beside)


def _beside(pieces: Sequence[Past]) -> tuple[bool, bool]:
    """Whether positions and a mask must be told: for all pieces, or for none."""
    every = [piece.activations for piece in pieces]
    return any(each.positions is not None for each in every), any(each.mask is not None for each in every)


def _joined(pieces: Sequence[Past], beside: tuple[bool, bool]) -> Past:
    """Put neighbouring pieces into one, with the session's rows. beside: as `_beside` returns it."""
    pieces = [piece.in_order() for piece in pieces]
    rows = pieces[0].rows
    positions = mask = None
    if beside[0]:
        positions = torch.cat([_positions(piece).expand(rows, -1) for piece in pieces], dim=1)
    if beside[1]:
        mask = torch.cat([_mask(piece) for piece in pieces], dim=1)
    hidden = [piece.activations.hidden for piece in pieces]
    joined = hidden[0] if len(pieces) == 1 else torch.cat(hidden, dim=1)
    return Past(pieces[0].start, Activations(joined, positions, mask))


def _joined_bytes(pieces: Sequence[Past]) -> int:
    """Memory that all of them will take as one."""
    dtype = reduce(torch.promote_types, (piece.activations.hidden.dtype for piece in pieces))
    positions, mask = _beside(pieces)
    of_one = pieces[0].activations.hidden.shape[2] * dtype.itemsize
    of_one += positions * torch.int64.itemsize + mask * torch.uint8.itemsize
    return pieces[0].rows * (pieces[-1].stop - pieces[0].start) * of_one


def _positions(piece: Past) -> Tensor:
    positions = piece.activations.positions
    return positions if positions is not None else torch.arange(piece.start, piece.stop)[None]


def _mask(piece: Past) -> Tensor:
    mask, hidden = piece.activations.mask, piece.activations.hidden
    return mask if mask is not None else torch.ones(hidden.shape[:2], dtype=torch.uint8)
