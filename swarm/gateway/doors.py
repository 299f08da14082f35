"""The middleware that every request passes before its body is read: pure ASGI, from the outside to the inside.

    Entrance   an account, an id, one line in the log, the figures
    CORS       Starlette's, for the origins that are allowed
    Doors      Host, Origin, key

Frameworks' own middleware would hide a client that goes away.
"""

import ipaddress
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import SwarmError
from swarm.gateway.account import Account, account_in
from swarm.gateway.api.problems import Problem, Rejected, problem_of
from swarm.gateway.keys import ANYONE, Keys, Tenant
from swarm.gateway.recorder import Recorder

_log = structlog.get_logger("swarm.gateway")

Answer = Callable[[str, Problem], Response]
"""Writes an error in the form of the dialect that a path belongs to."""

# neither text nor models: no key is asked for, nor for the page's files
OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/readyz", "/favicon.ico"})


class Entrance:
    """Gives every request an account and an id, and tells the log and the figures when it is over."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = Account(f"req_{secrets.token_hex(12)}")
        scope.setdefault("state", {})["account"] = account
        status = 499  # the client has gone before an answer began

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = account.id
            await send(message)

        try:
            async with account.ending:
                await self._app(scope, receive, with_id)
        finally:
            path = route_of(scope)
            self._recorder.request(path, status, account.model)
            self._tell(scope["method"], path, status, account)

    def _tell(self, method: str, path: str, status: int, account: Account) -> None:
        """Write the request's line: numbers and names, none of its text."""
        is_quiet = path in OPEN_PATHS or path == "/metrics"
        (_log.debug if is_quiet else _log.info)(
            "request",
            id=account.id,
            method=method,
            path=path,
            status=status,
            tenant=account.tenant.name,
            model=account.model,
            prompt=account.prompt,
            cached=account.cached,
            output=account.output,
            ttft_s=None if account.first_s is None else round(account.first_s, 3),
            took_s=round(time.monotonic() - account.began, 3),
        )


def route_of(scope: Scope) -> str:
    """Return a request's path as the routes write it; "other" for one that no route has. Paths are text of clients."""
    route = scope["state"].get("forwarded") or getattr(scope.get("route"), "path", None)
    return str(route or "other")


class Failsafe:
    """Answers where the app fails. It is the innermost: the framework's own answer would pass no middleware."""

    def __init__(self, app: ASGIApp, answer: Answer) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if not isinstance(error, SwarmError | ClientDisconnect):  # which a client that does not read is taken for
                _log.error("a request failed", path=route_of(scope), exc_info=error)
            if begun:
                raise
            await self._answer(scope["path"], problem_of(error))(scope, receive, send)


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """Which requests are let in.

    keys: None asks for none. on_loopback: only names of this machine may stand in `Host`, because a page of any site
    can let its own name lead here. origins: of pages that may call the gateway, beside its own; "*" for all.
    """

    keys: Keys | None = None
    on_loopback: bool = False
    origins: frozenset[str] = frozenset()


class Doors:
    """Checks Host, Origin and key, and notes the tenant."""

    def __init__(self, app: ASGIApp, options: DoorOptions, answer: Answer) -> None:
        self._app = app
        self._options = options
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            tenant = self._admitted(scope["path"], headers)
        except Rejected as error:
            response = self._answer(scope["path"], error.problem)
            if error.problem.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        account, keys, key = account_in(scope), self._options.keys, key_in(headers)
        account.tenant = tenant
        scope["state"]["owner"] = tenant.name
        if keys is None or key is None or tenant is ANYONE:
            await self._app(scope, receive, send)
            return
        with keys.held(key, tenant, account.grant):
            await self._app(scope, receive, send)

    def _admitted(self, path: str, headers: Headers) -> Tenant:
        options = self._options
        host = headers.get("host", "")
        if options.on_loopback and options.keys is None and not is_local(host):
            why = f"the gateway has no keys, so it answers as localhost only, not as {host[:80]!r}"
            raise Rejected(Problem(403, "permission", why, "host_not_allowed"))
        origin = headers.get("origin")
        if origin is not None and not is_allowed(origin, host, options.origins):
            why = f"pages of {origin[:80]!r} may not call the gateway; allow them with --allow-origin"
            raise Rejected(Problem(403, "permission", why, "origin_not_allowed"))
        if options.keys is None:
            return ANYONE
        key = key_in(headers)
        tenant = None if key is None else options.keys.tenant(key)
        if tenant is None:
            if path in OPEN_PATHS or path.startswith("/static/"):
                return ANYONE
            why = "this key is not known" if key is not None else "a key is needed: Authorization: Bearer, or x-api-key"
            raise Rejected(Problem(401, "authentication", why, "invalid_api_key"))
        return tenant


def key_in(headers: Headers) -> str | None:
    """Return the key that a request carries, in any dialect's header."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def is_local(host: str) -> bool:
    """Whether a Host header names this machine itself."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_allowed(origin: str, host: str, origins: frozenset[str]) -> bool:
    """Whether a page of this origin may call: it is the gateway's own, or one that is allowed."""
    if "*" in origins or origin in origins:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:  # brackets that are no address
        return False
    return parts.scheme in {"http", "https"} and bool(host) and parts.netloc.lower() == host.lower()
