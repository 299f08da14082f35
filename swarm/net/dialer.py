"""Channels that this side opened: one for each peer, shared by all who need it, ended when nobody does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from swarm.errors import ChannelClosed, NetworkError, Unreachable
from swarm.net.channel import Channel, OnMessage, Remote, Self
from swarm.net.tcp import dial

PEERS_MAX = 1024
IDLE_S = 60.0  # an unused channel waits so long for the next session
ADDRESSES_TRIED = 4
ANSWER_S = 0.5  # for a doubted channel's sign of life, where there is no new one

Dial = Callable[[str, Remote, Self, OnMessage], Awaitable[Channel]]
"""`await dial(address, remote, me, on_message)`: a proven channel. Raises NetworkError."""


class Dialer:
    """Opens and shares channels. Lives in the event loop."""

    def __init__(self, me: Self, on_message: OnMessage, dial: Dial = dial) -> None:
        self._dial_one = dial
        self._me = me
        self._on_message = on_message
        self._dials: dict[Remote, asyncio.Task[Channel]] = {}
        self._users: dict[Channel, int] = {}
        self._idle: dict[Channel, asyncio.TimerHandle] = {}  # that end those that nobody uses
        self._doubted: dict[Remote, Channel] = {}
        self._heard_at = float("-inf")  # on channels that have ended

    @property
    def heard_at(self) -> float:
        """When bytes last came on any channel, in the loop's time."""
        return max([self._heard_at, *(channel.heard_at for channel in self._users)])

    async def connect(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        """Return the channel to a peer, opening it if need be; whoever calls this calls `release` in the end.

        addresses: "host:port", tried in this order. Raises NetworkError.
        """
        task = self._dials.get(remote)
        if task is None:
            if len(self._dials) >= PEERS_MAX and not self._close_one_idle():
                raise Unreachable(remote.peer, tuple(addresses), 0.0, f"already connected to {PEERS_MAX} peers")
            task = self._dials[remote] = asyncio.create_task(self._dial(remote, addresses))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have gone
        channel = await asyncio.shield(task)
        if channel.closed:
            raise ChannelClosed(remote.peer, channel.ended.result())
        self._users[channel] = self._users.get(channel, 0) + 1
        self._stop_waiting(channel)
        return channel

    def has(self, remote: Remote) -> bool:
        """Whether there is a channel to this peer already, or somebody opens one."""
        return remote in self._dials

    def release(self, channel: Channel) -> None:
        """Tell that one user is done with a channel."""
        if channel not in self._users:
            return  # it has ended already
        self._users[channel] -= 1
        self._rest(channel)

    def doubt(self, channel: Channel) -> None:
        """A channel gives no sign of life: whoever connects next gets it only if it does before a new one is there.

        A connection that has lost packets for ten seconds may take as long to go on, when a new one is there at once;
        and a server that was busy may be so with strangers whose connections come before a new one.
        """
        for remote, attempt in self._dials.items():
            if _made(attempt, channel):
                self._doubted[remote] = channel
                del self._dials[remote]
                return

    async def close(self) -> None:
        """End all channels and all attempts."""
        tasks = list(self._dials.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in list(self._users):
            channel.close()

    async def _dial(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        old = self._doubted.get(remote)
        try:
            channel = await (self._first(remote, addresses) if old is None else self._renewed(old, remote, addresses))
        except BaseException:
            self._dials.pop(remote, None)
            raise
        doubted = self._doubted.pop(remote, None)
        self._users.setdefault(channel, 0)
        if doubted is not None and doubted is not channel:
            self._rest(doubted)
        dialled = self._dials[remote]

        def forget(_: asyncio.Future[str]) -> None:
            self._users.pop(channel, None)
            self._heard_at = max(self._heard_at, channel.heard_at)
            self._stop_waiting(channel)
            if self._dials.get(remote) is dialled:
                del self._dials[remote]
            if self._doubted.get(remote) is channel:
                del self._doubted[remote]

        channel.ended.add_done_callback(forget)
        self._wait(channel)  # whoever asked may have gone
        return channel

    async def _renewed(self, old: Channel, remote: Remote, addresses: Sequence[str]) -> Channel:
        """Return a new channel, or the old one if that gives a sign of life first."""
        answer = asyncio.create_task(old.ping())
        fresh = asyncio.create_task(self._first(remote, addresses))
        try:
            await asyncio.wait((answer, fresh), return_when=asyncio.FIRST_COMPLETED)
            if fresh.done() and fresh.exception() is not None:
                await asyncio.wait((answer,), timeout=ANSWER_S)
            return old if _succeeded(answer) and not _succeeded(fresh) else await fresh
        finally:
            for task in (answer, fresh):
                task.cancel()

    async def _first(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        error: NetworkError = Unreachable(remote.peer, tuple(addresses), 0.0, "it announces no address")
        for address in addresses[:ADDRESSES_TRIED]:
            try:
                return await self._dial_one(address, remote, self._me, self._on_message)
            except NetworkError as failed:
                error = failed
        raise error

    def _close_one_idle(self) -> bool:
        """Make room: end the channel that was opened first of those that nobody uses. Returns whether there is one."""
        idle = next((channel for channel, users in self._users.items() if users == 0 and not channel.closed), None)
        if idle is not None:
            idle.close()
        return idle is not None

    def _rest(self, channel: Channel) -> None:
        """Perhaps nobody uses it now: then it waits for the next one who does, or ends if another has replaced it.

        The other side takes but a few channels from one peer.
        """
        if self._users.get(channel) != 0:
            return
        if channel in self._doubted.values() or any(_made(attempt, channel) for attempt in self._dials.values()):
            self._wait(channel)
        else:
            channel.close()

    def _wait(self, channel: Channel) -> None:
        self._stop_waiting(channel)
        self._idle[channel] = asyncio.get_running_loop().call_later(IDLE_S, self._end_unused, channel)

    def _stop_waiting(self, channel: Channel) -> None:
        if (timer := self._idle.pop(channel, None)) is not None:
            timer.cancel()

    def _end_unused(self, channel: Channel) -> None:
        del self._idle[channel]
        if self._users.get(channel) == 0:
            channel.close()


def _made(attempt: "asyncio.Task[Channel]", channel: Channel) -> bool:
    """Whether it was this attempt that opened a channel."""
    return _succeeded(attempt) and attempt.result() is channel


def _succeeded(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
