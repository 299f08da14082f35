"""Replays of pasts: sent from here to the next hops, and the confirmations that go back to the sender."""

import asyncio

from swarm.net.channel import Channel
from swarm.protocol.messages import Rebuilt, Replay
from swarm.protocol.replay import PastSender
from swarm.server.accounts import Accounts
from swarm.server.limits import HostedLimits
from swarm.server.refusals import Declined, send
from swarm.server.session import HostedSession


class Replays:
    """Those of all sessions of one server. Lives in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, accounts: Accounts, limits: HostedLimits) -> None:
        self._loop = loop
        self._accounts = accounts
        self._limits = limits

    def begin(self, session: HostedSession, request: Replay) -> Declined | None:
        """Send the next hops the past that they lack: once an epoch, and each epoch is charged. Returns why not."""
        history = session.history
        if request.epoch != session.seat.epoch or history.sender is not None:
            return None
        if history.journal is None:
            return Declined("bad_request", "there is no journal of this session")
        self._send_on(session, history.replay(history.journal, request))
        return None

    def confirmed(self, session: HostedSession, message: Rebuilt) -> bool:
        """Note how much of the past the next hops have. Returns whether that is news.

        The replay's next pieces go out; a hop that passes the past on confirms it to the hop before.
        """
        stop = session.history.window.confirmed(message.stop)
        if stop is None:
            return False
        session.peers.used_at = self._loop.time()
        if session.history.sender is not None:
            self._send_on(session, session.history.sender)
        else:
            self.confirm(session, session.peers.source, stop)
        return True

    def confirm(self, session: HostedSession, channel: Channel | None, stop: int) -> None:
        """Say how much of the past is there, as soon as the owner's account has room for more."""
        if channel is None:
            return
        message = Rebuilt(session=session.id, epoch=session.seat.epoch, stop=stop)
        if (wait_s := self._accounts.of(session.owner.peer).debt_s(self._loop.time())) > 0:
            self._loop.call_later(wait_s, send, channel, message)
        else:
            send(channel, message)

    def _send_on(self, session: HostedSession, sender: PastSender) -> None:
        """Send as much of the past as the window has room for; the next confirmation brings the rest.

        Many sessions may replay to one hop: of them all together it gets as much as it reads soon.
        """
        # A reroute takes another sender, and none is left at the end.
        while session.history.sender is sender and session.peers.next is not None:
            if sender.window.is_full:
                return
            if session.peers.next.unsent_bytes > self._limits.replay_unread_bytes_max:
                self._loop.call_later(self._limits.replay_poll_s, self._send_on, session, sender)
                return
            piece = sender.take()
            if piece is None:
                session.history.end_replay()
                return
            send(session.peers.next, *piece)
