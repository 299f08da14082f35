"""Plain TCP between hosts of the lab, without any of the swarm's code."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.support.lab import Host

WITHIN_S = 10.0  # what works is there long before
SILENT_S = 0.5  # what never comes has not come by then; ten times the longest round trip here
RETRY_S = 0.05  # between two attempts of one side to meet the other


def bound(host: Host, port: int) -> socket.socket:
    """Return a socket of a port that several sockets may have."""
    made = host.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("", port))
    made.settimeout(WITHIN_S)
    return made


def listening(host: Host, port: int) -> socket.socket:
    """Return a socket that listens."""
    made = bound(host, port)
    made.listen()
    return made


def dial(host: Host, to: tuple[str, int], port: int = 0, within_s: float = WITHIN_S) -> socket.socket:
    """Connect, from a port if it is given. Raises OSError."""
    made = bound(host, port)
    made.settimeout(within_s)
    try:
        made.connect(to)
    except BaseException:
        made.close()
        raise
    made.settimeout(WITHIN_S)
    return made


def outcome(host: Host, to: tuple[str, int], port: int = 0) -> str:
    """Dial. Returns "connected", "refused" or "silent"."""
    try:
        dial(host, to, port, SILENT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silent"
    return "connected"


@contextmanager
def connected(caller: Host, callee: Host, to: tuple[str, int]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect two hosts. Yields the caller's socket and the callee's."""
    with listening(callee, to[1]) as listener, dial(caller, to) as one:
        two, _ = listener.accept()
        with two:
            two.settimeout(WITHIN_S)
            yield one, two


def round_trip_s(caller: Host, to: tuple[str, int], times: int = 5) -> float:
    """Return the shortest time that connecting takes: one round trip."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        dial(caller, to).close()
        took.append(time.perf_counter() - began)
    return min(took)


async def meet(one: Host, two: Host, port: int, within_s: float) -> bool:
    """Let two hosts dial each other at once, from the port on which they listen. Tells whether they connect."""
    assert one.site is not None
    assert two.site is not None
    with ExitStack() as closing:
        listeners = [closing.enter_context(listening(host, port)) for host in (one, two)]
        ways = [
            *(_accepted(listener) for listener in listeners),
            _dialled(one, (two.site.public_address, port)),
            _dialled(two, (one.site.public_address, port)),
        ]
        tasks = [asyncio.ensure_future(way) for way in ways]
        done, _ = await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return any(task.exception() is None for task in done)


async def _accepted(listener: socket.socket) -> None:
    listener.setblocking(False)
    accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
    accepted.close()


async def _dialled(host: Host, to: tuple[str, int]) -> None:
    while True:
        with bound(host, to[1]) as made:
            made.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(made, to)
            except OSError:  # a router has answered with RST
                await asyncio.sleep(RETRY_S)
            else:
                return
