"""Channels that this side opened: one for each peer, shared by all who need it, ended when nobody does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import ChannelClosed, NetworkError, Unreachable
from swarm.net.channel import Channel, OnMessage, Remote, Self
from swarm.net.tcp import dial

PEERS_MAX = 1024
IDLE_S = 60.0  # an unused channel waits so long for the next session
ADDRESSES_TRIED = 4

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

    async def connect(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        """Return the channel to a peer, opening it if need be; whoever calls this calls `release` in the end.

        addresses: "host:port", tried in this order. Raises NetworkError.
        """
        task = self._dials.get(remote)
        if task is None:
            if len(self._dials) >= PEERS_MAX:
                raise Unreachable(remote.peer, tuple(addresses), 0.0, f"already connected to {PEERS_MAX} peers")
            task = self._dials[remote] = asyncio.create_task(self._dial(remote, addresses))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have gone
        channel = await asyncio.shield(task)
        if channel.closed:
            raise ChannelClosed(remote.peer, channel.ended.result())
        self._users[channel] = self._users.get(channel, 0) + 1
        return channel

    def release(self, channel: Channel) -> None:
        """Tell that one user is done with a channel."""
        if channel not in self._users:
            return  # it has ended already
        self._users[channel] -= 1
        if self._users[channel] == 0:
            asyncio.get_running_loop().call_later(IDLE_S, self._close_if_idle, channel)

    async def close(self) -> None:
        """End all channels and all attempts."""
        tasks = list(self._dials.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in list(self._users):
            channel.close()

    async def _dial(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        try:
            channel = await self._first(remote, addresses)
        except BaseException:
            self._dials.pop(remote, None)
            raise
        self._users.setdefault(channel, 0)
        dialled = self._dials[remote]

        def forget(_: asyncio.Future[str]) -> None:
            del self._users[channel]
            if self._dials.get(remote) is dialled:
                del self._dials[remote]

        channel.ended.add_done_callback(forget)
        asyncio.get_running_loop().call_later(IDLE_S, self._close_if_idle, channel)  # whoever asked may have gone
        return channel

    async def _first(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        error: NetworkError = Unreachable(remote.peer, tuple(addresses), 0.0, "it announces no address")
        for address in addresses[:ADDRESSES_TRIED]:
            try:
                return await self._dial_one(address, remote, self._me, self._on_message)
            except NetworkError as failed:
                error = failed
        raise error

    def _close_if_idle(self, channel: Channel) -> None:
        if self._users.get(channel) == 0:
            channel.close()
