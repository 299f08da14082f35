"""Operators' questions to a gateway: is it alive, can it answer, and how much does it do."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from swarm.gateway.account import account_of
from swarm.gateway.api.problems import Problem, Rejected
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
    """Return the routes. has_keys: then reasons, which name models, are told to keys that may use these only."""
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
        tenant = account_of(request).tenant
        if not has_keys or tenant.name:
            mine = {name: why for name, why in found.models.items() if tenant.may_use(name)}
            body["models"] = {name: {"ready": not why, "reason": why} for name, why in mine.items()}
            body["problems"] = list(found.problems) if tenant.models is None else []
            body["version"] = __version__
        return JSONResponse(body, 200 if found.is_ready else 503, {"Cache-Control": "no-store"})

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Return the figures for Prometheus, of all models: not to a key that may use some of them only."""
        if account_of(request).tenant.models is not None:
            raise Rejected(
                Problem(403, "permission", "this key has a list of models: it sees no figures", "not_allowed")
            )
        return Response(recorder.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return routes
