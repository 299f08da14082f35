"""The form of a parser, the strangers that send its inputs, and the loop that runs it."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from swarm.access import NetworkKey
from swarm.identity import Identity

NOW = 1_800_000_000.0
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
SECRET = NetworkKey(b"k" * 32)
HASH = b"h" * 32  # a handshake's

Opened = tuple[Any, Callable[[bytes], bytes]]


@dataclass(frozen=True, slots=True)
class Parser:
    """One parser. `read` takes a stranger's bytes, and raises only `raises`.

    opened: where an input holds JSON, its value, and how to put other JSON in its place, signed or sealed as need be.
    """

    name: str
    read: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    opened: Callable[[bytes], Opened] | None = None

    def check(self, data: bytes) -> None:
        """Feed one input. An error that is raised here is a finding."""
        with contextlib.suppress(*self.raises):
            self.read(data)


class _Loop(asyncio.SelectorEventLoop):
    """Resolves addresses that are numbers, as the system does, and asks no server."""

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


@cache
def _loop() -> _Loop:
    return _Loop()


def run(job: Awaitable[Any]) -> Any:
    return _loop().run_until_complete(job)


def awaited(read: Callable[[bytes], Awaitable[object]]) -> Callable[[bytes], object]:
    """Run a coroutine function as a parser's function."""
    return lambda data: run(read(data))
