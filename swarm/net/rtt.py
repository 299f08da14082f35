"""What the kernel knows of a connection's round trip."""

import socket
import struct
import sys


def rtt_s(sock: socket.socket) -> float:
    """Return the smoothed round-trip time in seconds: tcpi_rtt of Linux's struct tcp_info; 0.0 where it is unknown."""
    if sys.platform != "linux":
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72)
    except OSError:
        return 0.0
    offset = 68  # eight bytes, then 15 fields of four
    return float(struct.unpack_from("=I", info, offset)[0]) / 1e6 if len(info) >= offset + 4 else 0.0
