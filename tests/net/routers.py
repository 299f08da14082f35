"""Routers on this machine that do as a test says."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarm.net.mapping.gateway import Gateway


@asynccontextmanager
async def answering(react: Callable[[socket.socket, bytes, tuple], None]) -> AsyncIterator[int]:
    """A router at 127.0.0.1 that does this with each datagram. Yields its port."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        loop.add_reader(sock, lambda: react(sock, *sock.recvfrom(2048)))
        try:
            yield sock.getsockname()[1]
        finally:
            loop.remove_reader(sock)


def at(port: int) -> Gateway:
    return Gateway("127.0.0.1", "127.0.0.1", pcp_port=port, ssdp_port=port)
