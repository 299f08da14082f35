"""The compute thread: what it delivers, in which order, and what an error costs."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator

import pytest
import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.compute.limits import SchedulerLimits
from swarm.compute.task import Forward, Place, Probe, Task, Tenure
from swarm.compute.thread import ComputeThread, deliver
from swarm.errors import ComputeFailed
from tests.compute.support import Cache, Doubling


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread(asyncio.get_running_loop(), threads=1)
    yield thread
    thread.stop()


class Held:
    """A compute thread that runs nothing before `release`: then all tasks are there when it plans."""

    def __init__(self, compute: ComputeThread) -> None:
        self.results: list[tuple[str, object]] = []
        self._compute = compute
        self._go = threading.Event()
        self._pending: list[asyncio.Future[None]] = []
        self.submit("held", Probe(self._go.wait))

    def submit(self, name: str, task: Task) -> None:
        over = asyncio.get_running_loop().create_future()
        self._pending.append(over)

        def done(result: object) -> None:
            self.results.append((name, result))
            over.set_result(None)

        self._compute.submit(task, done)

    async def release(self) -> dict[str, object]:
        """Return all results, in their order, but that of the task that held the thread up."""
        self._go.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*self._pending)
        return {name: result for name, result in self.results if name != "held"}


@pytest.fixture
async def held(compute: ComputeThread) -> Held:
    return Held(compute)


def step(span: Doubling, value: float = 1.0, tenure: Tenure | None = None, keep: int = 0) -> Forward:
    return Forward(tenure or Tenure("peer", span, 0), Activations(torch.full((1, 1, 2), value)), Place(keep))


async def test_steps_of_many_sessions_run_as_one(held: Held):
    span = Doubling()
    for number in range(5):
        held.submit(str(number), step(span, number))
    results = await held.release()
    assert span.calls == [[1] * 5]
    assert {name: float(output[0, 0, 0]) for name, output in results.items()} == {str(n): 2.0 * n for n in range(5)}


async def test_a_sessions_tasks_run_in_order(held: Held):
    span = Doubling()
    tenure = Tenure("peer", span, 0)
    for number in range(4):
        held.submit(str(number), step(span, number, tenure, keep=number))
    assert list(await held.release()) == ["0", "1", "2", "3"]
    assert span.calls == [[1]] * 4
    assert tenure.past.cache.length == 4


async def test_an_error_fails_its_task_alone(held: Held):
    class Broken(Doubling):
        def forward(self, hidden: Tensor, **_: object) -> Tensor:
            raise ValueError("this one breaks")

    works, breaks = Doubling(), Broken(packs=False)
    held.submit("breaks", step(breaks))
    held.submit("works", step(works))
    held.submit("probe breaks", Probe(lambda: 1 / 0))
    results = await held.release()
    assert isinstance(results["breaks"], ValueError)
    assert isinstance(results["probe breaks"], ZeroDivisionError)
    assert float(results["works"][0, 0, 0]) == 2.0


async def test_a_batch_that_fails_runs_one_by_one(held: Held):
    class NotTogether(Doubling):
        def forward_packed(self, segments) -> list[Tensor]:
            raise ValueError("not together")

    span = NotTogether()
    for number in range(3):
        held.submit(str(number), step(span, number))
    results = await held.release()
    assert [float(results[str(number)][0, 0, 0]) for number in range(3)] == [0.0, 2.0, 4.0]
    assert span.calls == [[1]] * 3


async def test_a_past_that_cannot_be_had_fails_its_task_alone(held: Held):
    class Full(Doubling):
        def new_cache(self, rollback_max: int) -> Cache:
            if self.n_caches == 1:
                raise MemoryError
            return super().new_cache(rollback_max)

    span = Full()
    for name in ("fits", "does not"):
        held.submit(name, step(span))
    results = await held.release()
    assert isinstance(results["does not"], MemoryError)
    assert float(results["fits"][0, 0, 0]) == 2.0


async def test_an_output_that_cannot_be_had_fails_its_task(held: Held):
    class NoRoom(Probe):
        def result(self) -> object:
            raise MemoryError

    held.submit("large", NoRoom(lambda: None))
    assert isinstance((await held.release())["large"], MemoryError)


async def test_tasks_that_do_not_count_are_delivered_as_none(held: Held):
    span = Doubling()
    closed = step(span)
    held.submit("closed", closed)
    held.submit("goes on", step(span))
    closed.tenure.over = True
    results = await held.release()
    assert results["closed"] is None
    assert results["goes on"] is not None
    assert span.calls == [[1]]


async def test_an_idle_thread_holds_no_ended_session(compute: ComputeThread):
    """Its cache is large."""
    over = asyncio.get_running_loop().create_future()
    task = step(Doubling())
    tenure = weakref.ref(task.tenure)
    compute.submit(task, lambda _: over.set_result(None))
    await over
    del task
    async with asyncio.timeout(30):
        while tenure() is not None:
            await asyncio.sleep(0.001)


async def test_stop_finishes_what_is_queued(compute: ComputeThread, held: Held):
    held.submit("last", Probe(lambda: "done"))
    results = held.release()
    stopping = asyncio.get_running_loop().run_in_executor(None, compute.stop)
    assert await results == {"last": "done"}
    await stopping


async def test_results_are_handed_out_in_order():
    """Two iterations are over before the loop gets to either; a session is not the first in the first of them."""
    loop, heard = asyncio.get_running_loop(), list[str]()
    loop.call_soon(deliver, [(heard.append, "other, 1"), (heard.append, "session, 3")])
    loop.call_soon(deliver, [(heard.append, "session, 4")])
    await asyncio.sleep(0)
    assert heard == ["other, 1", "session, 3", "session, 4"]


async def test_a_callback_that_raises_keeps_no_other_result():
    loop, heard, told = asyncio.get_running_loop(), list[str](), list[Exception]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

    def breaks(_: object) -> None:
        raise ValueError

    deliver([(breaks, "one"), (heard.append, "another")])
    assert heard == ["another"]
    assert [type(error) for error in told] == [ValueError]


class Poisonous(Probe):
    """A task that the scheduler cannot even look at."""

    @property
    def tenure(self) -> None:
        raise MemoryError("no memory for the scheduler")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_thread_that_ended_by_itself_is_noticed():
    thread = ComputeThread(asyncio.get_running_loop(), threads=1, limits=SchedulerLimits(watch_s=0.01))
    watching = asyncio.create_task(thread.watch())
    await asyncio.sleep(0.05)
    assert not watching.done()
    thread.submit(Poisonous(lambda: None), lambda _: None)
    with pytest.raises(ComputeFailed, match="has ended: MemoryError"):
        async with asyncio.timeout(10):
            await watching


async def test_thread_that_is_stuck_in_a_batch_is_noticed():
    limits = SchedulerLimits(watch_s=0.01, stuck_s=0.1, first_s=0.0)
    thread, go = ComputeThread(asyncio.get_running_loop(), threads=1, limits=limits), threading.Event()
    thread.submit(Probe(go.wait), lambda _: None)
    try:
        with pytest.raises(ComputeFailed, match="at one batch for"):
            async with asyncio.timeout(10):
                await thread.watch()
    finally:
        go.set()
        thread.stop()


async def test_a_thread_of_slow_batches_has_longer_and_one_of_quick_batches_is_stuck_within_ten_seconds():
    limits = SchedulerLimits(watch_s=0.01, stuck_s=0.05, stuck_times=10.0, first_s=0.1)
    thread, go = ComputeThread(asyncio.get_running_loop(), threads=1, limits=limits), threading.Event()
    began = time.perf_counter()
    thread.submit(Probe(go.wait), lambda _: None)
    try:
        with pytest.raises(ComputeFailed, match="at one batch for"):
            async with asyncio.timeout(10):
                await thread.watch()
        assert time.perf_counter() - began >= 1.0, "the longest batch took 0.1 s, so this one may take ten times that"
    finally:
        go.set()
        thread.stop()
    shipped = SchedulerLimits()
    assert shipped.stuck_s + 2 * shipped.watch_s <= 10.0
    assert shipped.stuck_times * 0.05 <= shipped.stuck_s, "a batch is formed to take about 0.05 s"
    assert shipped.stuck_token_times * 0.05 * 32 <= shipped.stuck_s, "32 sessions decode, each as if it were alone"


@pytest.mark.parametrize("n_blocks", [3, 1])
async def test_a_batch_of_many_tokens_may_take_as_long_as_these_did(n_blocks: int):
    """Windows of one peer's sessions make a batch of 512 tokens. Before it come single steps, or fewer blocks'."""

    class Slow(Doubling):
        def forward(self, hidden: Tensor, **more: object) -> Tensor:
            time.sleep(0.01 * len(self.blocks) / 3 if hidden.shape[1] == 1 else 0.6)
            return super().forward(hidden, **more)

    limits = SchedulerLimits(watch_s=0.01, stuck_s=0.1, stuck_times=1.0, first_s=0.0)
    thread, session = ComputeThread(asyncio.get_running_loop(), threads=1, limits=limits), Tenure("peer", Slow(), 0)
    watching = asyncio.create_task(thread.watch())
    part = Slow(blocks=Blocks(2, 2 + n_blocks))
    window = Forward(session, Activations(torch.ones(2, 16, 2)), Place(1))
    for task in (step(session.span, tenure=session), *[step(part) for _ in range(60)], window):
        over: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        thread.submit(task, over.set_result)
        await asyncio.wait((over, watching), return_when=asyncio.FIRST_COMPLETED)
    assert not watching.done(), watching.exception()
    watching.cancel()
    thread.stop()


async def test_a_process_that_stood_still_has_no_stuck_thread():
    limits = SchedulerLimits(watch_s=0.02, stuck_s=0.5, first_s=0.0)
    thread, go = ComputeThread(asyncio.get_running_loop(), threads=1, limits=limits), threading.Event()
    watching = asyncio.create_task(thread.watch())
    thread.submit(Probe(go.wait), lambda _: None)
    try:
        await asyncio.sleep(0.1)
        time.sleep(1.0)
        go.set()
        await asyncio.sleep(0.1)
        assert not watching.done()
    finally:
        watching.cancel()
        go.set()
        thread.stop()


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_that_computes_nothing_any_more_ends_the_thread(is_broken: bool):
    limits, checks = SchedulerLimits(watch_s=0.01), []

    def check() -> None:
        checks.append(True)
        if is_broken:
            raise RuntimeError("an illegal memory access was encountered")

    thread = ComputeThread(asyncio.get_running_loop(), threads=1, limits=limits, check=check)
    watching = asyncio.ensure_future(thread.watch())
    for _ in range(limits.failures_max):
        thread.submit(Probe(lambda: 1 / 0), lambda _: None)
    async with asyncio.timeout(10):
        while not checks:
            await asyncio.sleep(0.01)
        if is_broken:
            with pytest.raises(ComputeFailed, match="illegal memory access"):
                await watching
        else:
            works: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            thread.submit(Probe(lambda: 7), works.set_result)
            assert await works == 7
            watching.cancel()
    thread.stop()


async def test_what_uses_no_device_hides_no_broken_one():
    """Clean-ups come every 15 s; a broken device fails sessions that are farther apart."""
    checks: list[bool] = []
    thread = ComputeThread(asyncio.get_running_loop(), threads=1, check=lambda: checks.append(True))
    for number in range(2 * SchedulerLimits().failures_max):
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        is_chore = number % 2 > 0
        thread.submit(Probe((lambda: 7) if is_chore else (lambda: 1 / 0), is_chore=is_chore), done.set_result)
        await done
    thread.stop()
    assert checks


async def test_failures_among_successes_try_no_device():
    checks: list[bool] = []
    thread = ComputeThread(asyncio.get_running_loop(), threads=1, check=lambda: checks.append(True))
    for number in range(12):
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        thread.submit(Probe((lambda: 1 / 0) if number % 3 else (lambda: 7)), done.set_result)
        await done
    thread.stop()
    assert not checks
