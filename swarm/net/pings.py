"""Pings of one channel: callers that ask while one is under way share its answer."""

import asyncio
from collections.abc import Callable

from swarm.errors import ChannelClosed
from swarm.protocol.messages import Ping


class Pings:
    """The one ping that is under way, and those that wait for its answer. Lives in the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, for round trips."""
        self._clock = clock
        self._answer: asyncio.Future[None] | None = None
        self._waiting = 0
        self._nonce = 0
        self._sent_at = 0.0

    async def ask(self, send: Callable[[Ping], None]) -> float:
        """Send a ping unless one is under way, and wait for the answer. Returns seconds. Raises ChannelClosed."""
        if not self._waiting or self._answer is None:
            self._nonce += 1
            self._sent_at, self._answer = self._clock(), asyncio.get_running_loop().create_future()
            send(Ping(nonce=self._nonce))
        self._waiting += 1
        try:
            await asyncio.shield(self._answer)
        finally:
            self._waiting -= 1
        return self._clock() - self._sent_at

    def answer(self, nonce: int) -> bool:
        """Take an answer. Returns whether it is waited for."""
        if not self._waiting or nonce != self._nonce or self._answer is None or self._answer.done():
            return False
        self._answer.set_result(None)
        return True

    def end(self, error: ChannelClosed) -> None:
        """There will be no answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # perhaps nothing waits for it
