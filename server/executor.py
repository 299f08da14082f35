"""Where the model runs: one thread per span, because a hollow model is not re-entrant.

A step crosses two boundaries between threads, one in and one out, and nothing else.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")
Done = Callable[[Result | Exception], None]


class Executor(Protocol):
    """Runs jobs one after another, in the order in which they were submitted."""

    def submit(self, job: Callable[[], Result], done: Done[Result]) -> None:
        """Run `job` elsewhere and call `done` in the loop, with what it returned or raised."""
        ...


class ComputeThread:
    """The executor of a real server. Its queue is bounded by the sessions' windows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int | None = None) -> None:
        """threads: how many cores one operation may use; None leaves torch's own choice."""
        self._loop = loop
        self._threads = threads
        self._jobs: SimpleQueue[tuple[Callable[[], object], Done[object]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result], done: Done[Result]) -> None:
        """Queue a job."""
        self._jobs.put((job, done))  # type: ignore[arg-type]

    def stop(self) -> None:
        """Finish what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():  # entered once: entering it for every step costs 15 % of a small one
            while (work := self._jobs.get()) is not None:
                job, done = work
                result: object
                try:
                    result = job()
                except Exception as error:  # noqa: BLE001 - whatever a model raises fails one session, not the server
                    result = error
                self._deliver(done, result)
                del job, done, work, result  # while waiting, hold no activations

    def _deliver(self, done: Done[object], result: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(done, result)
