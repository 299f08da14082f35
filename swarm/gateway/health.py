"""Operators' questions to a gateway: is it alive, can it answer, and how much does it do."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from swarm.gateway.account import account_of
from swarm.gateway.recorder import Recorder
from swarm.version import __version__


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be answered. models: why a model has no route now; "" for one that has."""

    is_ready: bool
    models: Mapping[str, str]
    problems: tuple[str, ...] = ()


async def always_ready() -> Readiness:
    """Return the readiness of a gateway that looks at nothing."""
    return Readiness(is_ready=True, models={})


def router(recorder: Recorder, readiness: Callable[[], Awaitable[Readiness]], *, has_keys: bool) -> APIRouter:
    """Return the routes. has_keys: then reasons, which name models, are told to requests with a key only."""
    routes = APIRouter()

    @routes.get("/health")  # as vLLM and llama.cpp have it: load generators ask it first
    @routes.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """Tell that the gateway is alive."""
        return {"ok": True}

    @routes.get("/readyz", response_model=None)
    async def readyz(request: Request) -> Response:
        """Tell whether the models can be routed now; with status 503 if they cannot."""
        found = await readiness()
        body: dict[str, object] = {"ready": found.is_ready}
        if not has_keys or account_of(request).tenant.name:
            body["models"] = {name: {"ready": not why, "reason": why} for name, why in found.models.items()}
            body["problems"] = list(found.problems)
            body["version"] = __version__
        return JSONResponse(body, 200 if found.is_ready else 503, {"Cache-Control": "no-store"})

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return the figures for Prometheus."""
        return Response(recorder.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return routes
