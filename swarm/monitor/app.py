"""The monitor over HTTP: the page for people, the API for machines. It reads nothing and writes nothing.

Bodies are made when something changes, not for each request; see `swarm.monitor.board`.
"""

from collections.abc import AsyncIterator
from html import escape
from typing import Annotated

from fastapi import FastAPI, Path, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.monitor import pages
from swarm.monitor.board import Board
from swarm.monitor.service import Monitor
from swarm.monitor.state import Health, History, ModelDetail, State, Status, Window
from swarm.version import __version__

RootPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="the digest of the model's manifest")]
RootQuery = Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="one model; all together without it")]


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


def make_app(monitor: Monitor) -> FastAPI:
    """Return the API over a monitor."""
    app = FastAPI(
        title="Swarm health",
        version=__version__,
        description="Which models the swarm serves, how well, and which blocks need servers.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
    )
    # From 1,024 bytes on; not for server-sent events.
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=6)
    app.add_middleware(Headers)
    _add_api(app, monitor)
    _add_operations(app, monitor)
    _add_pages(app, monitor)
    return app


def _add_api(app: FastAPI, monitor: Monitor) -> None:
    @app.get("/api/v1/state", response_model=State)
    async def state() -> Response:
        """Every model in a few lines."""
        return _json(monitor.board.published.state)

    @app.get("/api/v1/models/{root}", response_model=ModelDetail, responses={404: {"model": Problem}})
    async def model(root: RootPath) -> Response:
        """One model: its blocks, its servers, and its greatest need."""
        body = monitor.board.published.details.get(root)
        return _json(body) if body is not None else _problem(404, "no server has this model, nor had within 24 hours")

    @app.get("/api/v1/history", response_model=History, responses={503: {"model": Problem}})
    async def history(root: RootQuery = None, window: Window = "24h") -> Response:
        """Coverage, throughput and servers over time, at most 720 points."""
        body = await monitor.history(root, window)
        return _json(body) if body is not None else _problem(503, "the history cannot be read")

    @app.get(
        "/api/v1/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}, 503: {"model": Problem}},
    )
    async def events() -> Response:
        """Server-sent events: the state at once, and again whenever it changes."""
        if monitor.board.is_full:
            return _problem(503, "too many listeners; ask for /api/v1/state instead")
        return StreamingResponse(
            events_of(monitor.board), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )


def _add_operations(app: FastAPI, monitor: Monitor) -> None:
    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """The state for Prometheus."""
        return Response(monitor.board.published.metrics, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    @app.get("/healthz", response_model=Health, responses={503: {"model": Health}})
    async def healthz() -> Response:
        """Whether this page's figures are fresh, and whether its history is being written."""
        health = monitor.health()
        return _json(health.model_dump_json().encode(), 200 if health.ok else 503)

    @app.get(
        "/badge/{root}.svg",
        response_class=Response,
        responses={200: {"content": {"image/svg+xml": {}}}, 404: {"content": {"image/svg+xml": {}}}},
    )
    async def badge(root: RootPath) -> Response:
        """A model's status as an image for a README."""
        detail = monitor.board.published.assessment.details.get(root)
        status = detail.summary.status if detail is not None else None
        headers = {"Cache-Control": "max-age=60"}
        return Response(badge_svg(status), 200 if detail else 404, headers, media_type="image/svg+xml")


def _add_pages(app: FastAPI, monitor: Monitor) -> None:
    def state() -> State:
        return monitor.board.published.assessment.state

    def detail(root: str) -> ModelDetail | None:
        return monitor.board.published.assessment.details.get(root)

    async def history(root: str | None, window: Window) -> History | None:
        body = await monitor.history(root, window)
        return History.model_validate_json(body) if body is not None else None

    app.include_router(pages.router(state, detail, history))


async def events_of(board: Board, keep_alive_s: float = 15.0) -> AsyncIterator[bytes]:
    """Yield the state at once, and again whenever it changes, as server-sent events; a comment now and then."""
    with board.listening():
        yield b"retry: 5000\n\n"  # milliseconds until a browser tries again
        sent = -1
        while not board.stopping:
            published = board.published
            revision = published.assessment.state.revision
            if revision != sent:
                sent = revision
                yield b"id: %d\nevent: state\ndata: %s\n\n" % (revision, published.state)
            if board.published is published and not await board.changed(keep_alive_s):
                yield b": still here\n\n"


def badge_svg(status: Status | None) -> str:
    """Return an image that says "swarm" and a status; None: unknown."""
    text = escape(status or "unknown")
    colour = {"healthy": "#2da44e", "degraded": "#bf8700", "broken": "#cf222e", None: "#6e7781"}[status]
    width = 48 + 7 * len(text) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="swarm: {text}">'
        f"<title>swarm: {text}</title>"
        f'<rect width="{width}" height="20" rx="3" fill="#24292f"/>'
        f'<rect x="48" width="{width - 48}" height="20" rx="3" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="6" y="14">swarm</text><text x="54" y="14">{text}</text></g></svg>'
    )


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, {"Cache-Control": "no-cache"}, media_type="application/json")


def _problem(status: int, detail: str) -> Response:
    return JSONResponse(Problem(detail=detail).model_dump(), status)


class Headers:
    """Adds headers to every answer that keep browsers from taking it for something else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        ours = (
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"access-control-allow-origin", b"*"),  # public figures, no cookies
        )

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *ours]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
