"""Halves: plain connections that belong to a meeting, and say so by a token (docs/reach.md).

A half begins with a preface: a word that no channel begins with, the token, and the address that its sender has in its
own network. The bytes after it belong to the two peers that meet.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

from swarm.limits import limit
from swarm.net.address import Tcp
from swarm.net.admission import source_of
from swarm.net.congestion import set_congestion_control
from swarm.net.crowd import Crowd
from swarm.net.reach import literals, makes_sense

WORD = b"half/"  # a channel begins with another letter
TOKEN_BYTES = 32
PREFACE_BYTES = len(WORD) + TOKEN_BYTES + 16 + 2


@dataclass(frozen=True, slots=True)
class HalfLimits:
    """Of connections that bring a token."""

    preface_s: float = limit(5.0, "s", "a half that has not said its token by then is closed")
    reading_max: int = limit(128, "halves", "that have not said their token yet; then the oldest of a source ends")
    open_s: float = limit(4.0, "s", "to connect a half and to say its token")


@dataclass(frozen=True, slots=True)
class Half:
    """An accepted half. outer: from where it comes, as this side sees it; inner: its own address, as it says."""

    sock: socket.socket
    outer: Tcp
    inner: Tcp


class Halves:
    """The tokens that this process waits for, and the takers of their halves. Lives in the event loop."""

    def __init__(self, limits: HalfLimits = HalfLimits()) -> None:
        self._limits = limits
        self._expected: dict[bytes, Callable[[Half], None]] = {}
        self._reading = Crowd()

    def expect(self, token: bytes, take: Callable[[Half], None]) -> None:
        """Hand the half that brings this token to `take`, once."""
        self._expected[token] = take

    def forget(self, token: bytes) -> None:
        """Wait for it no more."""
        self._expected.pop(token, None)

    def accept(self, sock: socket.socket) -> None:
        """Take an accepted connection whose first byte says that it is a half."""
        try:
            source = source_of(plain(sock.getpeername()[0]))
        except OSError:  # it has gone meanwhile
            sock.close()
            return
        self._reading.add(self._read(sock), source, self._limits.reading_max)

    def close(self) -> None:
        """Take no more."""
        self._expected.clear()
        for task in self._reading:
            task.cancel()

    async def _read(self, sock: socket.socket) -> None:
        take = None
        try:
            async with asyncio.timeout(self._limits.preface_s):
                preface = await _exactly(sock, PREFACE_BYTES)
            token, inner = preface[len(WORD) :][:TOKEN_BYTES], preface[-18:]
            if preface.startswith(WORD):
                take = self._expected.pop(token, None)
            if take is not None:
                host, port = sock.getpeername()[:2]
                take(Half(sock, Tcp(plain(host), port), Tcp(plain(inner[:16]), int.from_bytes(inner[16:], "big"))))
        except (OSError, TimeoutError, EOFError):
            take = None
        finally:
            if take is None:
                sock.close()


async def open_half(at: Tcp, token: bytes, public: bool, limits: HalfLimits = HalfLimits()) -> socket.socket:
    """Connect with a token, from a port that a punch can use again. Raises OSError, also for a timeout."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limits.open_s):
            host = (await literals(at.host, at.port))[0]
            if not makes_sense(host, public):
                raise OSError(f"{host} makes no sense as an address here")
            sock = reusable(socket.AF_INET6 if ":" in host else socket.AF_INET)
            try:
                await loop.sock_connect(sock, (host, at.port))
                name = sock.getsockname()
                inner = _packed(name[0]) + name[1].to_bytes(2, "big")
                await loop.sock_sendall(sock, WORD + token + inner)
            except BaseException:
                sock.close()
                raise
            return sock
    except TimeoutError:
        raise OSError(f"{at} does not answer within {limits.open_s:.0f} s") from None


def reusable(family: int, port: int = 0) -> socket.socket:
    """Return a bound socket whose port others of this process can have as well. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_congestion_control(sock)
        sock.setblocking(False)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - the kernel picks the way out
    except BaseException:
        sock.close()
        raise
    return sock


async def _exactly(sock: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, n_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _packed(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def plain(host: str | bytes) -> str:
    """Return a literal address; an IPv4 one that came through an IPv6 socket as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0] if isinstance(host, str) else host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
