"""One TCP connection as a carrier, by `asyncio.Protocol` (no streams: they cost a tenth of a millisecond a hop)."""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import cast

from swarm.net.channel import Channel
from swarm.net.halves import plain


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
        if self._transport is not None:
            close(self._transport)

    def abort(self) -> None:
        """As `Carrier.abort`."""
        if self._transport is not None:
            self._transport.abort()

    def give(self, protocol: asyncio.BaseProtocol) -> asyncio.Transport:
        """Let a protocol have the connection, which ends the channel and nothing else. Returns the transport."""
        assert self._transport is not None
        assert self.channel is not None
        transport, self._transport = self._transport, None
        transport.set_protocol(protocol)
        self.channel.lost("its connection goes on as another channel's")
        return transport

    def pause_reading(self) -> None:
        """As `Carrier.pause_reading`."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As `Carrier.resume_reading`."""
        assert self._transport is not None
        self._transport.resume_reading()


def close(transport: asyncio.Transport) -> None:
    """Send the waiting bytes, as far as the peer reads them soon, then end."""
    transport.close()
    if transport.get_write_buffer_size():
        patience_s = 5.0  # for the peer to read the last bytes
        asyncio.get_running_loop().call_later(patience_s, transport.abort)


def _keep_little_in_the_kernel(sock: socket.socket) -> None:
    """Let the kernel take only bytes that it can send soon: `unsent_bytes` then tells whether they get through."""
    notsent_lowat = {"linux": 25, "darwin": 0x201}.get(sys.platform)  # TCP_NOTSENT_LOWAT
    if notsent_lowat is not None:
        sock.setsockopt(socket.IPPROTO_TCP, notsent_lowat, 128 * 1024)
