"""The gateway over HTTP: its routes, and what every request passes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from swarm.errors import SwarmError
from swarm.gateway import document
from swarm.gateway.api import messages, ollama, openai
from swarm.gateway.api.dialect import Catalogue, Dialect, Served
from swarm.gateway.api.problems import Problem, problem_of
from swarm.gateway.api.sse import StreamLimits
from swarm.gateway.watching import Watching
from swarm.limits import limit
from swarm.version import __version__

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of requests."""

    body_bytes_max: int = limit(8 << 20, "bytes", "a longer request is answered with 413")
    streams: StreamLimits = field(default_factory=StreamLimits)


@dataclass(frozen=True, slots=True)
class Gateway:
    """All that requests need."""

    models: Catalogue
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    started: float = field(default_factory=time.time)


DIALECTS = (ollama.DIALECT, messages.DIALECT, openai.DIALECT)  # the first whose paths fit, or the last


def make_app(gateway: Gateway) -> FastAPI:
    """Return the API."""
    app = FastAPI(title="Swarm gateway", version=__version__, openapi_url=document.PATH, docs_url=None, redoc_url=None)
    app.add_middleware(Watching, body_bytes_max=gateway.limits.body_bytes_max, answer=answered)
    _add_errors(app)
    served = Served(gateway.models, gateway.started, gateway.limits.streams)
    for dialect in (openai, messages, ollama):  # Ollama's is the last: it has `/` only where no other router has
        app.include_router(dialect.router(served))
    document.documented(app, dialect_of)
    return app


def _add_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return answered(request, error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        at = [str(part) for part in first["loc"] if part != "body"]
        name = ".".join(at) or "body"
        return written(request, Problem(400, "invalid_request", f"{name}: {first['msg']}", field=name))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = {404: "not_found"}.get(error.status_code, "invalid_request")
        return written(request, Problem(error.status_code, kind, str(error.detail)))  # type: ignore[arg-type]

    handlers: dict[type[Exception], Callable[[Request, Exception], Any]] = {
        SwarmError: answer,
        RequestValidationError: invalid,
        HTTPException: http,
    }
    for cls, handler in handlers.items():
        app.add_exception_handler(cls, handler)


def answered(request: Request, error: Exception) -> Response:
    """Return the answer to a request that has failed. What is not ours is logged."""
    if not isinstance(error, SwarmError):
        _log.error("a request failed", path=request.url.path, exc_info=error)
    return written(request, problem_of(error))


def written(request: Request, problem: Problem) -> Response:
    """Return an error in the form of the dialect that was spoken to."""
    return dialect_of(request.url.path).problem(problem)


def dialect_of(path: str) -> Dialect:
    """Return the dialect that a path belongs to."""
    return next((each for each in DIALECTS if each.speaks(path)), DIALECTS[-1])
