"""The KV pool: how many cached positions a server holds in all, and which session has how many."""

from dataclasses import dataclass


class NoRoom(Exception):
    """The pool cannot take so many more tokens now."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} more tokens do not fit, {free} are free")
        self.needed = needed
        self.free = free


class KvPool:
    """Counts tokens (one row's one position, across all blocks of the span) against a capacity."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0

    @property
    def free_tokens(self) -> int:
        """Tokens that are not charged to any lease."""
        return self.capacity_tokens - self.used_tokens

    def lease(self) -> "Lease":
        """Start a lease that holds nothing yet: tokens are charged when they are used."""
        return Lease(self)


@dataclass(slots=True)
class Lease:
    """One session's share of the pool."""

    pool: KvPool
    tokens: int = 0

    def resize(self, tokens: int) -> None:
        """Hold `tokens` from now on. Raises NoRoom, and then nothing has changed."""
        more = tokens - self.tokens
        if more > self.pool.free_tokens:
            raise NoRoom(more, self.pool.free_tokens)
        self.pool.used_tokens += more
        self.tokens = tokens

    def release(self) -> None:
        """Give everything back."""
        self.resize(0)
