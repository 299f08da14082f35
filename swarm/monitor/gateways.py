"""Reads what gateways tell of themselves at `/readyz`, without a key: whether they answer, and for which models."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError

from swarm.events import printable
from swarm.limits import limit
from swarm.monitor.state import API, GatewayState

Told = Callable[[tuple[GatewayState, ...]], Awaitable[None]]
READY, NOT_READY = 200, 503  # the statuses of /readyz


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """How often gateways are asked, and how much of an answer is read."""

    every_s: float = limit(30.0, "s", "each gateway is asked this often")
    timeout_s: float = limit(5.0, "s", "a gateway that takes longer counts as not ready")
    bytes_max: int = limit(256 << 10, "bytes", "a gateway with a longer answer counts as not ready")


class _Route(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    ready: bool


class _Answer(BaseModel):
    """The body of `/readyz`. With keys, a gateway tells `ready` alone."""

    model_config = ConfigDict(strict=True, frozen=True)

    ready: bool
    models: dict[str, _Route] | None = None
    problems: list[str] = []
    version: str | None = None


async def watch(urls: Sequence[str], limits: GatewayLimits, told: Told) -> None:
    """Ask the gateways now and then until cancelled. told: called with all of them, in order, when one has changed."""
    before = None
    # trust_env: no proxy stands between; redirects lead to strangers
    async with httpx2.AsyncClient(timeout=limits.timeout_s, trust_env=False, follow_redirects=False) as client:
        while True:
            states = tuple(await asyncio.gather(*(ask(client, url, limits) for url in urls)))
            if states != before:
                before = states
                await told(states)
            await asyncio.sleep(limits.every_s)


async def ask(client: httpx2.AsyncClient, url: str, limits: GatewayLimits) -> GatewayState:
    """Return a gateway's condition, whatever it answers."""
    try:
        async with asyncio.timeout(limits.timeout_s):
            status, body = await _read(client, f"{url.rstrip('/')}/readyz", limits.bytes_max)
    except (TimeoutError, httpx2.TimeoutException):
        return _failed(url, f"it does not answer within {limits.timeout_s:g} s")
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return _failed(url, "it cannot be reached")
    if status not in {READY, NOT_READY}:
        return _failed(url, f"it answers with status {status}")
    if body is None:
        return _failed(url, "its answer is too long")
    try:
        answer = _Answer.model_validate_json(body)
    except ValidationError:
        return _failed(url, "its answer is not that of a gateway")
    return _state(url, answer, is_ready=answer.ready and status == READY)


async def _read(client: httpx2.AsyncClient, url: str, bytes_max: int) -> tuple[int, bytes | None]:
    """Return status and body; None for a body that is too long. It is read as it comes, and never unpacked."""
    body = bytearray()
    async with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
        async for part in response.aiter_raw():
            body += part
            if len(body) > bytes_max:
                return response.status_code, None
    return response.status_code, bytes(body)


def _failed(url: str, why: str) -> GatewayState:
    return GatewayState(url=url, ready=False, reason=why)


def _state(url: str, answer: _Answer, *, is_ready: bool) -> GatewayState:
    routed = _names(answer, has_route=True)
    unrouted = _names(answer, has_route=False)
    why = "; ".join(answer.problems)
    if not is_ready and not why:
        why = "it tells no reason without a key" if routed is None else "models have no route"
    version = None if answer.version is None else _text(answer.version, 32)
    return GatewayState(
        url=url,
        ready=is_ready,
        reason=_text(why, API.text_chars),
        routed=routed,
        unrouted=unrouted,
        version=version,
    )


def _names(answer: _Answer, *, has_route: bool) -> tuple[str, ...] | None:
    if answer.models is None:
        return None
    names = (name for name, route in answer.models.items() if route.ready == has_route)
    return tuple(_text(name, 128) for name in names)[: API.models_max]


def _text(told: str, chars: int) -> str:
    """Return a stranger's text, printable and bounded."""
    return printable(told[:chars])
