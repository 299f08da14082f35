"""The web server of the commands that have one: uvicorn in the command's own loop, under the command's own signals."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class WebLimits:
    """Bounds of a web server."""

    connections_max: int = limit(1024, "connections", "at one time; more are answered with 503")
    head_s: float = limit(10.0, "s", "a connection on which no request comes for so long, or twice, is closed")
    grace_s: int = limit(2, "s", "for requests under way when the server ends; then they are broken off")


class Http(H11Protocol):
    """uvicorn's HTTP/1.1, without connections that say nothing: each would take the place of a client."""

    head_s = WebLimits().head_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to look at it."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._look(None)

    def _look(self, before: object) -> None:
        """Close it where no request has come since the look before."""
        waits = self.cycle is None or self.cycle.response_complete
        now = (self.cycle,) if waits else None
        if waits and now == before:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(self.head_s, self._look, now)


def _nothing() -> None:
    pass


class WebServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the command has them. End it with `should_exit`."""

    def __init__(
        self, app: ASGIApp, on_started: Callable[[], None] = _nothing, limits: WebLimits | None = None
    ) -> None:
        """on_started: called when requests are taken."""
        limits = limits or WebLimits()
        super().__init__(
            uvicorn.Config(
                app,
                http=Http,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                limit_concurrency=limits.connections_max,
                timeout_graceful_shutdown=limits.grace_s,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def url_of(listening: socket.socket) -> str:
    """Return the URL of a socket's own address."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
