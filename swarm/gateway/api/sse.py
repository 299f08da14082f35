"""Server-sent events of an answer: a status while there is time for one, something to read while a hop is repaired, no
clean end after an error.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

from swarm.errors import SwarmError
from swarm.gateway.api.problems import Problem, problem_of
from swarm.gateway.chat import Event
from swarm.limits import limit

_log = structlog.get_logger("swarm.gateway")
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of streamed answers."""

    unread_s: float = limit(60.0, "s", "a client that takes nothing of its answer for so long is left")
    keep_alive_s: float = limit(10.0, "s", "a stream says that it lives: proxies close silent ones after 30 to 60 s")


def event(data: Body, name: str | None = None) -> bytes:
    """Write one event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Streams an answer. An error is an error event, and no clean end follows it."""

    def __init__(
        self,
        following: asyncio.Future[bytes],
        chunks: AsyncGenerator[bytes, None],
        error_event: Callable[[Problem], bytes],
        limits: StreamLimits,
        *,
        keep_alive: bytes,
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        """following: the first of the chunks; a task waits for it already."""
        self._following: asyncio.Future[bytes] | None = following
        self._chunks = chunks
        self._error_event = error_event
        self._limits = limits
        self._keep_alive = keep_alive
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type=media_type, headers={**unbuffered, **headers})

    async def stream_response(self, send: Send) -> None:
        """Send, and end the generation with the sending, also where that fails."""
        pulse = _Pulse(send, self._keep_alive, self._limits)
        try:
            async with pulse.beating():
                await super().stream_response(pulse.send)
        finally:
            await _ended(self._following, self._chunks)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            if self._following is not None:
                await asyncio.wait({self._following})
                first, self._following = self._following, None
                yield first.result()
            async for chunk in self._chunks:  # in this task: one for each chunk takes as long as the chunk
                yield chunk
        except StopAsyncIteration:
            return
        except Exception as error:  # noqa: BLE001 - the client is told; a clean end would say that the text is whole
            if not isinstance(error, SwarmError):
                _log.exception("an answer failed")
            yield self._error_event(problem_of(error))


class _Pulse:
    """Sends an answer's messages, and one of its own where none has been sent for a while."""

    def __init__(self, send: Send, beat: bytes, limits: StreamLimits) -> None:
        self._send = send
        self._beat: Message = {"type": "http.response.body", "body": beat, "more_body": True}
        self._every_s, self._unread_s = limits.keep_alive_s, limits.unread_s
        self._now = asyncio.get_running_loop().time
        self._sending = 0  # messages that are on their way
        self._since = self._now()  # that is so
        self._is_open = False  # between the first message and the last

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        self._sending += 1  # `_beats` looks at it now and then, so messages need no deadlines of their own
        self._since = self._now()
        try:
            await self._send(message)
        finally:
            self._sending -= 1
        self._since = self._now()
        self._is_open = message.get("more_body", True)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Do so in this block. Raises TimeoutError in it where nobody reads."""
        async with asyncio.timeout(None) as reading:
            beats = asyncio.ensure_future(self._beats(reading))
            try:
                yield
            finally:
                beats.cancel()
                await asyncio.wait({beats})
                if not beats.cancelled():
                    beats.exception()  # the client is gone, which the answer's own messages meet, too

    async def _beats(self, reading: asyncio.Timeout) -> None:
        often_s = min(self._every_s, self._unread_s)  # meanwhile a message may be on its way, or taken
        while True:
            wait_s = self._since + (self._unread_s if self._sending else self._every_s) - self._now()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, often_s))
            elif self._sending or (self._is_open and not await self._beaten()):
                return reading.reschedule(self._now())
            else:
                self._since = self._now()  # nothing is due before the first message and behind the last

    async def _beaten(self) -> bool:
        """Send a message that says nothing. Returns whether it was taken in time."""
        try:
            async with asyncio.timeout(self._unread_s):
                await self.send(self._beat)
        except TimeoutError:
            return False
        return True


async def streamed(
    chunks: AsyncGenerator[bytes, None],
    error_event: Callable[[Problem], bytes],
    limits: StreamLimits,
    *,
    keep_alive: bytes = b": the route is being repaired, or the prompt is long\n\n",
    media_type: str = "text/event-stream",
    headers: Mapping[str, str] | None = None,
) -> EventStream:
    """Return a response that begins with the first event, or when a silent client would give up.

    keep_alive: bytes that clients of a dialect read and leave out of the answer.
    Errors that the generator raises before that are raised here, so that they have a status of their own.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        done, _ = await asyncio.wait({first}, timeout=limits.keep_alive_s)
        if done:
            first.result()
    except BaseException:
        await _ended(first, chunks)
        raise
    return EventStream(
        first, chunks, error_event, limits, keep_alive=keep_alive, media_type=media_type, headers=headers or {}
    )


async def _ended(following: asyncio.Future[bytes] | None, chunks: AsyncGenerator[bytes, None]) -> None:
    if following is not None:
        following.cancel()
        await asyncio.wait({following})
        if not following.cancelled():
            following.exception()  # it is over, and asyncio need not log that its error was never looked at
    await chunks.aclose()


async def collected(events: AsyncGenerator[Event, None]) -> list[Event]:
    """Return all events of an answer that is not streamed."""
    async with aclosing(events):
        return [each async for each in events]
