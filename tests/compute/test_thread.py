"""What the compute thread delivers, and in which order."""

import asyncio
from collections import Counter
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from swarm.server.work import SessionWork

from swarm.activations import Activations
from swarm.compute import thread as executor_module
from swarm.compute.batch import Company, Pace, Ready, Slice
from swarm.compute.thread import PREFILLS_SEEN, _Item, _Iterations, _tell, _Waiting


async def test_a_sessions_results_come_in_order_however_they_were_batched():
    """Two iterations are over before the loop gets to either; the session is not the first in the first of them."""
    loop, heard = asyncio.get_running_loop(), list[str]()
    loop.call_soon(_tell, [(heard.append, "other, 1"), (heard.append, "session, 3")])
    loop.call_soon(_tell, [(heard.append, "session, 4")])
    await asyncio.sleep(0)
    assert heard == ["other, 1", "session, 3", "session, 4"]


async def test_a_result_that_is_not_taken_keeps_no_other_from_being_delivered():
    loop, heard, told = asyncio.get_running_loop(), list[str](), list[Exception]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

    def breaks(_: object) -> None:
        raise ValueError

    _tell([(breaks, "one"), (heard.append, "another")])
    assert heard == ["another"]
    assert [type(error) for error in told] == [ValueError]


def test_who_comes_while_others_run_is_back_when_it_asked_and_not_when_it_was_seen(monkeypatch: pytest.MonkeyPatch):
    """Else a group that waits for another's iteration seems to be away for so long, and is never waited for."""
    seen: list[float] = []
    monkeypatch.setattr(Company, "arrived", lambda _, __, now: seen.append(now))
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    jobs.put(_Item(lambda: None, lambda _: None, 12.5))
    assert _Iterations(jobs).wait()
    assert seen == [12.5]


class Somebody:
    """A session, as far as iterations look at it."""

    closed = False

    def __init__(self, name: str, n_blocks: int = 1) -> None:
        self.id = self.peer = name
        self.owner = self
        self.span = SimpleNamespace(blocks=range(n_blocks), packs=True)


class Work(SessionWork):
    """Some positions of a session, alone in their iteration."""

    rows = 1

    def __init__(self, name: str, tokens: int) -> None:
        self.session = Somebody(name)  # type: ignore[assignment]
        self.all = self.left = tokens
        self.gone = False

    @property
    def ready(self) -> Ready:
        return Ready(self.session.id, 0, 1, self.left, packs=False)

    def run(self, tokens: int) -> None:
        self.left = max(0, self.left - tokens)

    @property
    def tokens(self) -> int:
        return self.all

    @property
    def is_gone(self) -> bool:
        return self.gone

    @property
    def is_over(self) -> bool:
        return self.gone or self.left == 0

    def result(self) -> None:
        return None


class Packs(Work):
    """Some that run together with others'."""

    @property
    def ready(self) -> Ready:
        return Ready(self.session.id, 0, self.rows, self.left)


def test_who_decodes_is_waited_for_and_who_has_got_but_a_prompt_is_not(monkeypatch: pytest.MonkeyPatch):
    """Else whoever opens sessions, and never comes back, makes others wait after every prompt."""
    delivered: list[list[object]] = []
    monkeypatch.setattr(Company, "delivered", lambda _, sessions, *__, **___: delivered.append(list(sessions)))
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    jobs.put(_Item(Work("hoards", 5), lambda _: None, 0.0))
    jobs.put(_Item(Work("decodes", 1), lambda _: None, 0.0))
    iterations = _Iterations(jobs)
    while not jobs.empty() or iterations._waiting:
        iterations.wait()
        iterations.run()
    assert delivered == [[("decodes", "decodes")]]


def test_what_nobody_wants_any_more_costs_no_iteration(monkeypatch: pytest.MonkeyPatch):
    """Else whoever asks much and leaves, or forgets it again, makes others wait for what is computed for nobody."""
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    left, kept = [Work("leaves", 1) for _ in range(3)], Work("stays", 1)
    for work in (*left, kept):
        work.gone = work is not kept
        jobs.put(_Item(work, lambda _: None, 0.0))
    iterations = _Iterations(jobs)
    assert iterations.wait()
    assert len(iterations.run()) == 4
    assert (kept.left, [work.left for work in left]) == (0, [1, 1, 1])
    assert not iterations._waiting


def prefill(peer: str, session: str, tokens: int = 100) -> _Item:
    work = Work(session, tokens)
    work.session.owner = Somebody(peer)  # type: ignore[assignment]
    return _Item(work, lambda _: None, 0.0)


def test_peers_take_turns_at_prefill_and_each_finishes_what_it_has_begun() -> None:
    waiting = _Waiting()
    greedy = [prefill("greedy", f"g{number}") for number in range(3)]
    modest = prefill("modest", "m")
    for item in (*greedy, modest):
        waiting.add(item)
    first_each = []
    for _ in range(6):
        item = waiting.heads()[0]
        first_each.append(item)
        item.run(50)
        waiting.ran([item])
    assert first_each == [greedy[0], modest, greedy[0], modest, greedy[1], greedy[1]]


def test_a_long_queue_is_not_looked_at_as_a_whole_and_hides_nobody() -> None:
    waiting = _Waiting()
    for number in range(1000):
        waiting.add(prefill("greedy", f"g{number}"))
    waiting.add(prefill("modest", "m"))
    waiting.add(prefill("decodes", "d", tokens=1))
    heads = waiting.heads()
    assert len(heads) <= PREFILLS_SEEN + 1
    assert {"greedy", "modest", "decodes"} == {item.peer for item in heads}


def test_a_session_that_is_served_alone_waits_for_its_turn_and_not_longer() -> None:
    """Work that runs with no other goes when it is first: neither may come before the other for ever."""
    waiting = _Waiting()
    waiting.add(prefill("one", "long", tokens=1000))
    ran = []
    for number in range(6):
        waiting.add(prefill("one", f"single {number}", tokens=1))
        item = waiting.heads()[0]
        ran.append(item.is_single)
        item.run(1)
        waiting.ran([item])
    assert 2 <= sum(ran) <= 4


def test_however_many_peers_come_and_go_those_that_wait_keep_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "PEERS_REMEMBERED", 1)
    waiting = _Waiting()
    was_served, waits = prefill("was served", "w"), prefill("waits", "x")
    for number in range(4):
        waiting.add(over := prefill(f"gone {number}", f"g{number}", tokens=2))
        over.run(2)
        if number == 3:
            waiting.add(was_served)
            waiting.ran([over, was_served])
        else:
            waiting.ran([over])
    waiting.add(waits)
    assert waiting.heads() == [waits, was_served]
    assert set(waiting._served) == {("was served", False)}


def test_nothing_is_left_of_what_is_over() -> None:
    waiting = _Waiting()
    for item in (prefill("a", "a1", 2), prefill("a", "a1", 1), prefill("b", "b1", 1)):
        waiting.add(item)
    while waiting:
        heads = waiting.heads()
        for item in heads:
            item.run(2)
        waiting.ran(heads)
    assert (waiting._items, waiting._long, waiting._single) == ({}, {}, {})


def test_many_steps_that_run_alone_are_not_all_before_anothers() -> None:
    """Masks, and parts of the span, cannot run with others: whoever sends many of them would stop everybody else."""
    waiting = _Waiting()
    for number in range(20):
        waiting.add(prefill("greedy", f"g{number}", tokens=1))
    waiting.ran([])  # an iteration of others
    waiting.add(prefill("modest", "m", tokens=1))
    ran = []
    for _ in range(4):
        item = waiting.heads()[0]
        ran.append(item.peer)
        item.run(1)
        waiting.ran([item])
    assert ran == ["greedy", "modest", "greedy", "greedy"]


def test_what_is_closed_while_it_runs_is_delivered_all_the_same() -> None:
    """Else what it holds would be held for ever."""

    class ClosedMeanwhile(Work):
        """Prefill whose session is closed right after somebody has asked whether it is over."""

        asked = 0

        @property
        def is_over(self) -> bool:
            self.asked += 1
            return self.asked > 1

    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    delivered: list[str] = []
    jobs.put(_Item(ClosedMeanwhile("closes", 5), lambda _: delivered.append("closes"), 0.0))
    iterations = _Iterations(jobs)
    while not jobs.empty() or iterations._waiting:
        iterations.wait()
        _tell(iterations.run())
    assert delivered == ["closes"]


def test_an_output_that_cannot_be_had_fails_its_step_and_not_the_thread() -> None:
    class NoRoomForIt(Work):
        def result(self) -> None:
            raise MemoryError

    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    jobs.put(_Item(NoRoomForIt("large", 1), lambda _: None, 0.0))
    iterations = _Iterations(jobs)
    iterations.wait()
    assert [type(result) for _, result in iterations.run()] == [MemoryError]


def test_looking_at_what_waits_makes_no_cache_and_keeps_dtypes_apart() -> None:
    session = Somebody("a")
    session.generation, session.is_masked = 0, False  # type: ignore[attr-defined]
    works = [
        SessionWork(session, 0, None, None, Activations(torch.zeros(1, 1, 4, dtype=dtype)))  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.bfloat16, torch.float32)
    ]
    groups = [work.ready.group for work in works]
    assert groups[0] == groups[2] != groups[1]


def test_a_part_of_the_span_tells_nothing_of_the_whole_and_what_failed_tells_nothing() -> None:
    def pace_after(*works: Work) -> dict[int, dict[int, float]]:
        jobs: SimpleQueue[_Item | None] = SimpleQueue()
        for work in works:
            jobs.put(_Item(work, lambda _: None, 0.0))
        iterations = _Iterations(jobs)
        while not jobs.empty() or iterations._waiting:
            iterations.wait()
            iterations.run()
        return {n_blocks: pace._decode_s for n_blocks, pace in iterations._paces.items() if pace._decode_s}

    class Breaks(Work):
        def run(self, tokens: int) -> None:
            raise ValueError

    part, whole = Work("part", 1), Work("whole", 1)
    part.session, whole.session = Somebody("part", 1), Somebody("whole", 12)  # type: ignore[assignment]
    assert set(pace_after(part, whole)) == {1, 12}
    assert pace_after(Breaks("breaks", 1)) == {}


def test_prefill_is_planned_by_the_steps_that_it_runs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, learned = list[tuple[int, bool]](), list[tuple[int, int]]()

    def plan(_: Pace, decodes: int, *, decoding: bool) -> int:
        planned.append((decodes, decoding))
        return 8

    def run_all(batch: list[tuple[_Item, Slice]]) -> None:
        for item, each in batch:
            item.run(each.tokens)

    decoder, prompt = Packs("three rows decode", 1), Packs("prefills", 16)
    decoder.rows = 3
    monkeypatch.setattr(Pace, "prefill_tokens", plan)
    monkeypatch.setattr(Pace, "observe", lambda _, decodes, tokens, __: learned.append((decodes, tokens)))
    monkeypatch.setattr(executor_module, "_run_together", run_all)
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    for work in (decoder, prompt):
        jobs.put(_Item(work, lambda _: None, 0.0))
    iterations = _Iterations(jobs)
    while iterations._waiting or not jobs.empty():
        iterations.wait()
        iterations.run()
    assert planned == [(3, True), (0, True)]  # who has decoded is expected back
    assert learned == [(3, 8), (0, 8)]


def test_a_session_does_not_wait_behind_what_somebody_else_left_under_its_name() -> None:
    """Whoever had taken its name gives way; what was queued for it would be seen only behind all else of that peer."""
    waiting = _Waiting()
    for number in range(2 * PREFILLS_SEEN):
        waiting.add(prefill("evil", f"e{number}"))
    left, mine = prefill("evil", "name"), prefill("owner", "name", tokens=1)
    left.job.gone = True  # type: ignore[attr-defined]
    waiting.add(left)
    waiting.add(mine)
    assert mine in waiting.heads()


@pytest.mark.parametrize("wide", [1, 3])
@pytest.mark.parametrize("budget", [4, 64, 300])
def test_peers_get_the_same_of_the_prefill_whatever_number_of_rows_they_have(
    monkeypatch: pytest.MonkeyPatch, budget: int, wide: int
) -> None:
    """A position of many rows takes the turns of many iterations: so others have theirs before its next one."""

    def run_all(batch: list[tuple[_Item, Slice]]) -> None:
        for item, each in batch:
            assert isinstance(item.job, Packs)
            had[item.peer] += each.tokens * item.job.rows
            item.run(each.tokens)

    had: Counter[str] = Counter()
    monkeypatch.setattr(Pace, "prefill_tokens", lambda *_, **__: budget)
    monkeypatch.setattr(executor_module, "_run_together", run_all)
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    iterations = _Iterations(jobs)
    narrow, batches = Packs("narrow", 1 << 30), [Packs(f"wide {number}", 1) for number in range(wide)]
    jobs.put(_Item(narrow, lambda _: None, 0.0))
    for work in batches:
        work.rows, work.left = 256, 0
    for _ in range(8000 // budget + 1000):
        jobs.put(_Item(Packs("decodes", 1), lambda _: None, 0.0))
        for work in batches:
            if not work.left:
                work.left = 1  # the next position, at once
                jobs.put(_Item(work, lambda _: None, 0.0))
        iterations.wait()
        iterations.run()
    assert had["narrow"] >= 0.75 * max(had[work.session.id] for work in batches)
    assert min(had[work.session.id] for work in batches) >= 0.5 * had["narrow"]


def test_a_batch_of_many_rows_goes_on_beside_others_steps_and_takes_no_more_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A position of so many rows is one piece. It had counted as a single step, and all others' waited for all rows."""

    def run_all(batch: list[tuple[_Item, Slice]]) -> None:
        ran.append([item.job.session.id for item, _ in batch])
        for item, each in batch:
            item.run(each.tokens)

    ran: list[list[str]] = []
    monkeypatch.setattr(Pace, "prefill_tokens", lambda *_, **__: 4)
    monkeypatch.setattr(executor_module, "_run_together", run_all)
    jobs: SimpleQueue[_Item | None] = SimpleQueue()
    iterations = _Iterations(jobs)
    wide = Packs("wide", 1)
    wide.rows = 64
    jobs.put(_Item(wide, lambda _: None, 0.0))
    jobs.put(_Item(Packs("prefills", 400), lambda _: None, 0.0))
    for _ in range(100):
        jobs.put(_Item(Packs("decodes", 1), lambda _: None, 0.0))
        iterations.wait()
        iterations.run()
        if not wide.left:
            wide.left = 1  # the next position, at once
            jobs.put(_Item(wide, lambda _: None, 0.0))
    together = [names for names in ran if "decodes" in names]
    assert 4 <= sum("wide" in names for names in ran) <= 7  # 64 tokens of 4 an iteration: one in sixteen, if alone
    assert max(len(names) for names in together) == 2
