"""Block ranges: the half-open interval [start, stop) of layers that spans, routes and announcements speak of."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarm.errors import BadBlocks

BLOCKS_MAX = 4096  # no decoder is near it; bounds what a peer can make us iterate over


@dataclass(frozen=True, slots=True, order=True)
class Blocks:
    """Blocks start, start + 1, ..., stop - 1. Never empty. Raises BadBlocks."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.stop > BLOCKS_MAX:
            raise BadBlocks(str(self), f"blocks lie within 0:{BLOCKS_MAX}")
        if self.start == self.stop:
            raise BadBlocks(str(self), "it is empty")
        if self.start > self.stop:
            raise BadBlocks(str(self), "it is reversed")

    @classmethod
    def parse(cls, text: str, n_blocks: int | None = None) -> "Blocks":
        """Read "20:40"; with n_blocks, also check that the model has them. Raises BadBlocks."""
        match = re.fullmatch(r"\s*(\d{1,6}):(\d{1,6})\s*", text)
        if match is None:
            raise BadBlocks(text, "not a range", n_blocks)
        try:
            blocks = cls(int(match[1]), int(match[2]))
        except BadBlocks as error:
            raise BadBlocks(text, error.why, n_blocks) from None
        if n_blocks is not None and blocks.stop > n_blocks:
            raise BadBlocks(text, "it is out of range", n_blocks)
        return blocks

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Blocks):
            return self.start <= item.start and item.stop <= self.stop
        return isinstance(item, int) and self.start <= item < self.stop


def missing_blocks(wanted: Blocks, held: Iterable[Blocks]) -> tuple[int, ...]:
    """Return the blocks of `wanted` that no range in `held` contains, in order."""
    missing: list[int] = []
    reached = wanted.start
    for blocks in sorted(held, key=lambda blocks: blocks.start):
        missing.extend(range(reached, min(blocks.start, wanted.stop)))
        reached = max(reached, blocks.stop)
    return *missing, *range(reached, wanted.stop)
