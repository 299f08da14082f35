"""A server that chooses its own span: claims it, looks from time to time where it is needed, says when to move."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

import structlog

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.dht.directory import Directory
from swarm.dht.records import Announcement
from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.model.checkpoint import Checkpoint
from swarm.server.placement import Holder, candidates, choose_span, should_move
from swarm.server.proofs import Proofs
from swarm.server.weights import holders_of

Claim = Callable[[Blocks], Awaitable[object]]
"""`claim(blocks)`: announce that a span will be here, instead of the one that was claimed before."""

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class AutomaticLimits:
    """How patiently a server claims its first span."""

    claim_s: float = limit(1.0, "s", "a claim is given at least so long to reach the others")
    claims_max: int = limit(6, "claims", "after which a server that starts with others keeps its last one")


class Automatic:
    """Chooses the span of one server, from the announcements of its swarm."""

    def __init__(
        self,
        directory: Directory,
        checkpoint: Checkpoint,
        key: str,
        numeric_class: NumericClass,
        every_s: float,
        random: Random,
        proofs: Proofs,
        limits: AutomaticLimits = AutomaticLimits(),
    ) -> None:
        """key: our public key, hex. every_s: between two looks, more or less; 0: never look again."""
        self._directory, self._checkpoint, self._key = directory, checkpoint, key
        self._numeric_class, self._every_s, self._random, self._limits = numeric_class, every_s, random, limits
        self._proofs = proofs

    async def close(self) -> None:
        """Call no server any more."""
        await self._proofs.close()

    async def first(self, length: int, claim: Claim) -> Blocks:
        """Choose and claim the first span. Raises NetworkError.

        Of servers that start together, each gives way to claims of those with smaller keys.
        """
        loop = asyncio.get_running_loop()
        claimed: Blocks | None = None
        for _ in range(self._limits.claims_max):
            there = [a for a in await self._survey() if a.state != "joining" or a.public_key < self._key]
            holders = await self._holders(there)
            blocks = choose_span(self._checkpoint.n_blocks, length, holders, self._key)
            if blocks == claimed:
                break
            began = loop.time()
            await claim(blocks)
            claimed = blocks
            await asyncio.sleep(max(self._limits.claim_s, 2 * (loop.time() - began)))  # others may be as slow as we are
        assert claimed is not None
        return claimed

    async def goal(self) -> Blocks:
        """Wait until this server should be elsewhere, perhaps for ever. Returns where."""
        if not self._every_s:
            await asyncio.Event().wait()
        patience = 0
        while True:
            await asyncio.sleep(self._every_s * self._random.uniform(0.5, 1.5))
            try:
                announcements = await self._survey()
            except NetworkError as error:
                _log.warning("cannot see where servers are needed", why=str(error))
                continue
            holders = await self._holders(announcements)
            n_blocks = self._checkpoint.n_blocks
            # In a thread: a large swarm takes tenths of a second.
            queue = await asyncio.to_thread(candidates, n_blocks, holders)
            blocks, patience = should_move(queue, self._key, patience)
            if blocks is not None:
                return blocks

    async def _holders(self, announcements: list[Announcement]) -> tuple[Holder, ...]:
        """Return who counts as holding what, after probes of some of those that have proven nothing yet."""
        others = [a for a in announcements if a.public_key != self._key]
        proven = {**await self._proofs.look(others), self._key: math.inf}
        return holders_of(announcements, proven, self._numeric_class)

    async def _survey(self) -> list[Announcement]:
        survey = await self._directory.survey(self._checkpoint.root, self._checkpoint.n_blocks, everybody=True)
        return [signed.announcement for signed in survey.servers]
