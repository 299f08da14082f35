"""Pools: how much of something a server has in all, and how much of it each peer holds.

A peer may hold up to PEER_FACTOR times the share that stays free (dynamic thresholds: Choudhury and Hahne, IEEE/ACM
Transactions on Networking 6(2), 1998). A peer that is alone gets most of a pool, several share it evenly, and the next
one finds room.

The unit of the KV pool is a token: one row's one position in all blocks of the span. Memory is taken, and charged, in
pages when positions arrive, not when a session opens. Rollbacks and the end give it back. Layers with a
sliding window stop costing when their window is full; recurrent states cost the same from the first position on, like a
slot. Other pools count bytes: of activations that wait, of outputs that are kept.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

PEER_FACTOR = 8  # the ratio in the formula above: 8/9 of a pool for one peer, which leaves 1/9 for the next


@dataclass(frozen=True, slots=True)
class Prices:
    """The cost of a span's cache.

    token_bytes: of one row's one position in all layers. windows: for each length of sliding windows, which share of
    that is theirs. slot_tokens: the cost of a row besides, from its first position on. page: positions that memory is
    taken for at a time.
    """

    token_bytes: int = 1
    windows: tuple[tuple[int, float], ...] = ()
    slot_tokens: int = 0
    page: int = 1

    def tokens(self, rows: int, positions: int, rollback_max: int) -> int:
        """Return the tokens that a session of so many rows and positions is charged."""
        if positions == 0:
            return 0
        whole = -(-positions // self.page) * self.page
        spared = 0.0
        for window, share in self.windows:
            kept = -(-(window + rollback_max) // self.page) * self.page
            spared += max(0, whole - kept) * share
        return rows * (self.slot_tokens + whole - int(spared))


def _nothing() -> None:
    pass


class Pool:
    """A capacity that peers share.

    lent: how much is used for as long as no peer wants it; it counts as free. give_way: is called when that is less.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.lent = 0
        self.give_way: Callable[[], None] = _nothing
        self.held: Counter[str] = Counter()  # by each peer

    def free(self, peer: str = "") -> int:
        """Return how much more a peer may hold; without one, a peer that has nothing."""
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


class Lease:
    """One session's share of a pool."""

    __slots__ = ("amount", "peer", "pool")

    def __init__(self, pool: Pool, peer: str) -> None:
        self.pool = pool
        self.peer = peer
        self.amount = 0

    @property
    def room(self) -> int:
        """How much larger it may become."""
        return self.pool.free(self.peer)

    def resize(self, amount: int) -> bool:
        """Hold so much from now on. Returns False where there is no room, and then nothing has changed."""
        more, pool, held = amount - self.amount, self.pool, self.pool.held[self.peer]
        # `Pool.free`, inlined: a step resizes several leases
        if more > 0 and more > PEER_FACTOR * (pool.capacity - pool.used + held) // (PEER_FACTOR + 1) - held:
            return False
        self.amount = amount
        pool.used += more
        if pool.lent and more > 0 and pool.used + pool.lent > pool.capacity:
            pool.give_way()
        if held + more:
            pool.held[self.peer] = held + more
        else:
            pool.held.pop(self.peer, None)
        return True
