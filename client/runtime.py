"""The client's event loop, in a thread of its own: so `generate()` stays an ordinary call, in a notebook as well."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from swarm.errors import SessionClosed

Result = TypeVar("Result")
STOP_TIMEOUT_S = 5.0


class LoopThread:
    """An event loop that runs until `stop`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="swarm-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Run `work` in the loop and wait for it. An interrupt of this thread (Ctrl-C) cancels it.

        Raises SessionClosed once the loop has stopped.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        if not self.alive:
            work.close()
            raise SessionClosed("this model has left the swarm; load it again")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` in the loop without waiting; for clean-ups. Does nothing once the loop has stopped."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            work.close()

    @property
    def alive(self) -> bool:
        """Whether the loop takes work."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the loop and its thread."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        finally:
            self._loop.close()
