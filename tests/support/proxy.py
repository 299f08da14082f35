"""A TCP proxy in front of a server that counts and keeps every byte, and damages one on demand.

with ByteProxy(listening_address_of(pid)) as proxy:
    ... "--announce-address", proxy.address ...
    proxy.links[0].sent, proxy.links[0].received     # bytearrays, as whoever dialled sees them
    proxy.links[0].flip_bit("sent", offset=-1, bit=0)   # of the next piece that passes
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import psutil

Direction = Literal["sent", "received"]
PIECE_BYTES = 1 << 20
TARGET_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Link:
    """One connection through the proxy."""

    dialler_port: int
    sent: bytearray = field(default_factory=bytearray)  # by whoever dialled, as it left the proxy
    received: bytearray = field(default_factory=bytearray)
    open: bool = True
    flips: dict[Direction, tuple[int, int]] = field(default_factory=dict)

    def flip_bit(self, direction: Direction, offset: int, bit: int) -> None:
        """Invert a bit of the next piece; offset counts within it, from its end if negative."""
        self.flips[direction] = (offset, bit)

    def pass_on(self, direction: Direction, piece: bytes) -> bytes:
        """Take note of a piece and return what is to be sent on."""
        flip = self.flips.pop(direction, None)
        if flip is not None:
            offset, bit = flip
            damaged = bytearray(piece)
            damaged[offset % len(damaged) if offset >= 0 else offset] ^= 1 << bit
            piece = bytes(damaged)
        getattr(self, direction).extend(piece)
        return piece


class ByteProxy:
    """Listens on 127.0.0.1. A context manager; every thread and socket has ended when the block has."""

    def __init__(self, target: Callable[[], tuple[str, int] | None], links_max: int | None = None) -> None:
        """target: where to connect; asked when somebody dials, and again while it gives None.

        links_max: connections beyond these end at once.
        """
        self.links: list[Link] = []
        self.refused = 0
        self._left = links_max
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self._sockets):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for link in self._sockets:
            link.close()

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, (_, port) = self._listener.accept()
            except OSError:
                return
            self._sockets.append(near)
            if self._left == 0:
                self.refused += 1
                near.close()
                continue
            self._left = None if self._left is None else self._left - 1
            self._spawn(self._connect, near, port)

    def _connect(self, near: socket.socket, port: int) -> None:
        deadline = time.monotonic() + TARGET_TIMEOUT_S
        while (target := self._target()) is None and time.monotonic() < deadline and not self._closing.is_set():
            time.sleep(0.02)
        try:
            far = socket.create_connection(target or ("127.0.0.1", 1), TARGET_TIMEOUT_S)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._sockets.append(far)
        link = Link(port)
        self.links.append(link)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._spawn(self._pump, link, "sent", near, far)
        self._spawn(self._pump, link, "received", far, near)

    def _pump(self, link: Link, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                sink.sendall(link.pass_on(direction, piece))
        link.open = False
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def listening_address_of(pid: int) -> tuple[str, int] | None:
    """The one address on which a process listens for TCP; None while it does not, or is dead."""
    listening = [c for c in _connections(pid) if c.status == psutil.CONN_LISTEN]
    return (listening[0].laddr.ip, listening[0].laddr.port) if listening else None


def holds_port(pid: int, port: int) -> bool:
    """Whether one of a process's connections has this local port; a dead one has none."""
    return any(c.laddr and c.laddr.port == port and c.status != psutil.CONN_LISTEN for c in _connections(pid))


def _connections(pid: int) -> list[Any]:
    try:
        return list(psutil.Process(pid).net_connections(kind="tcp"))
    except psutil.NoSuchProcess:
        return []
