"""Channels that this side opened: one for each peer, shared by all that need it, ended when none does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from swarm.errors import ChannelClosed, Unreachable
from swarm.net.address import Address, Tcp, ViaAnchor
from swarm.net.carriers import tcp
from swarm.net.channel import Channel, OnMessage
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.limits import DialerLimits
from swarm.net.race import race

Dial = Callable[[Address, Remote, Endpoint, OnMessage], Awaitable[Channel]]
"""`await dial(address, remote, me, on_message)`: a proven channel. Raises NetworkError."""


def directly(flow: FlowControl, limits: DialerLimits) -> Dial:
    """Return a Dial that connects by TCP, and to no hidden peer."""

    async def by_tcp(address: Address, remote: Remote, me: Endpoint, on_message: OnMessage) -> Channel:
        if not isinstance(address, Tcp):
            raise Unreachable(remote.peer, (str(address),), 0.0, "it is behind a router, and this side asks no anchors")
        return await tcp.dial(address, remote, me, on_message, flow, limits)

    return by_tcp


class Dialer:
    """Opens and shares channels. Lives in the event loop."""

    def __init__(
        self,
        me: Endpoint,
        on_message: OnMessage,
        dial: Dial | None = None,
        *,
        flow: FlowControl | None = None,
        limits: DialerLimits | None = None,
    ) -> None:
        """dial: by TCP unless given. flow: shared with the channels of a listener."""
        self._limits = limits or DialerLimits()
        self._dial_one = dial or directly(flow or FlowControl(), self._limits)
        self._me = me
        self._on_message = on_message
        self._dials: dict[Remote, asyncio.Task[Channel]] = {}
        self._users: dict[Channel, int] = {}
        self._idle: dict[Channel, asyncio.TimerHandle] = {}  # that end the unused ones
        self._doubted: dict[Remote, Channel] = {}
        self._heard_at = float("-inf")  # on channels that have ended

    @property
    def heard_at(self) -> float:
        """When bytes last came on any channel, in the loop's time."""
        return max([self._heard_at, *(channel.heard_at for channel in self._users)])

    async def connect(self, remote: Remote, addresses: Sequence[Address]) -> Channel:
        """Return the channel to a peer, opening it if need be; the caller calls `release` in the end.

        addresses: tried in this order. Raises NetworkError.
        """
        task = self._dials.get(remote)
        if task is None:
            self._end_oldest_attempt()
            most = self._limits.peers_max
            if len(self._dials) >= most and not self._close_one_idle():
                raise Unreachable(remote.peer, _texts(addresses), 0.0, f"already connected to {most} peers")
            task = self._dials[remote] = asyncio.create_task(self._dial(remote, addresses))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its users may have gone
        try:
            channel = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled() or _is_cancelled():
                raise
            raise Unreachable(remote.peer, _texts(addresses), 0.0, "newer attempts took its place") from None
        if channel.closed:
            raise ChannelClosed(remote.peer, channel.ended.result())
        self._users[channel] = self._users.get(channel, 0) + 1
        self._stop_waiting(channel)
        return channel

    def has(self, remote: Remote) -> bool:
        """Whether there is a channel to this peer already, or one is being opened."""
        return remote in self._dials

    def release(self, channel: Channel) -> None:
        """Tell that one user is done with a channel."""
        if channel not in self._users:
            return  # it has ended already
        self._users[channel] -= 1
        self._rest(channel)

    def doubt(self, channel: Channel) -> None:
        """A channel does not answer: the next user gets it only if it answers before a new one is there.

        A connection that has lost packets for ten seconds may take as long to go on, when a new one is there at once;
        and a server that was busy may be so with strangers' connections, which come before a new one.
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

    async def _dial(self, remote: Remote, addresses: Sequence[Address]) -> Channel:
        old = self._doubted.get(remote)
        try:
            channel = await (self._first(remote, addresses) if old is None else self._renewed(old, remote, addresses))
        except BaseException:
            if self._dials.get(remote) is asyncio.current_task():
                del self._dials[remote]
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
        self._wait(channel)  # its users may have gone
        return channel

    async def _renewed(self, old: Channel, remote: Remote, addresses: Sequence[Address]) -> Channel:
        """Return a new channel, or the old one if that answers a ping first."""
        answer = asyncio.create_task(old.ping())
        fresh = asyncio.create_task(self._first(remote, addresses))
        chosen: Channel | None = None
        try:
            await asyncio.wait((answer, fresh), return_when=asyncio.FIRST_COMPLETED)
            if fresh.done() and fresh.exception() is not None:
                await asyncio.wait((answer,), timeout=self._limits.answer_s)
            chosen = old if _succeeded(answer) and not _succeeded(fresh) else await fresh
            return chosen
        finally:
            for task in (answer, fresh):
                task.cancel()
            if _succeeded(fresh) and fresh.result() is not chosen:
                fresh.result().close()

    async def _first(self, remote: Remote, addresses: Sequence[Address]) -> Channel:
        """Try the addresses in their order, each beside the ones before that are silent; the first that works wins."""
        limits = self._limits
        ways = [
            (
                limits.anchor_after_s if isinstance(address, ViaAnchor) else limits.address_after_s,
                partial(self._dial_one, address, remote, self._me, self._on_message),
            )
            for address in addresses[: limits.addresses_max]
        ]
        if not ways:
            raise Unreachable(remote.peer, (), 0.0, "it announces no address that can be dialled")
        return await (ways[0][1]() if len(ways) == 1 else race(ways, Channel.close))

    def _end_oldest_attempt(self) -> None:
        """Make room: addresses that never answer, which strangers name, must not keep others from connecting."""
        opening = [remote for remote, attempt in self._dials.items() if not attempt.done()]
        if len(opening) >= self._limits.opening_max:
            self._dials.pop(opening[0]).cancel()

    def _close_one_idle(self) -> bool:
        """Make room: end the channel that was opened first of the unused ones. Returns whether there is one."""
        idle = next((channel for channel, users in self._users.items() if users == 0 and not channel.closed), None)
        if idle is not None:
            idle.close()
        return idle is not None

    def _rest(self, channel: Channel) -> None:
        """Let an unused channel wait for its next user, or end it if another has replaced it.

        The other side takes only a few channels from one peer.
        """
        if self._users.get(channel) != 0:
            return
        if channel in self._doubted.values() or any(_made(attempt, channel) for attempt in self._dials.values()):
            self._wait(channel)
        else:
            channel.close()

    def _wait(self, channel: Channel) -> None:
        self._stop_waiting(channel)
        self._idle[channel] = asyncio.get_running_loop().call_later(self._limits.idle_s, self._end_unused, channel)

    def _stop_waiting(self, channel: Channel) -> None:
        if (timer := self._idle.pop(channel, None)) is not None:
            timer.cancel()

    def _end_unused(self, channel: Channel) -> None:
        del self._idle[channel]
        if self._users.get(channel) == 0:
            channel.close()


def _texts(addresses: Sequence[Address]) -> tuple[str, ...]:
    return tuple(map(str, addresses))


def _is_cancelled() -> bool:
    """Whether the task that runs now is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _made(attempt: "asyncio.Task[Channel]", channel: Channel) -> bool:
    """Whether it was this attempt that opened a channel."""
    return _succeeded(attempt) and attempt.result() is channel


def _succeeded(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
