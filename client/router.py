"""Where sessions get their routes from: the directory as it was looked up lately, and who failed. In the event loop."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.blocks import Blocks
from swarm.client.live import Plan, SessionPlan
from swarm.client.route import Hop, plan_route
from swarm.client.session import WAIT_POLL_S, Session, Sessions
from swarm.dht.directory import Directory
from swarm.dht.records import SignedAnnouncement
from swarm.errors import HopFailed, NoRoute, Refused, RootMismatch

OPEN_TRIES = 4  # routes tried for one session: each leaves out the peers that failed in the ones before
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

    def __init__(self, model: Wanted, directory: Directory, sessions: Sessions, wait_for_blocks_s: float) -> None:
        """wait_for_blocks_s: how long opening waits for somebody to serve blocks that nobody serves."""
        self._model = model
        self._directory = directory
        self._sessions = sessions
        self._wait_for_blocks_s = wait_for_blocks_s
        self._looked_up: tuple[float, tuple[SignedAnnouncement, ...]] = (float("-inf"), ())

    async def open(self, blocks: Blocks, plan: SessionPlan) -> Session:
        """Open a session along the best route through `blocks`. Raises NoRoute, HopFailed or Refused."""
        avoid: list[str] = []
        while True:
            route = await self.plan(blocks, avoid)
            try:
                return await self._sessions.open(plan, route, self._replanner(route))
            except (HopFailed, Refused) as error:
                # A process, not its peer: a server that was started again has a record that is newer than ours.
                avoid.append(next((hop.process for hop in route if hop.peer_id == error.peer), error.peer))
                failed = error
            if len(avoid) >= OPEN_TRIES:
                raise failed
            try:
                await self.plan(blocks, avoid)
            except NoRoute:
                raise failed from None  # what is wrong with the only holder says more than that there is no other

    async def plan(self, blocks: Blocks, avoid: Collection[str] = ()) -> tuple[Hop, ...]:
        """Plan a route; while nobody serves some block, wait as long as the options say. Raises NoRoute."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_for_blocks_s
        while True:
            try:
                return await self._plan_now(blocks, avoid)
            except NoRoute:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(min(WAIT_POLL_S, max(0.0, deadline - loop.time())))

    def _replanner(self, route: Sequence[Hop]) -> Plan:
        """Return how hops are found to take over in this route: in its numeric class."""
        numeric_class = route[0].announcement.numeric_class

        async def replan(blocks: Blocks, avoid: Collection[str]) -> tuple[Hop, ...]:
            return await self._plan_now(blocks, avoid, numeric_class)

        return replan

    async def _plan_now(
        self, blocks: Blocks, avoid: Collection[str], numeric_class: str | None = None
    ) -> tuple[Hop, ...]:
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
