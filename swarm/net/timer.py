"""One timer of an owner that may have several reasons to be called."""

import asyncio
from collections.abc import Callable


class Timer:
    """Calls its owner no later than asked for, perhaps earlier: the owner does all that is due, and arms it again."""

    __slots__ = ("_at", "_call", "_handle", "_loop", "time")

    def __init__(self, call: Callable[[], None]) -> None:
        """For the running loop."""
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self._call = call
        self._at = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, at: float | None) -> None:
        """Call at this time of the loop's, or earlier. None: there is no reason now."""
        if at is None or (self._handle is not None and self._at <= at):
            return
        self.cancel()
        self._at = at
        self._handle = self._loop.call_at(at, self._fire)

    def cancel(self) -> None:
        """Call no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._call()
