"""Reads a request's body with a bound, and cancels its work when the client goes away, in the midst of a prompt too."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Watching:
    """Pure ASGI middleware: the frameworks' own notice a client that is gone only when they next send to it."""

    def __init__(self, app: ASGIApp, body_bytes_max: int) -> None:
        """body_bytes_max: a longer body is answered with 413."""
        self._app = app
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._body(receive)
        if body is None:
            return
        if len(body) > self._body_bytes_max:
            await _too_large(send, self._body_bytes_max)
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
            if serving.done():
                serving.result()  # an error goes on to the middleware that answers with it
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


async def _too_large(send: Send, most: int) -> None:
    text = f'{{"error":{{"message":"a request has at most {most} bytes","type":"invalid_request_error"}}}}'.encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": text})
