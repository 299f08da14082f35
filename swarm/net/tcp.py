"""The direct carrier: TCP, by `asyncio.Protocol` (no streams: they cost a tenth of a millisecond a hop)."""

import asyncio
import errno
import socket
from collections.abc import Callable

from swarm.errors import AddressInUse, BadConfiguration, Unreachable
from swarm.net.channel import Channel, OnMessage, Remote, Self

HANDSHAKE_TIMEOUT_S = 10.0  # for whoever connects
DIAL_TIMEOUT_S = 10.0  # connection and handshake together
HANDSHAKES_MAX = 256  # connections that have not proven who they are
CHANNELS_MAX = 4096


class _TcpCarrier(asyncio.Protocol):
    """Carries one channel over one connection."""

    def __init__(self, make_channel: "Callable[[_TcpCarrier], Channel]") -> None:
        self._make_channel = make_channel
        self._transport: asyncio.Transport | None = None
        self.channel: Channel | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.channel = self._make_channel(self)

    def data_received(self, data: bytes) -> None:
        assert self.channel is not None
        self.channel.receive(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.channel is not None:
            self.channel.lost(str(exc) if exc is not None else "the other side ended it")

    # Carrier

    def write(self, data: bytes | bytearray) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def unsent_bytes(self) -> int:
        assert self._transport is not None
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


class Listener:
    """Accepts channels on one address."""

    def __init__(self, me: Self, on_message: OnMessage) -> None:
        self._me = me
        self._on_message = on_message
        self._server: asyncio.Server | None = None
        self._channels: set[Channel] = set()
        self._shaking = 0
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 picks one, and `address` says which. Raises AddressInUse and BadConfiguration."""
        try:
            self._server = await asyncio.get_running_loop().create_server(self._accept, host, port)
        except socket.gaierror as error:
            raise BadConfiguration(f"--listen {host}:{port}", error.strerror or str(error)) from None
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}:
                raise AddressInUse(f"{host}:{port}", error.strerror or str(error)) from None
            raise
        name = self._server.sockets[0].getsockname()
        self.address = (name[0], name[1])

    async def close(self) -> None:
        """Stop listening and end every accepted channel."""
        if self._server is not None:
            self._server.close()
        for channel in list(self._channels):
            channel.close()

    def _accept(self) -> _TcpCarrier:
        return _TcpCarrier(self._channel)

    def _channel(self, carrier: _TcpCarrier) -> Channel:
        channel = Channel(carrier, self._me, self._on_message)
        if self._shaking >= HANDSHAKES_MAX or len(self._channels) >= CHANNELS_MAX:
            channel.close()
            return channel
        self._shaking += 1
        self._channels.add(channel)
        deadline = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._expire, channel)

        def shaken(_: asyncio.Future[None]) -> None:
            self._shaking -= 1
            deadline.cancel()

        channel.ready.add_done_callback(shaken)
        channel.ended.add_done_callback(lambda _: self._channels.discard(channel))
        return channel

    @staticmethod
    def _expire(channel: Channel) -> None:
        if not channel.ready.done():
            channel.close()


async def dial(address: str, remote: Remote, me: Self, on_message: OnMessage) -> Channel:
    """Connect to "host:port" and prove both sides' identities.

    Raises Unreachable, HandshakeFailed or ProtocolMismatch within DIAL_TIMEOUT_S.
    """
    host, _, port = address.rpartition(":")
    carrier = _TcpCarrier(lambda carrier: Channel(carrier, me, on_message, remote))
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await asyncio.get_running_loop().create_connection(lambda: carrier, host.strip("[]"), int(port))
            assert carrier.channel is not None
            await asyncio.shield(carrier.channel.ready)
            return carrier.channel
    except TimeoutError:
        raise Unreachable(remote.peer, (address,), DIAL_TIMEOUT_S) from None
    except (OSError, ValueError) as error:
        raise Unreachable(remote.peer, (address,), 0.0, str(error)) from None
    finally:
        if carrier.channel is not None and not carrier.channel.proven:
            carrier.channel.close()
