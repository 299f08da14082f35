"""The client's event loop, in a thread of its own: so `generate()` stays an ordinary call, in a notebook as well."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from queue import SimpleQueue
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

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the loop and wait for it. An interrupt of this thread (Ctrl-C) cancels it.

        A queue and a task, where `run_coroutine_threadsafe` has two futures chained: every token comes through here.
        Raises concurrent.futures.CancelledError if the loop ends before the work, SessionClosed if it has ended.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        if not self.alive:
            work.close()
            raise SessionClosed("this model has left the swarm; load it again")
        done: SimpleQueue[asyncio.Task[Result]] = SimpleQueue()
        started: list[asyncio.Task[Result]] = []

        def start() -> None:
            started.append(self._loop.create_task(work))
            started[0].add_done_callback(done.put)

        def cancel() -> None:
            started[0].cancel()

        self._loop.call_soon_threadsafe(start)
        try:
            task = done.get()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            raise
        if task.cancelled():
            raise CancelledError
        return task.result()

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
