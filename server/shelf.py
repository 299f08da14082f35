"""The blocks of pasts that a server keeps for owners, and which of them it drops first. Pure: time is passed in.

An owner's blocks form chains: the key of a block stands for all of the blocks before it. A chain is read from its
beginning, so a block whose predecessor is missing would be of no use. Using a chain renews its blocks from the last to
the first: the one that was renewed longest ago has no successor, and goes first.

Where several owners have blocks, the one with most tokens loses its oldest. So no owner can drive out the blocks of one
that has fewer.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class _Kept(Generic[Item]):
    item: Item
    tokens: int
    used_at: float


class _Owned(Generic[Item]):
    """One owner's blocks, the one that was renewed longest ago first."""

    def __init__(self) -> None:
        self.tokens = 0
        self.kept: OrderedDict[Hashable, _Kept[Item]] = OrderedDict()

    def run(self, keys: Sequence[Hashable]) -> int:
        """Return how many blocks of a chain are there, from its beginning on."""
        return next((index for index, key in enumerate(keys) if key not in self.kept), len(keys))

    def renew(self, keys: Sequence[Hashable], now: float) -> None:
        for key in reversed(keys):
            self.kept[key].used_at = now
            self.kept.move_to_end(key)


class Shelf(Generic[Item]):
    """All blocks, by owner and key."""

    def __init__(self) -> None:
        self.tokens = 0
        self.dropped = 0  # blocks, since the start
        self._of: dict[str, _Owned[Item]] = {}

    def tokens_of(self, owner: str) -> int:
        """Return the tokens of an owner's blocks."""
        return self._of[owner].tokens if owner in self._of else 0

    def find(self, owner: str, keys: Sequence[Hashable], now: float) -> tuple[Item, ...]:
        """Return the blocks of a chain that are there, from its beginning on, and renew them."""
        owned = self._of.get(owner)
        if owned is None:
            return ()
        found = keys[: owned.run(keys)]
        owned.renew(found, now)
        return tuple(owned.kept[key].item for key in found)

    def missing(self, owner: str, keys: Sequence[Hashable]) -> tuple[int, ...]:
        """Return the indices of a chain's blocks that are not there."""
        owned = self._of.get(owner)
        return tuple(range(len(keys))) if owned is None else tuple(i for i, k in enumerate(keys) if k not in owned.kept)

    def put(self, owner: str, keys: Sequence[Hashable], new: Mapping[int, Item], tokens: int, now: float) -> None:
        """Keep blocks of a chain, as far as it is whole with them, and renew all of it.

        new: blocks by their index in the chain. tokens: of each.
        """
        owned = self._of.get(owner) or _Owned()
        count = 0
        for index, key in enumerate(keys):
            if key not in owned.kept:
                if index not in new:
                    break
                owned.kept[key] = _Kept(new[index], tokens, now)
                owned.tokens += tokens
                self.tokens += tokens
            count += 1
        owned.renew(keys[:count], now)
        if owned.kept:
            self._of[owner] = owned

    def trim(self, tokens_max: int) -> None:
        """Drop blocks until no more tokens are left."""
        while self.tokens > tokens_max:
            self._drop_oldest(max(self._of, key=self.tokens_of))

    def forget(self, before: float) -> None:
        """Drop the blocks that no session has used since then."""
        for owner in list(self._of):
            while owner in self._of and next(iter(self._of[owner].kept.values())).used_at < before:
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        owned = self._of[owner]
        _, kept = owned.kept.popitem(last=False)
        owned.tokens -= kept.tokens
        self.tokens -= kept.tokens
        self.dropped += 1
        if not owned.kept:
            del self._of[owner]
