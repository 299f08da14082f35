"""The direct carrier: TCP, by `asyncio.Protocol` (no streams: they cost a tenth of a millisecond a hop)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from swarm.errors import Unreachable
from swarm.net.address import Tcp
from swarm.net.carriers.connection import TcpCarrier
from swarm.net.carriers.movable import carrier_of
from swarm.net.channel import Channel, OnMessage
from swarm.net.congestion import set_congestion_control
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.limits import DialerLimits
from swarm.net.reach import literals, makes_sense


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
    carrier = carrier_of(lambda carrier: Channel(carrier, me, on_message, remote, flow), way)
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
