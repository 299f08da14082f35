"""Takes the addresses that a process listens on: a port that was named, or the first free one of several.

The kernel decides, at once: a port that is looked at first and taken later may be another process's by then.
"""

import contextlib
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from swarm.errors import AddressInUse, BadConfiguration

Port: TypeAlias = int | range
"""A port, 0 for any; or several, of which the first that is free is taken."""

EVERY = "::"  # every address of this machine, of both families


def listening(host: str, port: Port, backlog: int = 128) -> socket.socket:
    """Return a socket that listens: connections wait in it until they are accepted.

    host: EVERY takes IPv4 and IPv6, or IPv4 alone on a machine without IPv6. Raises AddressInUse, for the first port
    where none is free, and BadConfiguration.
    """
    ports = port if isinstance(port, range) else (port,)
    for each in ports:
        with contextlib.suppress(AddressInUse):
            return _listening(host, each, backlog)
    return _listening(host, ports[0], backlog)


@contextmanager
def kept_for_p2pd(host: str, port: Port) -> Iterator[int]:
    """Keep a port off other processes within the block, until p2pd listens on it. Returns the port.

    p2pd sets SO_REUSEPORT, so two of one user would share a port in silence: each would get half of the connections.
    Its port is taken without that option, which no other socket of the port then has, and is shared with p2pd alone. A
    system other than Linux lets nothing join a port that was taken so; there it is free for the moments until p2pd
    listens. Raises as `listening`.
    """
    with listening(host, port) as kept:
        number: int = kept.getsockname()[1]
        if sys.platform == "linux":
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            kept.close()
        yield number


def has_ipv6() -> bool:
    """Whether this machine has IPv6 at all, if only towards itself."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind((EVERY, 0))
    except OSError:
        return False
    return True


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    if host == EVERY and not has_ipv6():
        host = "0.0.0.0"  # noqa: S104 - every address was asked for
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # this port's own closed connections do not count
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != EVERY))
        sock.bind(address)
        sock.listen(backlog)  # until then, another process can have the address as well
    except socket.gaierror as error:
        raise BadConfiguration(f"--listen {host}:{port}", error.strerror or str(error)) from None
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise AddressInUse(f"{host}:{port}", getattr(error, "strerror", None) or str(error)) from None
    return sock
