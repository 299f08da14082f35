"""Whole requests for other servers of OpenAI's API: those that hold a model whole, before the swarm or in its place.

A request goes to one side from its first to its last byte. Other weights write another text, so no answer is continued
elsewhere. The bytes of an upstream's answer pass as they are.
"""

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2
import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.config import UpstreamSettings
from swarm.errors import BadConfiguration
from swarm.gateway.account import Account, account_in
from swarm.gateway.api import chat_events
from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.api.sse import event
from swarm.gateway.grant import Grant
from swarm.gateway.usage import Reader, Usage, asking
from swarm.limits import limit

_log = structlog.get_logger("swarm.gateway")

RESPONSES = "/v1/responses"
HEADER = "x-swarm-route"

Place = Literal["swarm", "upstream"]


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Bounds of requests to upstreams."""

    poll_s: float = limit(15.0, "s", "an upstream is asked this often which models it has")
    connect_s: float = limit(5.0, "s", "an upstream that does not answer a connection by then counts as gone")
    silent_s: float = limit(600.0, "s", "an answer that pauses for longer is broken off")
    listing_bytes_max: int = limit(4 << 20, "bytes", "an upstream with a longer list of models counts as gone")


@dataclass(slots=True, eq=False)
class Upstream:
    """One server. available: the names, as requests say them, of the models that it has now."""

    settings: UpstreamSettings
    key: str | None
    available: frozenset[str] = frozenset()


def order_of(*, is_here: bool, when: Literal["prefer", "fallback"] | None) -> tuple[Place, ...]:
    """Return where a request is tried. is_here: whether the swarm serves its model. when: of the upstream, if any."""
    if when is None:
        return ("swarm",)
    if not is_here:
        return ("upstream",)
    return ("upstream", "swarm") if when == "prefer" else ("swarm", "upstream")


class Upstreams:
    """All upstreams, in the order of the settings."""

    def __init__(self, upstreams: Sequence[Upstream], client: httpx2.AsyncClient, limits: UpstreamLimits) -> None:
        self._upstreams = upstreams
        self._client = client
        self._limits = limits

    @property
    def names(self) -> list[str]:
        """The models that they have now, in the words of requests."""
        return sorted({name for upstream in self._upstreams for name in upstream.available})

    def of(self, model: str) -> Upstream | None:
        """Return the first upstream that has a model now."""
        return next((upstream for upstream in self._upstreams if model in upstream.available), None)

    async def poll(self) -> None:
        """Ask each which models it has."""
        await asyncio.gather(*(self._poll(upstream) for upstream in self._upstreams))

    async def run(self) -> None:
        """Ask again and again."""
        while True:
            await asyncio.sleep(self._limits.poll_s)
            await self.poll()

    async def _poll(self, upstream: Upstream) -> None:
        names = upstream.settings.models
        try:
            async with asyncio.timeout(self._limits.connect_s):
                theirs = await self._listed(upstream)
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, ValueError, KeyError, TypeError) as error:
            theirs, why = frozenset(), type(error).__name__
        else:
            why = ""
        found = frozenset(name for name, own in names.items() if own in theirs)
        if found != upstream.available:
            _log.info("upstream", url=upstream.settings.url, models=sorted(found), why=why)
        upstream.available = found

    async def _listed(self, upstream: Upstream) -> frozenset[str]:
        data = b""
        async with self._client.stream(
            "GET", f"{upstream.settings.url.rstrip('/')}/models", headers=_headers(upstream)
        ) as response:
            response.raise_for_status()
            async for part in response.aiter_bytes():
                data += part
                if len(data) > self._limits.listing_bytes_max:
                    raise ValueError("the list is too long")
        return frozenset(str(model["id"]) for model in json.loads(data)["data"])

    async def send(self, upstream: Upstream, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        """Send a request, with the model in the upstream's words. Raises httpx2.HTTPError before the first byte."""
        theirs = {**body, "model": upstream.settings.models[body["model"]]}
        url = upstream.settings.url.rstrip("/") + path.removeprefix("/v1")
        content = json.dumps(theirs, ensure_ascii=False).encode()
        headers = {**_headers(upstream), "Content-Type": "application/json"}
        request = self._client.build_request("POST", url, content=content, headers=headers)
        return await self._client.send(request, stream=True)


def _headers(upstream: Upstream) -> dict[str, str]:
    """Return headers for an upstream: never the client's own, whose key is for us."""
    own = {} if upstream.key is None else {"Authorization": f"Bearer {upstream.key}"}
    return {"Accept-Encoding": "identity", **own}


def configured(settings: Sequence[UpstreamSettings]) -> list[Upstream]:
    """Return the upstreams of the settings, with their keys. Raises BadConfiguration."""
    upstreams = []
    for each in settings:
        setting = f"gateway.upstream {each.url}"
        if not each.remote and not _is_loopback(urlsplit(each.url).hostname or ""):
            why = "prompts would leave this machine in clear; if that is meant, write: remote = true"
            raise BadConfiguration(setting, why)
        try:
            key = None if each.key_file is None else each.key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfiguration(f"{setting}, key_file {each.key_file}", str(error)) from None
        upstreams.append(Upstream(each, key))
    return upstreams


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@asynccontextmanager
async def polled(
    settings: Sequence[UpstreamSettings], limits: UpstreamLimits | None = None
) -> AsyncIterator[Upstreams | None]:
    """Ask the upstreams for their models within the block; None where there are none. Raises BadConfiguration."""
    limits = limits or UpstreamLimits()
    upstreams = configured(settings)
    if not upstreams:
        yield None
        return
    timeout = httpx2.Timeout(limits.silent_s, connect=limits.connect_s)
    # trust_env: a proxy of the environment would read prompts
    async with httpx2.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False) as client:
        polling = Upstreams(upstreams, client, limits)
        await polling.poll()
        running = asyncio.create_task(polling.run())
        try:
            yield polling
        finally:
            running.cancel()
            await asyncio.wait({running})


class Forwarding:
    """Pure ASGI middleware: sends a request to the swarm or to an upstream, and says in a header which it was."""

    def __init__(
        self,
        app: ASGIApp,
        upstreams: Upstreams | None,
        is_here: Callable[[str], bool],
        charge: Callable[[str, int], None],
    ) -> None:
        """is_here: whether the swarm serves a model. charge: with a tenant's name, and tokens that were computed."""
        self._app = app
        self._charge = charge
        self._upstreams = upstreams
        self._is_here = is_here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises Rejected where neither side has a way."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = self._body(scope)
        upstream = None if body is None or self._upstreams is None else self._upstreams.of(body["model"])
        if body is None or upstream is None:
            await self._app(scope, receive, _saying("swarm", send))
            return
        account_in(scope).check(body["model"])
        if not isinstance(body.get("stream"), bool | None):
            raise Rejected(Problem(400, "invalid_request", "stream: it is true or false", field="stream"))
        for place in order_of(is_here=self._is_here(body["model"]), when=upstream.settings.when):
            if place == "swarm":
                answered = await self._by_swarm(scope, receive, send)
            else:
                answered = await self._by_upstream(upstream, body, scope, send)
            if answered:
                return
        why = f"neither the swarm nor an upstream answers for {body['model']!r} now"
        raise Rejected(Problem(503, "overloaded", why, "no_route", retry_after_s=5.0))

    def _body(self, scope: Scope) -> Mapping[str, Any] | None:
        """Return a request's body if it may be forwarded: it names a model in a dialect that upstreams speak."""
        if self._upstreams is None or scope["path"] not in {"/v1/chat/completions", "/v1/completions", RESPONSES}:
            return None
        body = json.loads(scope["state"]["body"] or b"null")  # it has been parsed before
        return body if isinstance(body, dict) and isinstance(body.get("model"), str) else None

    async def _by_swarm(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer through the swarm. Returns False, and has sent nothing, where it has no way."""
        gave_up = False
        theirs = {"no_route", "no_room", "swarm_unreachable"}  # problems that an upstream does not have

        async def unless_no_way(message: Message) -> None:
            nonlocal gave_up
            if message["type"] == "http.response.start":
                problem: Problem | None = scope["state"].get("problem")
                gave_up = problem is not None and problem.code in theirs
            if not gave_up:
                await send(message)

        await self._app(scope, receive, _saying("swarm", unless_no_way))
        return not gave_up

    async def _by_upstream(self, upstream: Upstream, body: Mapping[str, Any], scope: Scope, send: Send) -> bool:
        """Answer through an upstream. Returns False, and has sent nothing, where it cannot be reached."""
        assert self._upstreams is not None
        account, path = account_in(scope), scope["path"]
        asked = None if account.tenant.limits.tokens_per_minute is None else asking(body, path)
        try:
            async with account.grant.valid():
                response = await self._upstreams.send(upstream, path, asked or body)
        except httpx2.HTTPError as error:
            _log.warning("upstream failed", url=upstream.settings.url, why=type(error).__name__)
            return False
        scope["state"]["forwarded"] = path
        account.model = body["model"]
        reader = Reader(is_stream=body.get("stream") is True, hides=asked is not None)
        try:
            kept = ("content-type", "retry-after")
            headers = [(name.encode(), response.headers[name].encode()) for name in kept if name in response.headers]
            start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
            await _saying("upstream", send)(start)
            await _pass_on(response, reader, account.grant, path, send)
        finally:
            self._note(reader.counted, account)
            await response.aclose()
        return True

    def _note(self, usage: Usage, account: Account) -> None:
        """Account for the tokens that an upstream has computed, and charge them to the tenant."""
        computed = usage.prompt - usage.cached
        account.prompt += computed
        account.cached += usage.cached
        account.output += usage.output
        self._charge(account.tenant.name, computed + usage.output)


async def _pass_on(response: httpx2.Response, reader: Reader, grant: Grant, path: str, send: Send) -> None:
    """Send an answer's body. A stream whose key is revoked ends with an error event; a whole answer breaks off."""
    try:
        async with grant.valid():
            async for part in response.aiter_raw():
                if ready := reader.feed(part):
                    await send({"type": "http.response.body", "body": ready, "more_body": True})
        rest = reader.close()
    except Rejected as error:
        if not reader.is_stream:
            raise
        rest = _error_event(path, error.problem)
    await send({"type": "http.response.body", "body": rest})


def _error_event(path: str, problem: Problem) -> bytes:
    """Write an error into a stream of an upstream."""
    body = chat_events.error_body(problem)
    return event({**body["error"], **body, "type": "error"}, "error") if path == RESPONSES else event(body)


def _saying(place: Place, send: Send) -> Send:
    """Return `send` with a header that says where the answer comes from."""

    async def with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[HEADER] = place
        await send(message)

    return with_header
