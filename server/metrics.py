"""A server's own figures for Prometheus, on `--metrics`. It answers every request alike, and needs no web framework."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from swarm.errors import BadConfiguration
from swarm.limits import limit
from swarm.server.server import Server


@dataclass(frozen=True, slots=True)
class MetricsLimits:
    """Bounds on those who ask for the figures."""

    request_bytes: int = limit(8192, "bytes", "of a request's head; a longer one is not answered")
    request_s: float = limit(5.0, "s", "for a request and its answer; then the connection ends")
    connections_max: int = limit(16, "connections", "at one time; more are closed at once")


def metrics_of(server: Server) -> str:
    """Return the figures in Prometheus' text format."""
    handler, pool = server.handler, server.pool
    prefixes = handler.admission.prefixes
    figures: tuple[tuple[str, str, str, float], ...] = (
        ("sessions", "gauge", "Sessions that are open.", len(handler.sessions)),
        ("cache_tokens", "gauge", "Size of the KV pool.", pool.capacity),
        ("cache_tokens_used", "gauge", "Of it, what sessions hold.", pool.used),
        ("prefix_tokens_held", "gauge", "Of it, what beginnings of prompts take while no session needs it.", pool.lent),
        ("prefix_positions_asked_total", "counter", "Positions of prompts that were marked.", prefixes.counts.asked),
        ("prefix_positions_reused_total", "counter", "Of them, those that were held.", prefixes.counts.reused),
        ("prefix_hits_total", "counter", "Sessions that began with some.", prefixes.counts.hits),
        ("jobs_total", "counter", "Steps and pieces of pasts that were computed.", handler.jobs_done),
    )
    lines = []
    for name, kind, text, value in figures:
        full = f"swarm_server_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def answering(
    address: tuple[str, int] | None, text: Callable[[], str], limits: MetricsLimits | None = None
) -> AsyncIterator[tuple[str, int] | None]:
    """Answer requests at an address within the block, if there is one. Gives the address, with a port that was chosen.

    Raises BadConfiguration if it is in use.
    """
    if address is None:
        yield None
        return
    bounds, open_now = limits or MetricsLimits(), set[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(open_now) >= bounds.connections_max:
                return
            open_now.add(writer)
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(bounds.request_s):
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(text()))
                    await writer.drain()
        finally:
            open_now.discard(writer)
            writer.close()

    try:
        listening = await asyncio.start_server(answer, *address, limit=bounds.request_bytes)
    except OSError as error:
        raise BadConfiguration("--metrics", f"{address[0]}:{address[1]}: {error.strerror or error}") from None
    async with listening:
        host, port = listening.sockets[0].getsockname()[:2]
        yield host, port


def _response(text: str) -> bytes:
    body = text.encode()
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
