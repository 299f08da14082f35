"""Where sessions get their routes from: the directory as it was looked up lately. Runs in the client's event loop."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.blocks import Blocks
from swarm.client.live import SessionPlan
from swarm.client.route import Hop, plan_route
from swarm.client.session import Session
from swarm.client.sessions import Sessions
from swarm.dht.directory import Directory
from swarm.dht.records import SignedAnnouncement
from swarm.errors import NoRoute, RootMismatch

DIRECTORY_AGE_S = 10.0  # a look-up is used again for so long


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that routes are for. dtype: that of the client's ends, as "float32"."""

    root: str
    name: str
    n_blocks: int
    dtype: str


class Router:
    """Plans routes through one model and opens sessions along them."""

    def __init__(self, model: Wanted, directory: Directory, sessions: Sessions) -> None:
        self._model = model
        self._directory = directory
        self._sessions = sessions
        self._looked_up: tuple[float, tuple[SignedAnnouncement, ...]] = (float("-inf"), ())

    async def open(self, blocks: Blocks, plan: SessionPlan) -> Session:
        """Open a session along the best route through `blocks`. Raises NoRoute, HopFailed or Refused."""
        return await self._sessions.open(plan, blocks, self.plan)

    async def plan(
        self, blocks: Blocks, avoid: Collection[str] = (), numeric_class: str | None = None
    ) -> tuple[Hop, ...]:
        """Plan a route, or a part of one that is to be repaired: then in its numeric class. Raises NoRoute.

        avoid: peers and processes that are out of the question. Those that failed lately are taken if nobody else is.
        """
        lately = self._sessions.avoidance.processes
        if lately - set(avoid):
            with contextlib.suppress(NoRoute):
                return await self._plan_now(blocks, {*avoid, *lately}, numeric_class)
        return await self._plan_now(blocks, avoid, numeric_class)

    async def _plan_now(self, blocks: Blocks, avoid: Collection[str], numeric_class: str | None) -> tuple[Hop, ...]:
        """Plan with the servers that were looked up lately, if they suffice; else look again."""
        model = self._model

        def plan(servers: Sequence[SignedAnnouncement]) -> tuple[Hop, ...]:
            return plan_route(model.name, blocks, servers, dtype=model.dtype, numeric_class=numeric_class, avoid=avoid)

        looked_up_at, servers = self._looked_up
        now = asyncio.get_running_loop().time()
        if now - looked_up_at < DIRECTORY_AGE_S:
            with contextlib.suppress(NoRoute):
                return plan(servers)
        survey = await self._directory.survey(model.root, model.n_blocks)
        self._looked_up = (now, survey.servers)
        try:
            return plan(survey.servers)
        except NoRoute as nobody:
            if not survey.servers:
                await self._explain(nobody)
            if survey.other_protocols:
                why = f"{nobody.why}; servers of protocol {survey.other_protocols} were left out"
                raise NoRoute(nobody.model, nobody.missing, why) from None
            raise

    async def _explain(self, nobody: NoRoute) -> None:
        """Raise RootMismatch if others serve a model of this name."""
        for entry in await self._directory.models(nobody.model):
            if entry.root != self._model.root:
                raise RootMismatch(nobody.model, entry.root, self._model.root) from None
