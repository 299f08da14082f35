"""The client's event loop, in a thread of its own: so `generate()` stays an ordinary call, in a notebook as well."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from swarm.errors import SessionClosed
from swarm.loops import Doorbell, new_event_loop

Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs until `stop`, in the process that made it: a forked one has no such thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = new_event_loop()
        self._bell = Doorbell(self._loop)
        self._cleaning = set[asyncio.Task[object]]()
        self._takes_work = True
        # Held to hand the loop anything: it all comes before `stop`. Reentrant: finalizers call `start` anywhere.
        self._handing = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="swarm-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the loop and wait for it. An interrupt of this thread (Ctrl-C) cancels it.

        A queue and a task, where `run_coroutine_threadsafe` has two futures chained: every token comes through here.
        Raises concurrent.futures.CancelledError if the loop ends before the work, SessionClosed if it has ended.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        done: SimpleQueue[asyncio.Task[Result]] = SimpleQueue()
        started: list[asyncio.Task[Result]] = []

        def start() -> None:
            started.append(self._loop.create_task(work))
            started[0].add_done_callback(done.put)

        def cancel() -> None:
            started[0].cancel()

        if not self._hand(start):
            work.close()
            raise self._ended()
        try:
            task = _first(done)
        except BaseException:
            self._hand(cancel)
            raise
        if task.cancelled():
            raise CancelledError
        return task.result()

    def begin(self, work: Callable[[], "asyncio.Future[Result]"]) -> "Begun[Result]":
        """Have the loop call `work`, after all that it was handed before. The future that it returns is awaited later.

        Raises SessionClosed if the loop has ended.
        """
        done: SimpleQueue[asyncio.Future[Result]] = SimpleQueue()

        def over(future: "asyncio.Future[Result]") -> None:
            _ = future.cancelled() or future.exception()  # a generation that has ended asks for none
            done.put(future)

        def start() -> None:
            try:
                future = work()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
                future = self._loop.create_future()
                future.set_exception(error)
            future.add_done_callback(over)

        if not self._hand(start):
            raise self._ended()
        return Begun(done)

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` in the loop without waiting; for clean-ups. Does nothing once the loop takes no work."""

        def over(task: asyncio.Task[object]) -> None:
            self._cleaning.discard(task)
            _ = task.cancelled() or task.exception()  # nobody waits for it

        def start() -> None:
            task = self._loop.create_task(work)
            self._cleaning.add(task)
            task.add_done_callback(over)

        if not self._hand(start):
            work.close()

    @property
    def alive(self) -> bool:
        """Whether the loop takes work."""
        return self._takes_work and not self._is_forked

    def stop(self) -> None:
        """End the loop and its thread."""
        if self._is_forked:
            return
        with self._handing:
            if self._takes_work:
                self._takes_work = False
                self._bell.ring(self._loop.stop)
        self._thread.join(timeout=5.0)

    def _hand(self, callback: Callable[[], None]) -> bool:
        """Have the loop call this. Returns whether it takes work; else it will not."""
        if os.getpid() != self._process:  # another thread may have held the lock, and the descriptors are the parent's
            return False
        with self._handing:
            if self._takes_work:
                self._bell.ring(callback)
            return self._takes_work

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _ended(self) -> SessionClosed:
        if self._is_forked:
            return SessionClosed("this process was forked from the one that loaded the model", "load it here, too")
        return SessionClosed("this model has left the swarm", "load it again")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            while pending := asyncio.all_tasks(self._loop):
                for task in pending:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0))  # the last callbacks: a thread may wait for a task's end
        finally:
            self._bell.close()
            self._loop.close()


class Begun(Generic[Result]):
    """Work under way in the loop."""

    def __init__(self, done: "SimpleQueue[asyncio.Future[Result]]") -> None:
        self._done = done
        self._future: asyncio.Future[Result] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._future is not None or not self._done.empty()

    def wait(self) -> Result:
        """Return the result, or raise the error. An interrupt (Ctrl-C) leaves the work as it is."""
        if self._future is None:
            self._future = _first(self._done)
        return self._future.result()


def _first(queue: "SimpleQueue[Result]") -> Result:
    while True:
        with suppress(Empty):
            return queue.get(timeout=1.0)  # Windows notices Ctrl-C between two waits only
