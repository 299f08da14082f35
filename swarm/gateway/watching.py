"""Reads a request's body with a bound, and cancels its work when the client goes away, in the midst of a prompt too."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.gateway.api.problems import Problem, Rejected


class Watching:
    """Pure ASGI middleware: the frameworks' own notice a client that is gone only when they next send to it."""

    def __init__(self, app: ASGIApp, body_bytes_max: int, answer: Callable[[Request, Exception], Response]) -> None:
        """body_bytes_max: a longer body is answered with 413. answer: writes an error in the client's dialect."""
        self._app = app
        self._body_bytes_max = body_bytes_max
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._body(receive)
        if body is None:
            return
        if len(body) > self._body_bytes_max:
            text = f"a request has at most {self._body_bytes_max} bytes"
            refused = self._answer(Request(scope), Rejected(Problem(413, "invalid_request", text)))
            refused.headers["connection"] = "close"
            await refused(scope, receive, send)
            return
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
            error = serving.exception() if serving.done() else None
            if isinstance(error, Exception):  # beyond this, the server would close the connection of a client's pool
                await self._answer(Request(scope), error)(scope, receive, send)
        finally:
            gone.set()
            for task in (serving, leaving):
                task.cancel()
            await asyncio.wait({serving, leaving})

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body, or as much as shows that it is too long; None if the client has gone."""
        parts: list[bytes] = []
        n_bytes = 0
        while n_bytes <= self._body_bytes_max:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            n_bytes += len(parts[-1])
            if not message.get("more_body", False):
                break
        return b"".join(parts)
