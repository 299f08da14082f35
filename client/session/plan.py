"""The purpose of a session, and the planner that finds hops for it."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from swarm.blocks import Blocks
from swarm.client.planning.promise import Held
from swarm.client.planning.route import Hop
from swarm.client.session.limits import ChunkLimits
from swarm.protocol.journal import Expansion
from swarm.protocol.marks import Prefix
from swarm.protocol.seat import Terms
from swarm.protocol.tensors import Coding

Planner = Callable[[Blocks, Collection[str], Held, bool], Awaitable[tuple[Hop, ...]]]
"""`await planner(blocks, avoid, held, fresh)`: hops for blocks, without these peers or processes.

held: the numeric classes of the route before; () for a new one.
fresh: from the directory as it is now, not as it was read lately. Raises NoRoute.
"""

Renewed = Callable[[Hop], Hop]
"""`renewed(hop)`: the hop with the newest record of its process that is known. Its neighbours take no record of old."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The purpose of a session.

    positions_max: the longest that it may get. rollback_max: the most positions that one step takes back.
    wait_for_blocks_s: how long it waits for a holder of blocks that no server announces. batch, positions_soon: rows,
    and positions of each, that hops are to have room for at once. expansion: makes embeddings from the token ids that
    come with each step, so that the client's journal keeps ids alone; None if it keeps embeddings. tenant: as in Open.
    prefix: the prompt that the session begins with, of which hops may have the past already; needs an expansion.
    coding: of the activations on all edges. The planner must find hops that take it. audited: what the hops answer is
    kept, to be compared with what others compute. receipt: hops are asked to note what a receipt needs.
    """

    root: str
    positions_max: int
    rollback_max: int
    step_timeout_s: float
    wait_for_blocks_s: float
    batch: int = 1
    positions_soon: int = 0
    expansion: Expansion | None = None
    tenant: str | None = None
    prefix: Prefix | None = None
    coding: Coding | None = None
    audited: bool = False
    receipt: bool = False

    def sized(self, rows: int, tokens: int, limits: ChunkLimits) -> "SessionPlan":
        """Return the plan of a session whose first step has so many rows of so many tokens."""
        soon = min(self.positions_max, tokens + limits.positions_to_come)
        return replace(self, batch=rows, positions_soon=soon)

    def terms(self, batch: int, positions_soon: int, *, is_first: bool) -> Terms:
        """Return the terms of an Open, with room for so many rows and positions.

        is_first: no route has stood yet. Later the session has a length, which a kept past must not change.
        """
        prefix = self.prefix if is_first else None
        size = self.positions_max, self.rollback_max, batch, positions_soon
        return Terms(self.root, *size, self.tenant, prefix, self.coding, self.receipt)
