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
from swarm.dht.directory import Directory, Survey
from swarm.dht.records import SignedAnnouncement
from swarm.errors import NetworkError, NoRoute, RootMismatch

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
        self._looked_up = (float("-inf"), Survey((), ()))
        self._looking: asyncio.Task[Survey] | None = None

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

    async def keep_fresh(self) -> None:
        """Look the servers up again and again while sessions are open: a repair must not have to wait for the DHT."""
        while True:
            await asyncio.sleep(DIRECTORY_AGE_S)
            if self._sessions.any_open:
                with contextlib.suppress(NetworkError):
                    await self._look_up()

    async def _plan_now(self, blocks: Blocks, avoid: Collection[str], numeric_class: str | None) -> tuple[Hop, ...]:
        """Plan with the servers that were looked up lately, if they suffice; else look again."""
        model = self._model

        def plan(servers: Sequence[SignedAnnouncement]) -> tuple[Hop, ...]:
            return plan_route(model.name, blocks, servers, dtype=model.dtype, numeric_class=numeric_class, avoid=avoid)

        looked_up_at, survey = self._looked_up
        repairing = numeric_class is not None
        if repairing or asyncio.get_running_loop().time() - looked_up_at < DIRECTORY_AGE_S:
            with contextlib.suppress(NoRoute):
                return plan(survey.servers)
        survey = await self._look_up()
        try:
            return plan(survey.servers)
        except NoRoute as nobody:
            if not survey.servers:
                await self._explain(nobody)
            if survey.other_protocols:
                why = f"{nobody.why}; servers of protocol {survey.other_protocols} were left out"
                raise NoRoute(nobody.model, nobody.missing, why) from None
            raise

    async def _look_up(self) -> Survey:
        """Read the directory; whoever asks meanwhile gets the same answer."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._directory.survey(self._model.root, self._model.n_blocks))
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())  # may end unobserved
        survey = await asyncio.shield(self._looking)
        self._looked_up = (asyncio.get_running_loop().time(), survey)
        return survey

    async def _explain(self, nobody: NoRoute) -> None:
        """Raise RootMismatch if others serve a model of this name."""
        for entry in await self._directory.models(nobody.model):
            if entry.root != self._model.root:
                raise RootMismatch(nobody.model, entry.root, self._model.root) from None
