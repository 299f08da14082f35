"""Where the model runs: one thread for each span, because a hollow model is not re-entrant.

An iteration takes all news, runs the batch that the scheduler forms, and delivers everything that is finished in one
hand-off to the loop.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn, cast

import structlog
import torch

from swarm.compute.limits import SchedulerLimits
from swarm.compute.scheduler import Batch, Part, Scheduler
from swarm.compute.task import Done, Packable, Task
from swarm.errors import ComputeFailed
from swarm.loops import Doorbell

_News = tuple[Task, Done, float]  # and when it came

_log = structlog.get_logger("swarm.compute")


class _Doubt:
    """Whether the device still computes: peers' steps may fail by themselves, a step of this process's own does not."""

    def __init__(self, check: Callable[[], None], failures_max: int) -> None:
        self._check, self._failures_max = check, failures_max
        self._failures = 0  # batches in a row of which nothing was computed

    def ran(self, parts: Sequence[Part], failed: Container[Task]) -> None:
        """Note a batch, if it has used the device. Raises what the check raises."""
        used = [part.task for part in parts if not (part.task.is_skipped or part.task.is_chore)]
        if not used:
            return
        self._failures = self._failures + 1 if all(task in failed for task in used) else 0
        if self._failures >= self._failures_max:
            self._failures = 0
            self._check()


class ComputeThread:
    """The executor of a real server. Its queue is bounded by the sessions' windows."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: int | None = None,
        limits: SchedulerLimits | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """threads: how many cores one operation may use; None leaves torch's own choice.

        check: computes something of its own, and raises where the device is broken, though no peer has a part in it.
        """
        self._bell = Doorbell(loop)
        self._threads = threads
        self._limits = limits or SchedulerLimits()
        self._doubt = _Doubt(check, self._limits.failures_max)
        self._news: SimpleQueue[_News | None] = SimpleQueue()  # None: stop once all is done
        self._scheduler = Scheduler(self._limits)
        self._done: dict[Task, Done] = {}
        self._stopping = False
        self._running: tuple[float, Sequence[Part]] | None = None  # since when, and what
        self._longest_s = self._limits.first_s  # of late
        self._ended_by: BaseException | None = None
        # torch lets go of the interpreter in every operation, and waits so many seconds for a loop that is busy.
        sys.setswitchinterval(0.0005)
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, task: Task, done: Done) -> None:
        """Queue a task."""
        self._news.put((task, done, time.perf_counter()))

    def stop(self) -> None:
        """Finish all queued tasks, then end the thread."""
        self._news.put(None)
        self._thread.join(timeout=10)
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._bell.ring(self._bell.close)  # behind the last results

    async def watch(self) -> NoReturn:
        """Raise ComputeFailed once the thread has ended, though nobody stopped it, or is stuck in a batch.

        Time is that of looks: while the whole process stood still, none were taken.
        """
        limits, began, looked_s = self._limits, None, 0.0
        while True:
            await asyncio.sleep(limits.watch_s)
            if not self._thread.is_alive():
                raise ComputeFailed(f"the compute thread has ended: {self._ended_by!r}")
            running = self._running
            looked_s = looked_s + limits.watch_s if running is not None and running[0] == began else 0.0
            began = None if running is None else running[0]
            if running is not None and looked_s > limits.stuck_s and looked_s > self._allowed_s(running[1]):
                raise ComputeFailed(f"the compute thread has been at one batch for {looked_s:.0f} s")
            del running  # it holds sessions' memory

    def _allowed_s(self, parts: Sequence[Part]) -> float:
        """Return how long a batch may take: by the longest one of late, or by its tokens and their blocks."""
        limits, of_sessions = self._limits, [(part, part.task.tenure) for part in parts]
        work = sum(part.tokens * part.task.rows * tenure.n_blocks for part, tenure in of_sessions if tenure is not None)
        return max(limits.stuck_times * self._longest_s, limits.stuck_token_times * self._scheduler.token_s * work)

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with torch.inference_mode():  # entered once: entering it for every step costs 15 % of a small one
                while self._iterate():
                    pass  # and nothing of a batch is kept while the next one is waited for
        except BaseException as error:
            self._ended_by = error  # for `watch`: tasks' errors are theirs, this one is of the thread itself
            raise

    def _iterate(self) -> bool:
        """Run the next batch and deliver the finished tasks. Returns False when there will be none."""
        batch = self._next()
        if batch is None:
            return False
        began = time.perf_counter()
        self._running = began, batch.parts
        failed = run(batch.parts)
        self._running = None
        now = time.perf_counter()
        self._longest_s = max(now - began, 0.9 * self._longest_s)
        self._deliver(self._scheduler.ran(batch, failed), failed)
        self._scheduler.learn(batch, now, now - began, failed)  # while the results travel
        self._doubt.ran(batch.parts, failed)
        return True

    def _next(self) -> Batch | None:
        """Wait for a batch; None when the thread is stopped and nothing is left."""
        if not self._news.empty():
            self._take(0.0)
        while True:
            plan = self._scheduler.form(time.perf_counter(), linger=not self._stopping)
            if isinstance(plan, Batch):
                return plan
            if self._stopping:
                return None
            self._take(plan.until)

    def _take(self, until: float) -> None:
        """Queue all news. Where there are none, wait for the first, no longer than until then."""
        wait_s = until - time.perf_counter() if self._news.empty() else 0.0
        while wait_s > 0 or not self._news.empty():
            try:
                news = self._news.get(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX))
            except Empty:
                return
            wait_s = 0.0
            if news is None:
                self._stopping = True
                continue
            task, done, at = news
            self._done[task] = done
            self._scheduler.add(task, at)

    def _deliver(self, tasks: Sequence[Task], failed: Mapping[Task, Exception]) -> None:
        """Hand the results of tasks that are over to the loop."""
        if not tasks:
            return
        finished = [(self._done.pop(task), _outcome(task, failed)) for task in tasks]
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._bell.ring(partial(deliver, finished))


def deliver(finished: Sequence[tuple[Done, object]]) -> None:
    """In the loop: hand out results, in order. A callback that raises keeps no other from its result.

    No result is put off: a session's next one may come right behind this call.
    """
    for done, result in finished:
        try:
            done(result)
        except Exception as error:  # noqa: BLE001 - as the loop does with its callbacks
            context = {"message": "a result was not taken", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def run(parts: Sequence[Part]) -> dict[Task, Exception]:
    """Run a batch. Returns the errors of the tasks that failed: an error fails one session, not the server."""
    if len(parts) > 1:
        return _run_packed(parts)
    failed: dict[Task, Exception] = {}
    for task, tokens, _, _ in parts:
        try:
            task.run(tokens)
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            failed[task] = error
    return failed


def _run_packed(parts: Sequence[Part]) -> dict[Task, Exception]:
    """Run parts as one packed step; where that fails, one by one, so that only the guilty one fails."""
    failed: dict[Task, Exception] = {}
    running: list[Part] = []
    segments: list[object] = []
    for part in parts:
        try:
            segment = cast(Packable, part.task).segment(part.tokens)  # the scheduler puts nothing else together
        except Exception as error:  # noqa: BLE001 - as above
            failed[part.task] = error
        else:
            if segment is not None:
                running.append(part)
                segments.append(segment)
    if not running:
        return failed
    try:
        outputs = cast(Packable, running[0].task).forward_packed(segments)
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("a batch failed, its steps run one by one", sessions=len(running), error=type(error).__name__)
        for part in running:
            failed |= run([part])
        return failed
    for part, output in zip(running, outputs, strict=True):
        cast(Packable, part.task).take(output)
    return failed


def _outcome(task: Task, failed: Mapping[Task, Exception]) -> object:
    """Return the object to deliver: a task's result, or its error."""
    try:
        return failed[task] if task in failed else task.result()
    except Exception as error:  # noqa: BLE001 - as above
        return error
