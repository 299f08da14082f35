"""The sessions of one server by name, and how each ends."""

import asyncio

import structlog

from swarm.net.channel import Channel
from swarm.protocol.messages import Leaving
from swarm.server.links import Links, complain
from swarm.server.parked import Parked
from swarm.server.refusals import send
from swarm.server.session import HostedSession

_log = structlog.get_logger("swarm.server")


class Registry:
    """All sessions. Lives in the event loop."""

    def __init__(self, links: Links) -> None:
        self.sessions: dict[str, HostedSession] = {}
        self.parked = Parked()
        self._links = links
        links.on_ended.append(self.channel_ended)
        self._ended = asyncio.Event()
        self._freed = False  # whether one has ended since `take_freed` was last called

    def owned(self, channel: Channel, name: str) -> HostedSession | None:
        """Return the session of this name if the channel controls it."""
        session = self.sessions.get(name)
        return session if session is not None and session.owner is channel else None

    def of(self, peer: str) -> list[HostedSession]:
        """Return the sessions that a peer has opened."""
        return [session for session in self.sessions.values() if session.owner.peer == peer]

    def add(self, session: HostedSession) -> None:
        """Hold a session, in the place of one of the same name."""
        if session.id in self.sessions:
            self.end(self.sessions[session.id])
        self.sessions[session.id] = session
        self._links.watch(session.owner)
        _log.info("session opened", session=session.id[:8], owner=session.owner.peer, sessions=len(self.sessions))

    def end(self, session: HostedSession) -> None:
        """End a session, and give back what it holds."""
        session.end()
        del self.sessions[session.id]
        self._links.release_next(session)
        self._ended.set()
        self._freed = True
        _log.info("session ended", session=session.id[:8], sessions=len(self.sessions))

    def fail(self, session: HostedSession, step: int | None, why: str) -> None:
        """End a session that cannot go on here, and tell its owner."""
        complain(session, step, "self", why)
        self.end(session)

    def fail_all(self, why: str) -> None:
        """End every session, and tell the owners."""
        for session in list(self.sessions.values()):
            self.fail(session, None, why)

    def channel_ended(self, channel: Channel, why: str) -> None:
        """End the sessions of an owner's channel; of those that it connects to the next hop, tell the owners."""
        for session in list(self.sessions.values()):
            if session.owner is channel:
                self.end(session)
            elif session.peers.next is channel:
                session.peers.next = None
                complain(session, None, "next", f"the connection to the next hop ended: {why}")

    async def drain(self, within_s: float) -> None:
        """Ask all owners to move their sessions. Returns when none is left, or after `within_s`."""
        for session in list(self.sessions.values()):
            send(session.owner, Leaving(session=session.id, epoch=session.seat.epoch))
        try:
            async with asyncio.timeout(within_s):
                while self.sessions:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            _log.warning("still has sessions, whose clients found no other server", sessions=len(self.sessions))

    def take_freed(self) -> bool:
        """Return whether a session has ended since this was last called."""
        freed, self._freed = self._freed, False
        return freed
