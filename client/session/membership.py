"""A client's place in a swarm: joins its directory, plans routes, opens sessions. For code that runs on asyncio.

    async with joined(join, identity, network="public") as member, member.of(model) as swarm:
        session = await swarm.open(Blocks(0, 32), plan)
        output = await session.step(Activations(hidden), want=1)

Routes through several models share the directory, the channels and the knowledge of failed peers.
`swarm.client.hf.swarm` is the same for threads that block.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

from swarm.access import EVERYBODY, Access
from swarm.blocks import Blocks
from swarm.client.auditing.auditor import AuditLimits, Auditor
from swarm.client.planning.explain import ExplainedRoute
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.promise import Crossing, Held
from swarm.client.planning.route import Hop
from swarm.client.planning.router import Router, Wanted
from swarm.client.session.limits import SessionLimits
from swarm.client.session.plan import SessionPlan
from swarm.client.session.ring import Use
from swarm.client.session.session import First, Session
from swarm.client.session.sessions import Sessions
from swarm.dht.directory import Directory
from swarm.errors import NetworkError, NoRoute
from swarm.identity import Identity
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.flow import FlowControl
from swarm.net.limits import ChannelLimits, FrameLimits
from swarm.net.noise import ChannelKey
from swarm.net.traversal import Traversal
from swarm.protocol.naming import new_name

Join = Callable[[], AbstractAsyncContextManager[Directory]]


@asynccontextmanager
async def joined(
    join: Join,
    identity: Identity,
    *,
    network: str,
    access: Access = EVERYBODY,
    held_bytes_max: int = 1 << 30,
    limits: SessionLimits | None = None,
) -> "AsyncIterator[Member]":
    """Join a swarm, and leave it at the end of the block. Raises NetworkError.

    join: enters the DHT. held_bytes_max: bytes of unsent steps, and of replayed pasts, of all sessions together.
    """
    async with join() as directory:
        me = Endpoint(identity, ChannelKey(), network, access, public=directory.public)
        flow = FlowControl(ChannelLimits(FrameLimits(held_bytes_max=held_bytes_max)))
        traversal = Traversal(me, flow)
        sessions = Sessions(partial(new_name, identity.peer_id), partial(Dialer, me, dial=traversal.dial), limits)
        try:
            yield Member(directory, sessions)
        finally:
            await sessions.close()
            await traversal.close()


@dataclass(frozen=True, slots=True)
class Member:
    """A client that has joined: its directory, and its sessions through all models."""

    directory: Directory
    sessions: Sessions

    def of(
        self, model: Wanted, preferences: Preferences | None = None, audits: AuditLimits | None = None
    ) -> "Membership":
        """Return the membership for one model's routes, to be entered. audits: of its sessions; none without it."""
        return Membership(Router(model, self.directory, self.sessions.avoidance, preferences), self.sessions, audits)


class Membership:
    """Opens sessions along planned routes through one model. While it is entered, it keeps its survey fresh."""

    def __init__(self, router: Router, sessions: Sessions, audits: AuditLimits | None = None) -> None:
        self.router = router
        self.auditor = Auditor(router, sessions, audits or AuditLimits(share=0.0))
        self.sessions = sessions
        self._keeping: asyncio.Task[None] | None = None

    async def open(
        self, blocks: Blocks, plan: SessionPlan, limits: SessionLimits | None = None, first: First | None = None
    ) -> Session:
        """Open a session along the best route through `blocks`. Raises NoRoute, HopFailed or Refused.

        limits: this session's own; None for those of all. first: the step that is called next, which travels already.
        """

        async def planner(missing: Blocks, avoid: Collection[str], held: Held, fresh: bool) -> tuple[Hop, ...]:
            needed = plan.batch * plan.positions_soon
            return (await self.router.plan(missing, avoid, held, fresh, positions_needed=needed)).hops

        plan = self.auditor.drawn(plan)
        try:
            session = await self.sessions.open(plan, blocks, planner, limits, first, self.router.renewed)
        except NoRoute as failure:  # diagnosed only now: servers may come while a session waits for them
            raise await self.router.diagnosed(failure) from None
        self.router.remember(session.route)
        self.auditor.opened(session, blocks, plan)
        session.ended.add_done_callback(self._learn)
        return session

    async def route(
        self, blocks: Blocks, hops: Sequence[Hop] = (), crossings: tuple[Crossing, ...] = ()
    ) -> ExplainedRoute:
        """Return a route that explains itself: the one that a session takes now, or a fresh plan where it has none.

        crossings: of the session.
        """
        return self.router.explained(hops, crossings) if hops else self.router.explained(await self.router.plan(blocks))

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep_fresh())
        await self.auditor.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._keeping is not None
        self._keeping.cancel()
        await self.auditor.__aexit__()

    def _learn(self, ended: "asyncio.Future[Use | None]") -> None:
        """Learn from a session that has ended how fast its servers are."""
        if (use := ended.result()) is not None:
            self.router.used(use.hops, use.token_ms)

    async def _keep_fresh(self) -> None:
        """Read the directory again and again while sessions are open: a repair must not have to wait for the DHT."""
        while True:
            await asyncio.sleep(self.router.limits.survey_age_s)
            if self.sessions.any_open:
                with contextlib.suppress(NetworkError):
                    await self.router.surveys.read()
