"""The direct carrier: TCP, by `asyncio.Protocol` (no streams: they cost a tenth of a millisecond a hop)."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Collection
from typing import cast

from swarm.activations import Activations
from swarm.errors import AddressInUse, BadConfiguration, Unreachable
from swarm.net.address import Tcp
from swarm.net.admission import Admission, source_of
from swarm.net.channel import Channel, OnMessage
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.gate import PROGRESS, Toll
from swarm.net.greeting import Proven
from swarm.net.halves import WORD, plain
from swarm.net.limits import DialerLimits, ListenerLimits
from swarm.net.rate import TokenBucket
from swarm.net.reach import literals, makes_sense
from swarm.protocol.messages import AnyMessage

InUse = Callable[[], Collection[str]]
"""Peers whose channels may be silent for long."""


class TcpCarrier(asyncio.Protocol):
    """Carries one channel over one connection."""

    write: Callable[[bytes], None]
    unsent_bytes: Callable[[], int]

    def __init__(self, make_channel: "Callable[[TcpCarrier], Channel]", way: str = "direct") -> None:
        self.way = way
        self._make_channel = make_channel
        self._transport: asyncio.Transport | None = None
        self.channel: Channel | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the channel."""
        self._transport = connected = cast(asyncio.Transport, transport)  # uvloop's own are no subclass of it
        # The transport's own methods: a step is written, and asked after, several times.
        self.write, self.unsent_bytes = connected.write, connected.get_write_buffer_size
        _keep_little_in_the_kernel(transport.get_extra_info("socket"))
        self.channel = self._make_channel(self)

    def data_received(self, data: bytes) -> None:
        """Hand bytes to the channel."""
        assert self.channel is not None
        self.channel.receive(data)

    def eof_received(self) -> bool:
        """End both directions."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the channel, and whether the peer or the network ended it."""
        if self.channel is not None:
            ended_by_peer = exc is None or isinstance(exc, ConnectionResetError | BrokenPipeError)
            why = str(exc) if exc is not None else "the other side ended it"
            self.channel.lost(why, unreachable=not ended_by_peer)

    # Carrier

    def close(self) -> None:
        """As `Carrier.close`."""
        assert self._transport is not None
        self._transport.close()
        if self._transport.get_write_buffer_size():
            patience_s = 5.0  # for the peer to read the last bytes
            asyncio.get_running_loop().call_later(patience_s, self._transport.abort)

    def abort(self) -> None:
        """As `Carrier.abort`."""
        assert self._transport is not None
        self._transport.abort()

    def pause_reading(self) -> None:
        """As `Carrier.pause_reading`."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As `Carrier.resume_reading`."""
        assert self._transport is not None
        self._transport.resume_reading()


class Listener:
    """Accepts channels on one address, as `Admission` decides."""

    def __init__(
        self,
        me: Endpoint,
        host: str,
        port: int,
        flow: FlowControl | None = None,
        limits: ListenerLimits | None = None,
    ) -> None:
        """Take the address, so that nothing else can; port 0 picks one, and `address` says which.

        flow: shared with the channels that this side dials. Raises AddressInUse and BadConfiguration.
        """
        import resource  # noqa: PLC0415 - not on Windows, and no client listens

        self.flow = flow or FlowControl()
        self._me, self._limits = me, limits or ListenerLimits()
        self._socket = bound(host, port)
        channels_max = min(self._limits.channels_max, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.admission: Admission[Channel] = Admission(self._limits, channels_max)  # has the accepted channels
        self._accepts = TokenBucket(self._limits.accepts_per_s, self._limits.accepts_burst)
        self._arriving: set[asyncio.Task[None]] = set()
        self._listens = False
        self._sweeper: asyncio.Task[None] | None = None
        self._on_message: OnMessage | None = None  # while it accepts
        self._in_use: InUse | None = None
        self.on_half: Callable[[socket.socket], None] | None = None  # takes connections that are no channel
        self._hosts: dict[Channel, str] = {}
        name = self._socket.getsockname()
        self.address = Tcp(name[0], name[1])

    async def start(self, on_message: OnMessage, in_use: InUse | None = None) -> None:
        """Accept from now on, or again after a pause. Raises AddressInUse if another process has just listened there.

        in_use: without it every channel may be silent for long.
        """
        self._on_message, self._in_use = on_message, in_use
        if self._listens:
            return
        try:
            self._socket.listen(self._limits.backlog)
        except OSError as error:
            raise AddressInUse(str(self.address), error.strerror or str(error)) from None
        self._socket.setblocking(False)
        self._sweeper = asyncio.create_task(self._sweep())
        self._listens = True
        self._accept_more()

    def adopt(self, sock: socket.socket, way: str) -> None:
        """Take a connection that this side or an anchor has made, as if it had been accepted here."""
        self._let_in(sock, way)

    def host_of(self, channel: Channel) -> str:
        """Return the address from which an accepted channel comes; "" for one that was not accepted here."""
        return self._hosts.get(channel, "")

    def pause(self) -> None:
        """End every accepted channel and keep the address; until the next start, connections are closed at once."""
        self._on_message, self._in_use = None, None  # the owner before can be forgotten
        for channel in list(self.admission.channels):
            channel.close()

    async def close(self) -> None:
        """Stop listening and end every accepted channel."""
        if self._listens:
            self._listens = False
            asyncio.get_running_loop().remove_reader(self._socket)
        tasks = [*self._arriving, *([self._sweeper] if self._sweeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        for channel in list(self.admission.channels):
            channel.close()

    # Connections

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
        if self._on_message is None or len(self._arriving) >= self._limits.handshakes.unproven_max:
            sock.close()
            return
        task = asyncio.create_task(self._receive(sock, way))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _make_room(self) -> bool:
        in_use = self._in_use() if self._in_use is not None else ()
        entry = self.admission.make_room(len(self._arriving) - 1, in_use)  # this one is on its way in, too
        if entry.ends is not None:
            entry.ends.cut_off("there are too many channels, and most of them come from where this one does")
        return entry.stays

    async def _receive(self, sock: socket.socket, way: str) -> None:
        """Begin the handshake when it is its turn."""
        loop, taken = asyncio.get_running_loop(), False
        try:
            sock.setblocking(False)
            if way == "direct" and self.on_half is not None and await self._brings_half(sock):
                taken = True
                self.on_half(sock)
                return
            host = plain(sock.getpeername()[0])
            turn_s = self.admission.turns.wait_s(source_of(host), loop.time())
            if turn_s is None or not self._make_room():
                return
            await asyncio.sleep(turn_s)
            taken = True
            await loop.connect_accepted_socket(
                lambda: TcpCarrier(lambda carrier: self._channel(carrier, host), way), sock
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
        channel = Channel(carrier, self._me, self._on_message or _refuse, flow=self.flow)
        self._hosts[channel] = host
        oldest = self.admission.begin(channel, source_of(host))
        if oldest is not None:
            oldest.cut_off("too many connections that prove nothing")
        deadline = asyncio.get_running_loop().call_later(self._limits.handshakes.timeout_s, _expire, channel)

        def greeted(ready: asyncio.Future[Proven]) -> None:
            deadline.cancel()
            self.admission.greeted(channel)
            if channel.proven and not channel.closed:
                self._admit(channel, ready.result().process_key)

        channel.ready.add_done_callback(greeted)
        channel.ended.add_done_callback(lambda _: self._forget(channel))
        return channel

    def _forget(self, channel: Channel) -> None:
        self.admission.forget(channel)
        self._hosts.pop(channel, None)

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
            if self._in_use is not None:
                for channel in self.admission.idle(loop.time(), self._in_use()):
                    channel.close()


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


async def dial(
    address: Tcp,
    remote: Remote,
    me: Endpoint,
    on_message: OnMessage,
    flow: FlowControl | None = None,
    limits: DialerLimits | None = None,
) -> Channel:
    """Connect and prove both sides' identities.

    Raises Unreachable, HandshakeFailed or ProtocolMismatch within `limits.timeout_s`.
    """

    async def connect(carrier: Callable[[], TcpCarrier]) -> None:
        host = await _sensible(address, me.public)
        await asyncio.get_running_loop().create_connection(carrier, host, address.port)

    return await _proven(connect, str(address), "direct", remote, me, on_message, flow, limits)


async def dial_on(
    sock: socket.socket,
    way: str,
    remote: Remote,
    me: Endpoint,
    on_message: OnMessage,
    flow: FlowControl | None = None,
    limits: DialerLimits | None = None,
) -> Channel:
    """As `dial`, over a connection that is there already. It is closed where that fails."""

    async def connect(carrier: Callable[[], TcpCarrier]) -> None:
        try:
            await asyncio.get_running_loop().create_connection(carrier, sock=sock)
        except BaseException:
            sock.close()
            raise

    return await _proven(connect, f"a {way} connection", way, remote, me, on_message, flow, limits)


async def _proven(
    connect: "Callable[[Callable[[], TcpCarrier]], Awaitable[None]]",
    where: str,
    way: str,
    remote: Remote,
    me: Endpoint,
    on_message: OnMessage,
    flow: FlowControl | None,
    limits: DialerLimits | None,
) -> Channel:
    timeout_s = (limits or DialerLimits()).timeout_s
    carrier = TcpCarrier(lambda carrier: Channel(carrier, me, on_message, remote, flow), way)
    connected = False
    try:
        async with asyncio.timeout(timeout_s):
            await connect(lambda: carrier)
            assert carrier.channel is not None
            await asyncio.shield(carrier.channel.ready)
            connected = True
            return carrier.channel
    except TimeoutError:
        raise Unreachable(remote.peer, (where,), timeout_s) from None
    except (OSError, ValueError) as error:
        raise Unreachable(remote.peer, (where,), 0.0, str(error)) from None
    finally:
        if carrier.channel is not None and not connected:  # proven, too: the caller was cancelled in that moment
            carrier.channel.close()


async def _sensible(address: Tcp, public: bool) -> str:
    """Return the host to dial: in a public swarm the resolved address, so that the one dialled is the one checked."""
    host = (await literals(address.host, address.port))[0] if public else address.host
    if not makes_sense(host, public):
        raise OSError(f"{host} makes no sense as an address of {'a public' if public else 'any'} swarm")
    return host


def _keep_little_in_the_kernel(sock: socket.socket) -> None:
    """Let the kernel take only bytes that it can send soon: `unsent_bytes` then tells whether they get through."""
    notsent_lowat = {"linux": 25, "darwin": 0x201}.get(sys.platform)  # TCP_NOTSENT_LOWAT
    if notsent_lowat is not None:
        sock.setsockopt(socket.IPPROTO_TCP, notsent_lowat, 128 * 1024)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the address but does not listen yet."""
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except socket.gaierror as error:
        raise BadConfiguration(f"--listen {host}:{port}", error.strerror or str(error)) from None
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise AddressInUse(f"{host}:{port}", getattr(error, "strerror", None) or str(error)) from None
    return sock
