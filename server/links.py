"""The channels between a session and its neighbours: opening one to the next hop, releasing it, learning of ends."""

import asyncio
from collections.abc import Callable

from swarm.dht.records import Announcement
from swarm.errors import NetworkError
from swarm.net.channel import Channel
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from swarm.protocol.base import TEXT_MAX, Message
from swarm.protocol.messages import Blame, Failed
from swarm.server.refusals import send
from swarm.server.session import HostedSession


class Links:
    """Those of all sessions of one server. Lives in the event loop."""

    def __init__(self, dialer: Dialer) -> None:
        self.dialer = dialer
        self.openings: set[asyncio.Task[None]] = set()  # to next hops
        self.on_ended: list[Callable[[Channel, str], None]] = []  # called with a watched channel and why it has ended
        self.on_connected: list[Callable[[HostedSession], None]] = []  # called when a session has its next hop
        self._watched: set[Channel] = set()

    def connect(self, session: HostedSession, following: Announcement | None, then: Message) -> None:
        """Connect to the next hop if there is one; then send `then` to the owner."""
        self.release_next(session)
        if following is None:
            session.peers.next = session.owner if session.seat.has_next else None
            send(session.owner, then)
            return
        task = asyncio.create_task(self._connect_next(session, session.seat.epoch, following, then))
        self.openings.add(task)
        task.add_done_callback(self.openings.discard)

    async def _connect_next(self, session: HostedSession, epoch: int, record: Announcement, then: Message) -> None:
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            channel = await self.dialer.connect(remote, record.ways)
        except NetworkError as error:
            if not session.tenure.over and session.seat.epoch == epoch:
                complain(session, None, "next", str(error))
            return
        if session.tenure.over or session.seat.epoch != epoch:
            self.dialer.release(channel)
            return
        session.peers.next = channel
        self.watch(channel)
        send(session.owner, then)
        for tell in self.on_connected:
            tell(session)

    def release_next(self, session: HostedSession) -> None:
        """Use the channel to the next hop no more. The owner's, who relays, was not opened by this side."""
        following, session.peers.next = session.peers.next, None
        if following is not None and following is not session.owner:
            self.dialer.release(following)

    def watch(self, channel: Channel) -> None:
        """Learn of a channel's end, once for all sessions that use it."""
        if channel not in self._watched:
            self._watched.add(channel)
            channel.ended.add_done_callback(lambda ended: self._ended(channel, ended.result()))

    def _ended(self, channel: Channel, why: str) -> None:
        self._watched.discard(channel)
        for tell in self.on_ended:
            tell(channel, why)

    def cancel(self) -> None:
        """Open no more channels."""
        for task in self.openings:
            task.cancel()


def complain(session: HostedSession, step: int | None, blame: Blame, why: str) -> None:
    """Tell the owner that the session does not go on; this hop keeps what it has of it."""
    send(
        session.owner,
        Failed(session=session.id, epoch=session.seat.epoch, step=step, blame=blame, why=why[:TEXT_MAX]),
    )
