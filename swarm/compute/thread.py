"""Where the model runs: one thread per span, because a hollow model is not re-entrant.

An iteration takes everything that is queued, runs what `form_batch` chooses as one step of the model, and delivers all
that is finished in one hand-off to the loop. Single steps of many sessions run together, and prefill in pieces beside
them. What is no session's work (a measurement, a replay) runs alone. Each session's work runs in its own order.
"""

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import Empty, SimpleQueue

import structlog
import torch

from swarm.compute.batch import Company, Loan, Pace, Ready, Slice, form_batch
from swarm.compute.task import Done, Forward, Task, Tenure
from swarm.model.packed import Segment

RECENT_S = 1.0  # after a single step, its session is expected back
PREFILLS_SEEN = 64  # of all peers together, when the next iteration is planned
PEERS_REMEMBERED = 4096
SWITCH_S = 0.0005  # torch lets go of the interpreter in every operation, and waits so long for a loop that is busy

_log = structlog.get_logger("swarm.server")


@dataclass(eq=False, slots=True)
class _Item:
    """One submitted job. error: what it raised. result: of a job that is no session's work. at: when it came."""

    job: Task
    done: Done
    at: float
    since: int = 0  # the iteration before which it came
    result: object = None
    error: Exception | None = None

    @property
    def is_single(self) -> bool:
        """Whether it is a single step, or no session's work; the last position of a prompt is not."""
        return not isinstance(self.job, Forward) or self.job.is_single

    @property
    def peer(self) -> str:
        """Whom it is done for."""
        return self.job.tenure.owner if isinstance(self.job, Forward) else ""

    @property
    def ready(self) -> Ready:
        return self.job.ready if isinstance(self.job, Forward) else _JOB

    def run(self, tokens: int) -> None:
        """Run the next positions alone; of a job that is no session's work, all."""
        try:
            if isinstance(self.job, Forward):
                self.job.run(tokens)
            else:
                self.result = self.job.complete()
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails one session, not the server
            self.error = error

    @property
    def is_gone(self) -> bool:
        return isinstance(self.job, Forward) and self.job.is_gone

    @property
    def is_over(self) -> bool:
        return not isinstance(self.job, Forward) or self.job.is_over or self.error is not None

    @property
    def n_blocks(self) -> int:
        """How many it runs through; 0 where it is no session's work."""
        return len(self.job.tenure.span.blocks) if isinstance(self.job, Forward) else 0

    def outcome(self) -> object:
        """What is delivered."""
        try:
            if self.error is None and isinstance(self.job, Forward):
                return self.job.result()
        except Exception as error:  # noqa: BLE001 - as above
            self.error = error
        return self.error or self.result


_JOB = Ready(peer="", group=None, rows=1, tokens=1, packs=False, cuts=False)
_Batch = Sequence[tuple[_Item, Slice]]
_NO_PARTS: Mapping[str, float] = {}


class ComputeThread:
    """The executor of a real server. Its queue is bounded by the sessions' windows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int | None = None) -> None:
        """threads: how many cores one operation may use; None leaves torch's own choice."""
        self._loop = loop
        self._threads = threads
        self._jobs: SimpleQueue[_Item | None] = SimpleQueue()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, task: Task, done: Done) -> None:
        """Queue a task."""
        self._jobs.put(_Item(task, done, time.perf_counter()))

    def stop(self) -> None:
        """Finish what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():  # entered once: entering it for every step costs 15 % of a small one
            iterations = _Iterations(self._jobs)
            while iterations.wait():
                self._deliver(iterations.run())

    def _deliver(self, finished: Sequence[tuple[Done, object]]) -> None:
        if not finished:
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(_tell, finished)


def _tell(finished: Sequence[tuple[Done, object]]) -> None:
    """In the loop: hand results to whoever waits, in order. One that breaks must not keep the others from theirs.

    Nothing is put off: a session's next result may be waiting behind this call.
    """
    for done, result in finished:
        try:
            done(result)
        except Exception as error:  # noqa: BLE001 - as the loop does with what it calls
            context = {"message": "a result was not taken", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


class _Waiting:
    """What waits, by session: of each the first work can run next.

    Anybody may queue much prefill. So it is kept by peer, and only the first of each peer's are looked at; what was
    begun is finished first.
    """

    def __init__(self) -> None:
        self._items: dict[object, deque[_Item]] = {}  # by session, the next one first
        self._single: dict[object, None] = {}  # sessions that wait for a single step, and what is no session's work
        self._long: dict[str, dict[object, None]] = {}  # the others, by peer, in the order in which they came
        self._served: dict[tuple[str, bool], float] = {}  # peers' single steps, or prefill: their last iteration
        self._n_iterations = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def __contains__(self, session: object) -> bool:
        return session in self._items

    @property
    def single(self) -> Collection[object]:
        """Sessions that wait for a single step."""
        return self._single.keys()

    def add(self, item: _Item) -> None:
        """Queue it behind what its session has."""
        item.since = self._n_iterations
        items = self._items.setdefault(_key(item), deque())
        items.append(item)
        if len(items) == 1:
            self._file(_key(item), item)

    def heads(self) -> list[_Item]:
        """What can run next, in order: whoever waits longest, or was served longest ago, goes first."""
        of_each = max(1, PREFILLS_SEEN // max(1, len(self._long)))
        keys = [*self._single, *(key for sessions in self._long.values() for key in islice(sessions, of_each))]
        return sorted((self._items[key][0] for key in keys), key=self._turn)

    @property
    def n_prefilling(self) -> int:
        """How many peers wait for prefill."""
        return len(self._long)

    def ran(self, items: Iterable[_Item], parts: Mapping[str, float] = _NO_PARTS) -> list[_Item]:
        """Note that these heads had their part of an iteration. Returns those that are over, which wait no more.

        parts: how many times its part of an iteration's prefill each peer had, which waits so much longer for the next.
        """
        self._n_iterations += 1
        over = []
        for item in items:
            more = 0.0 if item.is_single else max(0.0, parts.get(item.peer, 0.0) - 1.0)
            self._served[item.peer, item.is_single] = self._n_iterations + more
            if not item.is_over:
                continue  # it keeps its place
            over.append(item)
            key = _key(item)
            self._unfile(key, item.peer)
            queue = self._items[key]
            queue.popleft()
            if queue:
                self._file(key, queue[0])
            else:
                del self._items[key]
        if len(self._served) > PEERS_REMEMBERED:
            waiting = {(items[0].peer, items[0].is_single) for items in self._items.values()}
            self._served = {of: at for of, at in self._served.items() if of in waiting}
        return over

    def _file(self, key: object, head: _Item) -> None:
        sessions = self._single if head.is_single else self._long.setdefault(head.peer, {})
        sessions[key] = None

    def _unfile(self, key: object, peer: str) -> None:
        if key in self._single:
            del self._single[key]
            return
        del self._long[peer][key]
        if not self._long[peer]:
            del self._long[peer]

    def _turn(self, item: _Item) -> float:
        served = self._served.get((item.peer, item.is_single), 0)
        return max(item.since, served) if item.is_single else served  # many that run alone are not all before others'


class _Iterations:
    """What the compute thread has to do, what it learned about it, and the doing."""

    def __init__(self, jobs: SimpleQueue[_Item | None]) -> None:
        self._jobs = jobs
        self._waiting = _Waiting()
        self._stopping = False
        self._paces: defaultdict[int, Pace] = defaultdict(Pace)  # by the number of blocks
        self._loan = Loan()
        self._company = Company()
        self._decoded_at: weakref.WeakKeyDictionary[Tenure, float] = weakref.WeakKeyDictionary()

    def wait(self) -> bool:
        """Wait for something to do, and then a moment for company. False: there will be nothing any more."""
        if not self._waiting and not self._stopping:
            self._add(self._jobs.get())
        self._take_all()
        since = now = time.perf_counter()
        while (wait_s := self._linger_s(since, now)) > 0 and not self._stopping:
            with contextlib.suppress(Empty):
                self._add(self._jobs.get(timeout=wait_s))
                self._take_all()
            now = time.perf_counter()
        return bool(self._waiting)

    def _linger_s(self, since: float, now: float) -> float:
        single = self._waiting.single
        return self._company.wait_s(single, since, now, decoding=len(single) > 0)

    def run(self) -> list[tuple[Done, object]]:
        """Run one iteration. Returns what is finished, with its results."""
        heads, over = self._waiting.heads(), list[_Item]()
        while gone := [item for item in heads if item.is_gone]:  # they would cost an iteration each
            over += self._waiting.ran(gone)
            heads = self._waiting.heads()
        if not heads:
            return [(item.done, item.outcome()) for item in over]
        ready = [item.ready for item in heads]
        first, steps = ready[0], [each for each, item in zip(ready, heads, strict=True) if item.is_single]
        beside = sum(each.rows for each in steps if first.packs and each.packs and each.group == first.group)
        decoding = len(steps) > 0 or self._expects_others()
        tokens = self._paces[heads[0].n_blocks].prefill_tokens(beside, decoding=decoding)
        budget = self._loan.budget(tokens, decoding=decoding)
        slices = form_batch(ready, budget)
        batch = [(heads[each.index], each) for each in slices]
        began = time.perf_counter()
        if len(batch) == 1:
            ((item, each),) = batch
            item.run(each.tokens)
        else:
            _run_together(batch)
        now = time.perf_counter()
        self._learn(batch, ready, now, now - began)
        prefilled: defaultdict[str, int] = defaultdict(int)
        for item, each in batch:
            if not item.is_single:
                prefilled[item.peer] += each.tokens * ready[each.index].rows
        if decoding:
            self._loan.lend(sum(prefilled.values()), budget)
        of_each = max(1, tokens) / max(1, self._waiting.n_prefilling)
        parts = {peer: amount / of_each for peer, amount in prefilled.items()}
        ran = self._waiting.ran((item for item, _ in batch), parts)
        over += ran
        single = [item for item in ran if item.is_single]
        absent = [key for item in single if (key := _key(item)) not in self._waiting and key is not item]
        if single:  # who has got but a prompt's last part may think long, or never come back
            self._company.delivered(absent, now, now - began)
        return [(item.done, item.outcome()) for item in over]

    def _learn(self, batch: "_Batch", ready: Sequence[Ready], now: float, took_s: float) -> None:
        """Note how long it took. ready: as the planner saw what waited, before it ran."""
        decodes = prefill_tokens = 0
        for item, each in batch:
            if not isinstance(item.job, Forward) or item.is_gone or item.error is not None:
                return  # it tells nothing of the others
            if item.is_single:
                decodes += ready[each.index].rows
                self._decoded_at[item.job.tenure] = now
            else:
                prefill_tokens += each.tokens * ready[each.index].rows
        self._paces[batch[0][0].n_blocks].observe(decodes, prefill_tokens, took_s)

    def _expects_others(self) -> bool:
        """Whether a session that waits for nothing now will soon want its next single step."""
        since = time.perf_counter() - RECENT_S
        return any(
            at > since and not tenure.over and tenure not in self._waiting for tenure, at in self._decoded_at.items()
        )

    def _take_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._add(self._jobs.get_nowait())

    def _add(self, item: _Item | None) -> None:
        if item is None:
            self._stopping = True
            return
        self._waiting.add(item)
        self._company.arrived(_key(item), item.at)


def _key(item: _Item) -> object:
    return item.job.tenure if isinstance(item.job, Forward) else item


def _run_together(batch: _Batch) -> None:
    """Run session work as one packed step; where that fails, one by one, so that it fails only who is to blame."""
    running: list[tuple[_Item, Forward, Segment, int]] = []
    for item, each in batch:
        assert isinstance(item.job, Forward)
        try:
            segment = item.job.segment(each.tokens)
        except Exception as error:  # noqa: BLE001 - fails one session, not the server
            item.error = error
        else:
            if segment is not None:
                running.append((item, item.job, segment, each.tokens))
    if not running:
        return
    try:
        outputs = running[0][1].tenure.span.forward_packed([segment for _, _, segment, _ in running])
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("a batch failed, its steps run one by one", sessions=len(running), error=type(error).__name__)
        for item, _, _, tokens in running:
            item.run(tokens)
        return
    for (_, work, _, _), output in zip(running, outputs, strict=True):
        work.take(output)
