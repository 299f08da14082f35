"""Pools: of what a server has, how much there is in all, and which session holds how much of it.

A peer may hold up to PEER_FACTOR times what stays free (dynamic thresholds: Choudhury and Hahne, IEEE/ACM
Transactions on Networking 6(2), 1998). So one alone gets most of a pool, several share it evenly, and whoever comes
next finds room.

The unit of the KV pool is a token: one row's one position in all blocks of the span. Memory is taken, and charged, in
pages when positions arrive, whatever a session was opened for, and is given back by rollbacks and at the end.
Layers with a sliding window stop costing when their window is full; recurrent states cost the same from the first
position on, like a slot. Other pools count bytes: of activations that wait, of outputs that are kept.
"""

from collections import Counter
from dataclasses import dataclass

PEER_FACTOR = 8


class NoRoom(Exception):
    """A pool has not so much more now."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} more do not fit, {free} are there for you")
        self.needed = needed
        self.free = free


@dataclass(frozen=True, slots=True)
class Prices:
    """What a span's cache costs.

    token_bytes: of one row's one position in all layers. windows: for each length of sliding windows, which share of
    that is theirs. slot_tokens: what a row costs besides, from its first position on. page: positions that memory is
    taken for at a time.
    """

    token_bytes: int = 1
    windows: tuple[tuple[int, float], ...] = ()
    slot_tokens: int = 0
    page: int = 1

    def tokens(self, rows: int, positions: int, rollback_max: int) -> int:
        """What a session of so many rows and positions is charged."""
        if positions == 0:
            return 0
        whole = self._paged(positions)
        spared = sum(max(0, whole - self._paged(window + rollback_max)) * share for window, share in self.windows)
        return rows * (self.slot_tokens + whole - int(spared))

    def _paged(self, positions: int) -> int:
        return -(-positions // self.page) * self.page


class Pool:
    """A capacity that peers share."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.held: Counter[str] = Counter()  # by each peer

    def free(self, peer: str = "") -> int:
        """How much more a peer may hold; without one, somebody who has nothing."""
        held = self.held[peer]
        most = PEER_FACTOR * (self.capacity - self.used + held) // (PEER_FACTOR + 1)
        return max(0, most - held)

    @property
    def most(self) -> int:
        """How much one peer may hold that is alone."""
        return PEER_FACTOR * self.capacity // (PEER_FACTOR + 1)

    def lease(self, peer: str) -> "Lease":
        """Start a lease of a peer's that holds nothing yet."""
        return Lease(self, peer)

    def change(self, peer: str, more: int) -> None:
        """Let a peer hold more, or less where it is negative. Raises NoRoom, and then nothing has changed."""
        if more > 0 and more > (free := self.free(peer)):
            raise NoRoom(more, free)
        self.used += more
        self.held[peer] += more
        if not self.held[peer]:
            del self.held[peer]


@dataclass(slots=True)
class Lease:
    """One session's share of a pool."""

    pool: Pool
    peer: str
    amount: int = 0

    @property
    def room(self) -> int:
        """How much larger it may become."""
        return self.pool.free(self.peer)

    def resize(self, amount: int) -> None:
        """Hold so much from now on. Raises NoRoom, and then nothing has changed."""
        if amount != self.amount:
            self.pool.change(self.peer, amount - self.amount)
            self.amount = amount

    def release(self) -> None:
        """Give everything back."""
        self.resize(0)
