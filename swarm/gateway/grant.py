"""A request's right to go on, which ends when its key is removed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.gateway.api.problems import Problem, Rejected

REVOKED = Problem(401, "authentication", "this key is not known any more", "invalid_api_key")


class Grant:
    """The right of one request. Its tasks do their waiting within `valid`."""

    def __init__(self) -> None:
        self._is_revoked = False
        self._waiting: set[asyncio.Timeout] = set()

    def revoke(self) -> None:
        """End the request: what waits within `valid`, and all that would."""
        self._is_revoked = True
        for each in self._waiting:
            each.reschedule(0.0)

    @asynccontextmanager
    async def valid(self) -> AsyncIterator[None]:
        """Run the block while the right lasts. Raises Rejected with status 401 when it ends."""
        if self._is_revoked:
            raise Rejected(REVOKED)
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waiting.add(waiting)
                try:
                    yield
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            if waiting.expired():
                raise Rejected(REVOKED) from None
            raise
