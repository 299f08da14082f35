"""The gateway over HTTP: its routes, and the middleware of every request."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from swarm.errors import ModelNotFound, SwarmError
from swarm.gateway import document, health, pages
from swarm.gateway.account import Meter
from swarm.gateway.admission import AdmissionLimits, GenerationLimits, Slots
from swarm.gateway.admitting import Admitting
from swarm.gateway.api import messages, ollama, openai
from swarm.gateway.api.dialect import Catalogue, Dialect, Served
from swarm.gateway.api.problems import Problem, problem_of
from swarm.gateway.api.sse import StreamLimits
from swarm.gateway.doors import DoorOptions, Doors, Entrance, Failsafe
from swarm.gateway.recorder import Recorder
from swarm.gateway.upstream import HEADER, Forwarding, Upstreams
from swarm.gateway.watching import BodyLimits, Watching
from swarm.limits import limit
from swarm.version import __version__


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of requests, and of what they leave behind."""

    close_old_s: float = limit(5.0, "s", "conversations that were idle for too long are closed this often")
    give_back_s: float = limit(60.0, "s", "memory that requests have freed goes back to the system this often")
    bodies: BodyLimits = field(default_factory=BodyLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    generations: GenerationLimits = field(default_factory=GenerationLimits)
    streams: StreamLimits = field(default_factory=StreamLimits)


@dataclass(frozen=True, slots=True)
class Gateway:
    """All that requests need."""

    models: Catalogue
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    started: float = field(default_factory=time.time)
    doors: DoorOptions = field(default_factory=DoorOptions)
    recorder: Recorder = field(default_factory=Recorder)
    readiness: Callable[[], Awaitable[health.Readiness]] = health.always_ready
    upstreams: Upstreams | None = None


DIALECTS = (messages.DIALECT, ollama.DIALECT, openai.DIALECT)  # the first whose paths fit, or the last


def make_app(gateway: Gateway) -> FastAPI:
    """Return the API."""
    app = FastAPI(title="Swarm gateway", version=__version__, openapi_url=document.PATH, docs_url=None, redoc_url=None)
    slots = Slots(gateway.limits.admission, time.monotonic)
    meter = Meter(gateway.recorder, slots, gateway.limits.generations)
    _add_middleware(app, gateway, slots)
    _add_errors(app)
    _add_gauges(gateway.recorder, slots, meter.turns)
    upstreams = gateway.upstreams
    elsewhere = list if upstreams is None else (lambda: upstreams.names)
    served = Served(gateway.models, gateway.started, meter, gateway.limits.streams, elsewhere)
    app.include_router(health.router(gateway.recorder, gateway.readiness, has_keys=gateway.doors.keys is not None))
    app.include_router(pages.router())
    for dialect in (openai, messages, ollama):
        app.include_router(dialect.router(served))
    document.documented(app, dialect_of)
    return app


def _add_middleware(app: FastAPI, gateway: Gateway, slots: Slots) -> None:
    def is_here(name: str) -> bool:
        try:
            gateway.models.check(name)
        except ModelNotFound:
            return False
        return True

    # From the inside to the outside.
    app.add_middleware(Forwarding, upstreams=gateway.upstreams, is_here=is_here, charge=slots.charge)
    app.add_middleware(Failsafe, answer=answered)
    app.add_middleware(Admitting, slots=slots, answer=answered)
    app.add_middleware(Watching, limits=gateway.limits.bodies, answer=answered)
    app.add_middleware(Doors, options=gateway.doors, answer=answered)
    if gateway.doors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(gateway.doors.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", HEADER, "retry-after"],
        )
    app.add_middleware(Entrance, recorder=gateway.recorder)


def _add_gauges(recorder: Recorder, requests: Slots, sequences: Slots) -> None:
    asked, generated = requests.admission, sequences.admission
    recorder.gauge("requests_running", "Requests that run.", lambda: asked.running)
    recorder.gauge("requests_waiting", "Requests that wait for their turn.", lambda: asked.waiting)
    recorder.gauge("sequences_running", "Sequences that are generated.", lambda: generated.running)
    recorder.gauge("sequences_waiting", "Sequences that wait for their turn.", lambda: generated.waiting)


def _add_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return written(request, problem_of(error))

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


def written(request: Request, problem: Problem) -> Response:
    """Return an error in the form of the dialect that was spoken to, and note it for the middleware."""
    request.state.problem = problem
    return answered(request.url.path, problem)


def answered(path: str, problem: Problem) -> Response:
    """Return an error in the form of the dialect that a path belongs to."""
    return dialect_of(path).problem(problem)


def dialect_of(path: str) -> Dialect:
    """Return the dialect that a path belongs to."""
    return next((each for each in DIALECTS if each.speaks(path)), DIALECTS[-1])
