"""Which congestion control data sockets have."""

import contextlib
import socket


def set_congestion_control(sock: socket.socket) -> None:
    """Let a socket send at once what its window allows, where the system lets it choose. Before it connects or accepts.

    BBR, the default of some kernels, paces: the packets of one activation leave over a good part of a round trip, since
    a flow that sends so little never shows what its path could carry. A connection that has begun with BBR stays paced
    under any other control. What is accepted has the control of the socket that listens. `reno` is always allowed,
    `cubic` where the kernel says so.
    """
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
