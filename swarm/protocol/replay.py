"""A past on its way to hops that lack it: one sender, up to a whole route of receivers, one window of bytes.

After a repair some neighbouring hops lack the session's past (`lacking`, `runs`). The nearest hop upstream that has a
journal sends it to them, or the client with its embeddings. The first of them computes each piece and hands its output
on to the second; the last one confirms.

    client or hop: PastSender        hop: PastReceiver             ...   last hop (piece.hops == 1)
      take() --- Rebuild(hops=n) --->  offer, accept, compute
                                       Rebuild(hops=n-1) ----------------> offer, accept, compute
      confirmed(stop) <- Rebuilt(stop) confirmed(stop) <----------------- Rebuilt(stop)
                                       Rebuilt(total) to the owner         Rebuilt(total) to the owner

Sender: `take` returns one piece after the other while its window has room and something is left. The owner calls it at
the start and after each confirmation, until it returns None; then the window is full, or the sender is `done`. A server
looks before each piece whether the next hop reads fast enough.

Window: bytes sent and not confirmed. It begins as if it held one piece, so that a hop without room costs one piece;
the first confirmation opens it to `window_bytes`. Confirmations are cumulative: one that is lost costs nothing if a
later one comes. Each hop and each relay keeps a window for the pieces that it passes on: `add(piece)`, and if
`confirmed(stop)` returns a position, Rebuilt with that position goes back to where the pieces came from. So a
confirmation without a piece passes no hop twice. Only a sender is held back by its window.

Receiver: `next` is where the next piece must start; None is the state *whole*, and only there steps are accepted.
    offer(piece)   starts before `next`, or when whole: before the session's length   -> Twice     drop it
                   starts at `next` and fits                                          -> Compute   then accept(piece)
                   else                                                               -> Refuse    code and reason
    accept(piece)  `next` moves behind it; behind the last one the receiver is whole
    computed()     the oldest accepted piece came back; `follow_up` says which messages go out
    reset()        the past is forgotten: `next` is 0
`offer` changes nothing. A reroute gives a hop a new window and no sender; OPEN with `rebuild` makes a receiver that
is not whole, REROUTE with `reset` calls `reset`. One epoch has one replay, so a hop's sender stays there when done.
tests/protocol/test_replay.py drives a sender and chains of receivers over wires that lose, repeat and reorder.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from swarm.activations import Activations
from swarm.limits import limit
from swarm.protocol.journal import Expansion, Past, rebuild_messages
from swarm.protocol.messages import Rebuild, RefusalCode
from swarm.protocol.tensors import CHUNK_BYTES, Coding, meta_of


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Bounds on a past that is replayed."""

    window_bytes: int = limit(8 * CHUNK_BYTES, "bytes", "a sender waits with more until hops have confirmed some")
    chunk_bytes: int = limit(CHUNK_BYTES, "bytes", "a past is cut into pieces of about so much")


class ReplayWindow:
    """Pieces of a past that were sent, in order, and that the hops which lack it have not confirmed."""

    def __init__(self, limits: ReplayLimits | None = None) -> None:
        self.n_bytes = 0  # on their way
        self.stop = 0  # where the last piece stops
        self._n_bytes_max = 1  # before the first confirmation: one piece, however large
        self._pieces: deque[tuple[int, int]] = deque()  # where each stops, and its bytes
        self._limits = limits or ReplayLimits()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def is_full(self) -> bool:
        """Whether no more may be sent now."""
        return self.n_bytes >= self._n_bytes_max

    def add(self, piece: Rebuild) -> None:
        """Count a piece that is sent, or passed on."""
        self.stop = _stop(piece)
        self._pieces.append((self.stop, piece.hidden.n_bytes))
        self.n_bytes += piece.hidden.n_bytes

    def confirmed(self, stop: int) -> int | None:
        """Count the positions before `stop` as there. Returns where the last piece stops of which that is news."""
        last = None
        while self._pieces and self._pieces[0][0] <= stop:
            last, n_bytes = self._pieces.popleft()
            self.n_bytes -= n_bytes
            self._n_bytes_max = self._limits.window_bytes
        return last


class PastSender:
    """A past that is sent from here. Pieces are made when they are taken: gathered, they may be far larger."""

    def __init__(
        self,
        session: str,
        epoch: int,
        pieces: Sequence[Past],
        hops: int,
        window: ReplayWindow,
        limits: ReplayLimits | None = None,
        expansion: Expansion | None = None,
        coding: Coding | None = None,
    ) -> None:
        """pieces: of the past, in order, as the journal has them. hops: how many lack it. window: to the first one.

        expansion: makes the past from the pieces, where the journal keeps something smaller. coding: the session's.
        """
        self.done = False  # nothing is left to take, and no piece of the journal is held any more
        self.window = window
        chunk_bytes = (limits or ReplayLimits()).chunk_bytes
        self._messages: Iterator[tuple[Rebuild, Activations]] = rebuild_messages(
            session, epoch, pieces, hops, chunk_bytes, expansion, coding
        )

    def take(self) -> tuple[Rebuild, Activations] | None:
        """Return the next piece, to be sent now; None if the window is full or nothing is left."""
        if self.window.is_full:
            return None
        piece = next(self._messages, None)
        if piece is None:
            self.done, self._messages = True, iter(())
            return None
        self.window.add(piece[0])
        return piece

    def confirmed(self, stop: int) -> int | None:
        """Make room in the window, as `ReplayWindow.confirmed` does."""
        return self.window.confirmed(stop)


@dataclass(frozen=True, slots=True)
class Compute:
    """The piece is the next one: the session has so many rows, and positions before `stop`, when it is accepted.

    reserve_bytes: room that its window of pieces needs, before the first is accepted; None for later pieces.
    """

    rows: int
    tokens: int
    stop: int
    reserve_bytes: int | None


@dataclass(frozen=True, slots=True)
class Twice:
    """The piece was accepted before."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The piece is none that the session can take."""

    code: RefusalCode
    why: str


class PastReceiver:
    """The past of one session at one hop, while it comes."""

    def __init__(self, positions_max: int, *, rebuild: bool, limits: ReplayLimits | None = None) -> None:
        """positions_max: of the session. rebuild: the past will come; else the hop has all of it, or there is none."""
        self.next: int | None = 0 if rebuild else None  # where the next piece starts; None for no more pieces
        self.under_way = 0  # pieces that were accepted and are not computed
        self._rows = 0
        self._positions_max = positions_max
        self._limits = limits or ReplayLimits()

    @property
    def is_whole(self) -> bool:
        """Whether all of the past was accepted, so that steps may follow."""
        return self.next is None

    def offer(self, piece: Rebuild, length: int) -> Compute | Twice | Refuse:
        """Tell the next piece from others. length: positions that the session has. Changes nothing."""
        if piece.start < (length if self.next is None else self.next):
            return Twice()
        if len(piece.hidden.shape) != 3:
            return Refuse("bad_activations", f"activations of shape {list(piece.hidden.shape)}")
        rows, tokens, _ = piece.hidden.shape
        stop = piece.start + tokens
        if piece.start != self.next or not stop <= piece.total <= self._positions_max:
            return Refuse("bad_request", f"positions from {piece.start}, {self.next} is the next to rebuild")
        if piece.start and rows != self._rows:
            return Refuse("bad_request", f"{rows} rows, the session has {self._rows}")
        whole_bytes = piece.hidden.n_bytes * piece.total // tokens
        reserve = None if piece.start else min(self._limits.window_bytes, whole_bytes)
        return Compute(rows, tokens, stop, reserve)

    def accept(self, piece: Rebuild) -> None:
        """Count a piece that goes to be computed. Only after `offer` has returned Compute."""
        assert piece.start == self.next
        self._rows = piece.hidden.shape[0]
        self.next = stop if (stop := _stop(piece)) < piece.total else None
        self.under_way += 1

    def computed(self) -> None:
        """Count a piece that came back. Never called for one from before a reset."""
        assert self.under_way
        self.under_way -= 1

    def reset(self) -> None:
        """Forget the past, which comes anew."""
        self.next, self.under_way, self._rows = 0, 0, 0


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The messages that a computed piece has as its consequence.

    onward: goes to the next hop with the output, and into the window; None if no further hop lacks the past.
    stop: the position for Rebuilt. confirm_sender, confirm_owner: which peers get it. is_last: the past is whole.
    """

    onward: Rebuild | None
    stop: int
    confirm_sender: bool
    confirm_owner: bool
    is_last: bool


def follow_up(piece: Rebuild, output: Activations, *, from_owner: bool) -> FollowUp:
    """Return the consequences of a piece and its output. from_owner: the session's owner has sent the piece here.

    The last hop confirms each piece to its sender. The owner hears from every hop when it has the whole past, once.
    """
    is_last = _stop(piece) == piece.total
    onward = None
    if piece.hops > 1:
        update = {"hops": piece.hops - 1, "hidden": meta_of(output.hidden, piece.hidden.coding)}
        onward = piece.model_copy(update=update)
    confirm_owner = is_last and (piece.hops > 1 or not from_owner)
    return FollowUp(onward, _stop(piece), piece.hops == 1, confirm_owner, is_last)


def lacking(empty: Collection[int], journals: Collection[int]) -> set[int]:
    """Return the hops that must get the past: those without, and those between them and the next journal up.

    empty: indices of hops that have none. journals: of those that can replay; the client can always, as hop -1.
    """
    every = set(empty)
    for index in sorted(empty, reverse=True):
        source = index - 1
        while source >= 0 and source not in journals:
            every.add(source)
            source -= 1
    return every


def runs(indices: Collection[int]) -> list[tuple[int, int]]:
    """Group indices into runs of neighbours: {1, 2, 5} -> [(1, 2), (5, 1)] as (first, count)."""
    grouped: list[tuple[int, int]] = []
    for index in sorted(indices):
        if grouped and sum(grouped[-1]) == index:
            grouped[-1] = (grouped[-1][0], grouped[-1][1] + 1)
        else:
            grouped.append((index, 1))
    return grouped


def _stop(piece: Rebuild) -> int:
    return piece.start + piece.hidden.shape[1]
