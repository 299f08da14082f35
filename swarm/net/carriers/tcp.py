"""The direct carrier: TCP, by `asyncio.Protocol` (no streams: they cost a tenth of a millisecond a hop)."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import cast

from swarm.errors import Unreachable
from swarm.net.address import Tcp
from swarm.net.channel import Channel, OnMessage
from swarm.net.congestion import set_congestion_control
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.halves import plain
from swarm.net.limits import DialerLimits
from swarm.net.reach import literals, makes_sense


class TcpCarrier(asyncio.Protocol):
    """Carries one channel over one connection."""

    write: Callable[[bytes], None]
    unsent_bytes: Callable[[], int]

    def __init__(self, make_channel: "Callable[[TcpCarrier], Channel]", way: str = "direct") -> None:
        self.way, self.host = way, ""
        self._make_channel = make_channel
        self._transport: asyncio.Transport | None = None
        self.channel: Channel | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the channel."""
        self._transport = connected = cast(asyncio.Transport, transport)  # uvloop's own are no subclass of it
        # The transport's own methods: a step is written, and asked after, several times.
        self.write, self.unsent_bytes = connected.write, connected.get_write_buffer_size
        name = transport.get_extra_info("peername")  # None: the other side has gone already
        self.host = plain(name[0]) if name else ""
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
        await _carry(await _connected(host, address.port), carrier)

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
        await _carry(sock, carrier)

    return await _proven(connect, f"a {way} connection", way, remote, me, on_message, flow, limits)


async def _carry(sock: socket.socket, carrier: Callable[[], TcpCarrier]) -> None:
    """Let a carrier have a connection, which is closed where that fails.

    Not by `create_connection`: a carrier whose channel fails at once has uvloop close the descriptor then, and once
    more when `sock` ends; it may be another connection's by that time.
    """
    try:
        await asyncio.get_running_loop().connect_accepted_socket(carrier, sock)
    except BaseException:
        sock.close()
        raise


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


async def _connected(host: str, port: int) -> socket.socket:
    """Connect to the first of a host's addresses that answers. Raises OSError."""
    loop, failure = asyncio.get_running_loop(), OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            set_congestion_control(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _keep_little_in_the_kernel(sock: socket.socket) -> None:
    """Let the kernel take only bytes that it can send soon: `unsent_bytes` then tells whether they get through."""
    notsent_lowat = {"linux": 25, "darwin": 0x201}.get(sys.platform)  # TCP_NOTSENT_LOWAT
    if notsent_lowat is not None:
        sock.setsockopt(socket.IPPROTO_TCP, notsent_lowat, 128 * 1024)
