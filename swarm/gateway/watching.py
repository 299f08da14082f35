"""Reads a request's body with bounds, and cancels its work when the client goes away, in the midst of a prompt too."""

import asyncio
from dataclasses import dataclass

import pydantic_core
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.gateway.api.problems import Problem, Rejected
from swarm.gateway.doors import Answer
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds of requests' bodies. JSON that is nested more than about 200 deep is answered with 400, too."""

    body_bytes_max: int = limit(8 << 20, "bytes", "a longer request is answered with 413")
    bodies_bytes_max: int = limit(256 << 20, "bytes", "of all requests under way; more are answered with 503")
    body_s: float = limit(60.0, "s", "a body that takes longer to come is answered with 408")


class Watching:
    """Pure ASGI middleware: the frameworks' own notice a client that is gone only when they next send to it."""

    def __init__(self, app: ASGIApp, limits: BodyLimits, answer: Answer) -> None:
        self._app = app
        self._limits = limits
        self._answer = answer
        self._n_bytes = 0  # of all requests under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Its body is in `state`, for the middleware behind this one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._limits)
        try:
            await self._serve(body, scope, receive, send)
        finally:
            self._n_bytes -= body.n_bytes

    async def _serve(self, body: "_Body", scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.body_s):
                while not body.is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    self._n_bytes += body.add(message)
                    if self._n_bytes > self._limits.bodies_bytes_max:
                        why = "the requests under way have too many bytes together"
                        raise Rejected(Problem(503, "overloaded", why, "overloaded", retry_after_s=5.0))
            body.check()
        except (Rejected, TimeoutError) as error:
            late = Problem(408, "timeout", f"the request's body did not come within {self._limits.body_s:.0f} s")
            response = self._answer(scope["path"], error.problem if isinstance(error, Rejected) else late)
            response.headers["Connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        scope["state"]["body"] = body.data
        await self._watch(body.data, scope, receive, send)

    async def _watch(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        given, gone = [body], asyncio.Event()

        async def replayed() -> Message:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        serving = asyncio.ensure_future(self._app(scope, replayed, send))
        leaving = asyncio.ensure_future(receive())  # the next message, and the last, is that the client has gone
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.exception()  # it is logged, and the connection ends without a clean end of the answer
        finally:
            gone.set()
            for task in (serving, leaving):
                task.cancel()
            await asyncio.wait({serving, leaving})


class _Body:
    """A body as it comes."""

    def __init__(self, limits: BodyLimits) -> None:
        self.n_bytes = 0
        self.is_whole = False
        self._limits = limits
        self._parts: list[bytes] = []
        self.data = b""

    def add(self, message: Message) -> int:
        """Take a part. Returns its bytes. Raises Rejected."""
        part: bytes = message.get("body", b"")
        self._parts.append(part)
        self.n_bytes += len(part)
        self.is_whole = not message.get("more_body", False)
        if self.n_bytes > self._limits.body_bytes_max:
            self.n_bytes -= len(part)  # the caller does not get to count it
            why = f"a request has at most {self._limits.body_bytes_max} bytes"
            raise Rejected(Problem(413, "invalid_request", why, "request_too_large"))
        if self.is_whole:
            self.data = b"".join(self._parts)
        return len(part)

    def check(self) -> None:
        """Raise Rejected where it is no JSON, has NaN in it, or nests too deep: no parser behind sees it then."""
        if not self.n_bytes:
            return
        try:
            pydantic_core.from_json(self.data, allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            raise Rejected(Problem(400, "invalid_request", f"the body is no JSON: {error}")) from None
