"""Marks: keyed tags of a prompt's beginnings, by which a server finds keys and values that it has computed before.

    client                                      hop
    Prefix(secret, ids).marks(...)  -- OPEN -->     has kept blocks under these tags, for this very peer
                                   <-- OPENED --    held: so many positions of them
    the first step begins at the least of all hops

A prompt is cut into blocks of `size` positions. The tag of a block stands for all token ids until its end:

    link 0     = HMAC(secret, the model's root, the numeric class, size)
    link i     = HMAC(secret, link i - 1, the ids of block i)
    tag i      = HMAC(secret, link i, the hops before this one, with their numeric classes)

A server learns no ids from a tag, and cannot make one: without the secret, equal prompts of two owners have nothing in
common. Keys and values of a hop depend on the hops before it, which may compute wrongly. So the tag names them: what a
session kept along one route is never used along another.
"""

import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from swarm.blocks import Blocks
from swarm.limits import limit
from swarm.protocol.base import Message


@dataclass(frozen=True, slots=True)
class MarkLimits:
    """Bounds on the marks of one session."""

    block_positions: int = limit(64, "positions", "of a block: a prefix is found up to a multiple of it")
    block_positions_min: int = limit(16, "positions", "of a block; a message with smaller ones is malformed")
    block_positions_max: int = limit(4096, "positions", "of a block; a message with larger ones is malformed")
    tags_max: int = limit(512, "tags", "of one session: positions behind them are computed each time")


Tag = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Marks(Message):
    """Tags of a prompt's blocks, the first block first. size: positions of each."""

    size: Annotated[int, Field(ge=MarkLimits().block_positions_min, le=MarkLimits().block_positions_max)]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1, max_length=MarkLimits().tags_max, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompt that a session begins with. secret: its owner's; whoever has it finds what the owner's prompts left.

    ids: of all tokens. The last one is never marked, because its output is what the session is opened for.
    """

    secret: bytes = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    limits: MarkLimits = field(default_factory=MarkLimits)

    def marks(self, root: str, numeric_class: str, upstream: Sequence[tuple[str, Blocks, str]]) -> Marks | None:
        """Return the marks for one hop; None if the prompt has no whole block.

        upstream: peer, blocks and numeric class of each hop before it, in order.
        """
        route = ";".join(f"{peer} {blocks} {computed}" for peer, blocks, computed in upstream).encode()
        tags = tuple(self._mac(b"tag", link, route).hex()[:32] for link in self._links(root, numeric_class))
        return Marks(size=self.limits.block_positions, tags=tags) if tags else None

    def _links(self, root: str, numeric_class: str) -> Iterator[bytes]:
        size = self.limits.block_positions
        link = self._mac(b"root", f"{root} {numeric_class} {size}".encode())
        for stop in range(size, min(len(self.ids), size * self.limits.tags_max + 1), size):
            link = self._mac(b"link", link, struct.pack(f"<{size}I", *self.ids[stop - size : stop]))
            yield link

    def _mac(self, *parts: bytes) -> bytes:
        return hmac.digest(self.secret, b"swarm prefix " + b" ".join(parts), "sha256")
