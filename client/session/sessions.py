"""A client's open sessions: where they begin, and where what hops say finds them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.attempt import Finder
from swarm.client.session.avoidance import Avoidance
from swarm.client.session.circuit import Shared
from swarm.client.session.inlet import FromHop
from swarm.client.session.limits import SessionLimits
from swarm.client.session.plan import Planner, Renewed, SessionPlan
from swarm.client.session.session import First, Session
from swarm.client.session.timeout import Timeout
from swarm.net.channel import Channel, OnMessage
from swarm.net.dialer import Dialer
from swarm.net.gate import PROGRESS, Toll
from swarm.protocol import messages as wire


class Sessions:
    """The client's open sessions, by their id: where messages from hops go."""

    def __init__(
        self,
        new_id: Callable[[], str],
        dialer_of: Callable[[OnMessage], Dialer],
        limits: SessionLimits | None = None,
    ) -> None:
        """new_id: names a session, with 32 hex digits (`swarm.protocol.naming`). dialer_of: makes the dialer, whose
        channels hand their messages to these sessions.
        """
        self.limits = limits = limits or SessionLimits()
        self._new_id = new_id
        self._by_id: dict[str, Session] = {}
        self._watched: set[Channel] = set()
        self.dialer = dialer_of(self.on_message)
        self.avoidance = Avoidance(asyncio.get_running_loop().time, lambda: self.dialer.heard_at, limits.avoidance)
        self._shared = Shared(
            dialer=self.dialer,
            avoidance=self.avoidance,
            connects=Timeout(limits.connect.connect_s),
            turns=asyncio.Semaphore(limits.recovery.turns),
            watch=self._watch,
            others=lambda: len(self._by_id) > 1,
            limits=limits,
        )

    @property
    def any_open(self) -> bool:
        """Whether there is a session."""
        return bool(self._by_id)

    @property
    def open_sessions(self) -> tuple[Session, ...]:
        """The sessions that have not ended, in the order in which they were opened."""
        return tuple(session for session in self._by_id.values() if not session.ended.done())

    def on_message(self, channel: Channel, message: wire.AnyMessage, activations: Activations | None) -> Toll:
        """Hand a message to its session; what belongs to none (any more) is dropped."""
        if isinstance(message, FromHop):
            session = self._by_id.get(message.session)
            if session is not None:
                session.inlet.on_message(channel, message, activations)
        return PROGRESS

    async def open(
        self,
        plan: SessionPlan,
        blocks: Blocks,
        planner: Planner,
        limits: SessionLimits | None = None,
        first: First | None = None,
        renewed: Renewed = lambda hop: hop,
    ) -> Session:
        """Open a session along a route through these blocks. Raises NoRoute, HopFailed or Refused, and leaves nothing.

        planner: finds the hops, and later those that take over from others. limits: this session's own. first: the step
        that is called next. renewed: is asked of hops that stay when others are replaced.
        """
        while True:
            before = self.avoidance.banned
            session = await self._opened(plan, Finder(blocks, planner, renewed), limits, first)
            found_wrong = self.avoidance.banned - before  # meanwhile
            if not any(hop.peer_id in found_wrong for hop in session.route):
                return session
            await session.close()

    async def _opened(
        self, plan: SessionPlan, finder: Finder, limits: SessionLimits | None, first: First | None
    ) -> Session:
        shared = self._shared if limits is None else replace(self._shared, limits=limits)
        session_id = self._new_id()
        session = Session(session_id, plan, finder, shared)
        session.ended.add_done_callback(lambda _: self._by_id.pop(session_id, None))
        self._by_id[session_id] = session
        try:
            await session.open(first)
        except BaseException:
            await session.close()
            raise
        return session

    def expel(self, process: str) -> None:
        """Do without a peer from now on: a process of it has computed wrongly. Its sessions begin anew elsewhere."""
        peer = process.partition("/")[0]
        self.avoidance.ban(peer)
        for session in self.open_sessions:
            for hop in session.route:
                if hop.peer_id == peer:
                    session.expel(hop.process)

    async def close(self) -> None:
        """End all sessions and all channels."""
        for session in list(self._by_id.values()):
            await session.close()
        await self.dialer.close()

    def _watch(self, channel: Channel) -> None:
        """Tell sessions of a channel's end, by one callback for all that use it."""

        def ended(reason: asyncio.Future[str]) -> None:
            self._watched.discard(channel)
            for session in list(self._by_id.values()):
                session.inlet.on_ended(channel, reason.result())

        if channel not in self._watched:
            self._watched.add(channel)
            channel.ended.add_done_callback(ended)
