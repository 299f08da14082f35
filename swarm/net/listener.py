"""Accepts connections: channels of peers that prove themselves, and halves of meetings."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection

from swarm.activations import Activations
from swarm.net.address import Tcp
from swarm.net.admission import Admission, source_of
from swarm.net.carriers.connection import TcpCarrier
from swarm.net.carriers.movable import carrier_of
from swarm.net.channel import Channel, OnMessage
from swarm.net.congestion import set_congestion_control
from swarm.net.crowd import Crowd
from swarm.net.endpoint import Endpoint
from swarm.net.flow import FlowControl
from swarm.net.gate import PROGRESS, Toll
from swarm.net.greeting import Proven
from swarm.net.halves import WORD, plain
from swarm.net.limits import ListenerLimits
from swarm.net.ports import Port, listening
from swarm.net.rate import TokenBucket
from swarm.net.turns import TurnQueue
from swarm.protocol.messages import AnyMessage

InUse = Callable[[], Collection[str]]
"""Peers whose channels may be silent for long."""


class Listener:
    """Accepts channels on one address, as `Admission` decides."""

    def __init__(
        self,
        me: Endpoint,
        host: str,
        port: Port,
        flow: FlowControl | None = None,
        limits: ListenerLimits | None = None,
    ) -> None:
        """Take the address, so that nothing else can; `address` says which port it is. Until the start it is paused.

        flow: shared with the channels that this side dials. Raises AddressInUse and BadConfiguration.
        """
        import resource  # noqa: PLC0415 - not on Windows, and no client listens

        self.flow = flow or FlowControl()
        self._me, self._limits = me, limits or ListenerLimits()
        self._socket = listening(host, port, self._limits.backlog)
        set_congestion_control(self._socket)  # those that are accepted have it, too: also halves
        self._socket.setblocking(False)
        channels_max = min(self._limits.channels_max, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.admission: Admission[Channel] = Admission(self._limits, channels_max)  # has the accepted channels
        self._turns = TurnQueue(self._limits.handshakes)
        self._accepts = TokenBucket(self._limits.accepts_per_s, self._limits.accepts_burst)
        self._arriving = Crowd()
        self._sweeper: asyncio.Task[None] | None = None
        self._owner: tuple[OnMessage, InUse | None] | None = None  # while it accepts
        self.on_half: Callable[[socket.socket], None] | None = None  # takes connections that are no channel
        name = self._socket.getsockname()
        self.address = Tcp(name[0], name[1])
        self._accept_more()

    async def start(self, on_message: OnMessage, in_use: InUse | None = None) -> None:
        """Let channels in from now on, or again after a pause.

        in_use: without it every channel may be silent for long.
        """
        self._owner = on_message, in_use
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())

    def adopt(self, sock: socket.socket, way: str) -> None:
        """Take a connection that this side or an anchor has made, as if it had been accepted here."""
        self._let_in(sock, way)

    def pause(self) -> None:
        """End every accepted channel and keep the address; until the next start, connections are closed at once."""
        self._owner = None
        for channel in list(self.admission.channels):
            channel.close()

    async def close(self) -> None:
        """Stop listening and end every accepted channel."""
        if self._listens:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        tasks = [*self._arriving, *([self._sweeper] if self._sweeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in list(self.admission.channels):
            channel.close()

    # Connections

    @property
    def _listens(self) -> bool:
        return self._socket.fileno() != -1

    def _accept_more(self) -> None:
        if self._listens:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Take one connection from the kernel, and then as few as the rate says."""
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            wait_s = self._limits.no_descriptors_s
        else:
            wait_s = self._accepts.owe(loop.time())
            self._let_in(sock, "direct")
        if wait_s > 0:
            loop.remove_reader(self._socket)
            loop.call_later(wait_s, self._accept_more)

    def _let_in(self, sock: socket.socket, way: str) -> None:
        try:
            source = source_of(plain(sock.getpeername()[0]))
        except OSError:  # it has gone meanwhile
            source = ""
        if self._owner is None or not source:
            sock.close()
            return
        self._arriving.add(self._receive(sock, way), source, self._limits.handshakes.unproven_max)

    def _make_room(self) -> bool:
        in_use = self._used() or ()
        entry = self.admission.make_room(len(self._arriving) - 1, in_use)  # this one is on its way in, too
        if entry.ends is not None:
            entry.ends.cut_off("there are too many channels, and most of them come from where this one does")
        return entry.stays

    async def _receive(self, sock: socket.socket, way: str) -> None:
        """Begin the handshake when it is its turn."""
        loop, taken = asyncio.get_running_loop(), False
        try:
            sock.setblocking(False)
            on_half = self.on_half if way == "direct" else None
            if on_half is not None or way != "direct":  # one that an anchor led to takes no turn until it speaks
                brings_half = await self._brings_half(sock)
                if on_half is not None and brings_half:
                    taken = True
                    on_half(sock)
                    return
            host = plain(sock.getpeername()[0])
            if not await self._turns.wait(source_of(host)) or not self._make_room():
                return
            taken = True
            await loop.connect_accepted_socket(
                lambda: carrier_of(lambda carrier: self._channel(carrier, host), way), sock
            )
        except OSError:  # it has gone meanwhile
            taken = False
        finally:
            if not taken:
                sock.close()

    async def _brings_half(self, sock: socket.socket) -> bool:
        """Whether a connection is a half and no channel: its first byte tells. Raises OSError if it says nothing."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.first_byte_s):
                while True:
                    with contextlib.suppress(BlockingIOError):
                        return sock.recv(1, socket.MSG_PEEK) == WORD[:1]
                    readable = loop.create_future()
                    loop.add_reader(sock, _settle, readable)
                    try:
                        await readable
                    finally:
                        loop.remove_reader(sock)
        except TimeoutError:
            raise OSError("it says nothing") from None

    def _channel(self, carrier: TcpCarrier, host: str) -> Channel:
        channel = Channel(carrier, self._me, self._owner[0] if self._owner is not None else _refuse, flow=self.flow)
        oldest = self.admission.begin(channel, source_of(host))
        if oldest is not None:
            oldest.cut_off("too many connections that prove nothing")
        deadline = asyncio.get_running_loop().call_later(self._limits.handshakes.timeout_s, _expire, channel)

        def greeted(ready: asyncio.Future[Proven]) -> None:
            deadline.cancel()
            self.admission.greeted(channel)
            if ready.exception() is None and not channel.closed:
                self._admit(channel, ready.result().process_key)

        channel.ready.add_done_callback(greeted)
        channel.ended.add_done_callback(lambda _: self.admission.forget(channel))
        return channel

    def _admit(self, channel: Channel, process: bytes) -> None:
        entry = self.admission.prove(channel, process)
        if entry.ends is not None:
            entry.ends.cut_off("its peer has opened too many others since")
        if not entry.stays:
            channel.close()

    async def _sweep(self) -> None:
        """End the channels that are not read at the other side, and those that are silent and not in use, for ever."""
        loop, sent = asyncio.get_running_loop(), dict[Channel, int]()
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            before, sent = sent, {}
            for channel in list(self.admission.channels):
                sent[channel] = channel.sent_bytes
                if channel.unsent_bytes and channel.sent_bytes <= before.get(channel, 0):
                    channel.cut_off("the peer does not read the bytes that wait for it")
            used = self._used()
            if used is not None:
                for channel in self.admission.idle(loop.time(), used):
                    channel.close()

    def _used(self) -> Collection[str] | None:
        """Return the peers whose channels may be silent for long; None: all of them."""
        in_use = self._owner[1] if self._owner is not None else None
        return in_use() if in_use is not None else None


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _expire(channel: Channel) -> None:
    if not channel.ready.done():
        channel.close()


def _refuse(channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
    """Take a message while the listener is paused."""
    del message, activations
    channel.close()
    return PROGRESS
