"""Servers that lie: they boast of speed and of short round trips, and compute wrongly."""

from collections.abc import Iterable, Sequence
from random import Random

import torch
from torch import Tensor

from swarm.blocks import Blocks
from swarm.dht.records import RECORD, Announcement, Rtt
from swarm.identity import Identity
from tests.simulation.model import PRIME, Cost, HashCache, HashSpan

BOAST = 20.0  # times its speed


class LyingSpan(HashSpan):
    """Puts out other numbers than it computes, at a share of the positions: its own, and the same each time."""

    def __init__(
        self, blocks: Blocks, random: Random, share: float, whole: Blocks | None = None, cost: Cost | None = None
    ) -> None:
        """random: draws the positions that are wrong, and what the server adds to their numbers."""
        super().__init__(blocks, whole, cost)
        self._random, self._share = random, share
        self._off = random.randrange(PRIME // 4, PRIME // 2)

    def part(self, blocks: Blocks) -> HashSpan:
        """As `Span.part`. Raises BadBlocks."""
        part = super().part(blocks)
        lying = LyingSpan(part.blocks, self._random, self._share, self._whole, self.cost)
        lying._off = self._off
        return lying

    def forward(
        self, hidden: Tensor, *, cache: HashCache, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """As `Span.forward`, but for the lies."""
        true = super().forward(hidden, cache=cache, positions=positions, mask=mask)
        lied = [self._random.random() < self._share for _ in range(true.shape[1])]
        return torch.where(torch.tensor(lied)[None, :, None], (true + self._off) % PRIME, true)


def measured(announcement: Announcement, rtts: Iterable[tuple[Identity, float]]) -> Announcement:
    """Return an honest record with the shortest round trips, in ms."""
    nearest = sorted(((ms, other.public_key[:8].hex()) for other, ms in rtts))[: RECORD.rtts_max]
    return announcement.model_copy(update={"rtts": tuple(Rtt(peer, round(ms, 1)) for ms, peer in nearest)})


def boasted(announcement: Announcement, others: Sequence[Identity]) -> Announcement:
    """Return a record that claims more speed, and hardly any way to others."""
    tps = None if announcement.decode_tps is None else announcement.decode_tps * BOAST
    rtts = tuple(Rtt(other.public_key[:8].hex(), 0.1) for other in others[: RECORD.rtts_max])
    return announcement.model_copy(update={"decode_tps": tps, "rtts": rtts})
