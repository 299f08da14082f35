"""The KV pool: how much cache a server has in all, and which session holds how much of it.

The unit is a token: one row's one position in all blocks of the span. Memory is taken, and charged, in pages
when positions arrive, whatever a session was opened for, and is given back by rollbacks and at the end.
Layers with a sliding window stop costing when their window is full; recurrent states cost the same from the first
position on, like a slot.

A peer may hold up to PEER_FACTOR times what stays free (dynamic thresholds: Choudhury and Hahne, IEEE/ACM
Transactions on Networking 6(2), 1998). So one alone gets most of the pool, several share it evenly, and whoever comes
next finds room.
"""

from collections import Counter
from dataclasses import dataclass

PEER_FACTOR = 8


class NoRoom(Exception):
    """The pool cannot take so many more tokens now."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} more tokens do not fit, {free} are there for you")
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


class KvPool:
    """Counts tokens against a capacity."""

    def __init__(self, capacity_tokens: int, prices: Prices = Prices()) -> None:
        self.capacity_tokens = capacity_tokens
        self.prices = prices
        self.held: Counter[str] = Counter()  # by each peer

    @property
    def used_tokens(self) -> int:
        """Tokens that are charged to leases."""
        return self.held.total()

    def free_tokens(self, peer: str = "") -> int:
        """How many more tokens a peer may hold; without one, somebody who has none."""
        held = self.held[peer]
        most = PEER_FACTOR * (self.capacity_tokens - self.used_tokens + held) // (PEER_FACTOR + 1)
        return max(0, most - held)

    def lease(self, peer: str) -> "Lease":
        """Start a peer's lease that holds nothing yet: tokens are charged when they are used."""
        return Lease(self, peer)


@dataclass(slots=True)
class Lease:
    """One session's share of the pool."""

    pool: KvPool
    peer: str
    tokens: int = 0

    def hold(self, rows: int, positions: int, rollback_max: int = 0) -> None:
        """Hold so much from now on. Raises NoRoom, and then nothing has changed."""
        self._resize(self.pool.prices.tokens(rows, positions, rollback_max))

    def release(self) -> None:
        """Give everything back."""
        self._resize(0)

    def _resize(self, tokens: int) -> None:
        more = tokens - self.tokens
        if more == 0:
            return
        if more > 0 and more > (free := self.pool.free_tokens(self.peer)):
            raise NoRoom(more, free)
        self.tokens = tokens
        held = self.pool.held
        held[self.peer] += more
        if not held[self.peer]:
            del held[self.peer]
