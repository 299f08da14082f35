"""Server-sent events of an answer: the first event before the headers, comments while a hop is repaired, no clean end
after an error.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import structlog
from fastapi.responses import StreamingResponse
from starlette.types import Send

from swarm.errors import SwarmError
from swarm.gateway.api.problems import Problem, problem_of
from swarm.gateway.chat import Event

KEEP_ALIVE_S = 10.0  # proxies close connections that are silent for longer: 30 to 60 s are usual
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_log = structlog.get_logger("swarm.gateway")
Body = Mapping[str, Any]


def event(data: Body, name: str | None = None) -> bytes:
    """Write one event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": the route is being repaired, or the prompt is long\n\n"


class EventStream(StreamingResponse):
    """Streams an answer whose first event is there. An error is an error event, and no clean end follows it."""

    def __init__(
        self,
        first: bytes,
        chunks: AsyncGenerator[bytes, None],
        error_event: Callable[[Problem], bytes],
        *,
        keep_alive: bytes,
        media_type: str,
    ) -> None:
        self._events = _kept_alive(first, chunks, error_event, keep_alive)
        super().__init__(self._events, media_type=media_type, headers=HEADERS)

    async def stream_response(self, send: Send) -> None:
        """Send, and end the generation whatever ends the sending."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def streamed(
    chunks: AsyncGenerator[bytes, None],
    error_event: Callable[[Problem], bytes],
    *,
    keep_alive: bytes = KEEP_ALIVE,
    media_type: str = "text/event-stream",
) -> EventStream:
    """Return a response that begins when the first event is there. Raises what the generator raises before that.

    keep_alive: bytes that clients of a dialect read and leave out of the answer.
    """
    return EventStream(await anext(chunks), chunks, error_event, keep_alive=keep_alive, media_type=media_type)


async def _kept_alive(
    first: bytes, chunks: AsyncGenerator[bytes, None], error_event: Callable[[Problem], bytes], keep_alive: bytes
) -> AsyncGenerator[bytes, None]:
    following: asyncio.Future[bytes] | None = None
    try:
        yield first
        while True:
            following = following or asyncio.ensure_future(anext(chunks))
            done, _ = await asyncio.wait({following}, timeout=KEEP_ALIVE_S)
            if done:
                ready, following = following, None
                yield ready.result()
            else:
                yield keep_alive
    except StopAsyncIteration:
        return
    except Exception as error:  # noqa: BLE001 - the client is told; a clean end would say that the text is whole
        if not isinstance(error, SwarmError):
            _log.exception("an answer failed")
        yield error_event(problem_of(error))
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
        await chunks.aclose()


async def collected(events: AsyncGenerator[Event, None]) -> list[Event]:
    """Return all events of an answer that is not streamed."""
    async with aclosing(events):
        return [each async for each in events]
