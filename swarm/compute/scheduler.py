"""Which tasks the compute thread runs next. Pure: no thread, no queue between threads, no clock; time is passed in.

    scheduler.add(task, now)
    plan = scheduler.form(now)                  # Batch | Idle
    finished = scheduler.ran(plan)              # delivered before anything is learned from it: a client waits
    scheduler.learn(plan, now, took_s)

An iteration is one batch. It takes decode steps of many sessions together, and prefill in pieces beside them under a
budget, so that prefill delays no session's decode by much. Prefill that must run in one piece and is more than its
budget becomes a debt, which later budgets repay. A task that does not pack runs alone when it is its turn.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from swarm.compute.batch import Ready, form_batch
from swarm.compute.costs import Costs
from swarm.compute.limits import CostLimits, SchedulerLimits
from swarm.compute.linger import Linger
from swarm.compute.queues import Queue, Queues
from swarm.compute.task import Task, is_gone


class Part(NamedTuple):
    """The next `tokens` positions of a task. queue: where the task waits. decodes: in a decode step."""

    task: Task
    tokens: int
    queue: Queue
    decodes: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """Prefill tokens of an iteration: as granted, and as left once debts are paid.

    decoding: whether a session decodes, in this iteration or soon after. While none does, nothing is owed.
    """

    granted: int
    left: int
    decoding: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one iteration: one part alone, or several that pack. dropped: tasks that do not count any more.

    Without parts there is nothing to run. Hand it to `Scheduler.ran` in any case.
    """

    parts: Sequence[Part]
    dropped: Sequence[Task]
    budget: Budget = Budget(0, 0, decoding=True)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is to run before `until`, unless a task comes."""

    until: float


class Scheduler:
    """Queues tasks and forms batches of them."""

    def __init__(self, limits: SchedulerLimits | None = None, new_costs: Callable[[CostLimits], Costs] = Costs) -> None:
        """new_costs: makes the learner of one kind of task's cost."""
        self._limits = limits = limits or SchedulerLimits()
        self._queues = Queues(limits)
        self._linger = Linger(limits.linger)
        self._costs: defaultdict[Hashable | None, Costs] = defaultdict(lambda: new_costs(limits.costs))
        self._debt = 0  # prefill tokens that ran beyond their budgets
        self._since: float | None = None  # when this iteration could have begun
        self._odd = 0  # batches in a row that were of others than the largest group that packs
        self.token_s = 0.0  # the longest of late that a batch took, for each of its tokens and of their blocks

    def add(self, task: Task, now: float) -> None:
        """Queue a task behind those of its session. now: when it came."""
        self._linger.arrived(self._queues.add(task), now)

    def form(self, now: float, *, linger: bool = True) -> Batch | Idle:
        """Choose the next iteration's batch. linger: whether it may wait for sessions that are expected back."""
        queues = self._queues
        if not queues:
            return Idle(inf)
        if self._since is None:
            self._since = now
        if linger and (until := self._linger.until(queues.single, self._since, now, queues.replaying)) > now:
            return Idle(until)
        self._since = None
        lone = queues.lone
        if lone is not None and not self._debt and not is_gone(lone.head):
            return Batch((Part(lone.head, lone.head.tokens, lone, decodes=True),), ())
        return self._planned(now)

    def ran(self, batch: Batch, failed: Container[Task] = ()) -> Sequence[Task]:
        """Note that a batch has run. Returns the tasks that are over, which are to be delivered.

        failed: those of its tasks that raised an error.
        """
        if not batch.parts:
            return batch.dropped
        shares = {} if all(part.decodes for part in batch.parts) else self._shares(batch)
        finished = self._queues.ran([part.queue for part in batch.parts], failed, shares)
        return [*batch.dropped, *finished] if batch.dropped else finished

    def learn(self, batch: Batch, now: float, took_s: float, failed: Container[Task] = ()) -> None:
        """Learn from a batch that has ended at `now`: how long it took, and whose next steps will come."""
        self._note_cost(batch.parts, failed, now, took_s)
        # A session that has only got its prompt's output may think long, or never come back.
        steps = [part for part in batch.parts if part.decodes]
        if steps:
            absent = [queue for task, _, queue, _ in steps if task.tenure is not None and not queue.tasks]
            self._linger.delivered(absent, now, took_s)

    def _planned(self, now: float) -> Batch:
        heads, dropped = self._queues.heads(), list[Task]()
        while gone := [queue for queue in heads if is_gone(queue.head)]:  # they would cost an iteration each
            dropped += self._queues.ran(gone, (), {})
            heads = self._queues.heads()
        if not heads:
            return Batch((), dropped)
        ready = [queue.head.ready(decodes=queue.single) for queue in heads]
        self._alternate(heads, ready)
        budget = self._budget(heads, ready, now)
        slices = form_batch(ready, budget.left, self._limits.batch)
        chosen = [(heads[each.index], each.tokens) for each in slices]
        parts = [Part(queue.head, tokens, queue, queue.single) for queue, tokens in chosen]
        return Batch(parts, dropped, budget)

    def _alternate(self, heads: list[Queue], ready: list[Ready]) -> None:
        """Give the largest group that packs its turn: else each odd session delays all of it by an iteration.

        heads, ready: in the order of their turns, which changes.
        """
        groups = Counter(each.group for each in ready if each.packs)
        group, count = groups.most_common(1)[0] if groups else (None, 0)
        if count < 2 or count == len(ready):
            self._odd = 0
            return
        if self._odd >= self._limits.batch.odd_turns:
            at = next(index for index, each in enumerate(ready) if each.packs and each.group == group)
            heads.insert(0, heads.pop(at))
            ready.insert(0, ready.pop(at))
        self._odd = self._odd + 1 if not ready[0].packs or ready[0].group != group else 0

    def _budget(self, heads: Sequence[Queue], ready: Sequence[Ready], now: float) -> Budget:
        """Grant the iteration prefill, and pay debts from it."""
        first, steps = ready[0], [each for each, queue in zip(ready, heads, strict=True) if queue.single]
        if len(steps) == len(heads) and not self._debt:
            return Budget(0, 0, decoding=True)
        beside = sum(
            each.rows * each.tokens for each in steps if first.packs and each.packs and each.group == first.group
        )
        decoding = self._decoding(steps, now)
        costs, stretch = self._costs[heads[0].head.cost], self._stretch(decoding)
        granted = costs.prefill_tokens(beside, decoding=bool(decoding), stretch=stretch)
        if not decoding:
            self._debt = 0
        paid = min(self._debt, granted)
        self._debt -= paid
        return Budget(granted, granted - paid, bool(decoding))

    def _decoding(self, steps: Sequence[Ready], now: float) -> Counter[str]:
        """Count by peer the sessions that prefill would delay: those of these steps, else those expected back soon.

        A peer whose lost pasts wait has none: most of its texts stand still until these are back.
        """
        queues = self._queues
        if queues.replaying:
            steps = [step for step in steps if step.owner not in queues.replaying]
        decoding = Counter(step.owner for step in steps) or queues.expected(now - self._limits.linger.absent_s)
        for owner in queues.replaying:
            del decoding[owner]
        return decoding

    def _stretch(self, decoding: Counter[str]) -> float:
        """Return the share of an iteration that prefill may add, by the prompts of the peers that decode.

        Prompts that come in a burst would trickle in one by one: each would decode alone, and be over before the next
        is in. So a peer's own prompts may delay its own steps, the more of them wait for each of these. The steps of a
        peer that has no prompts waiting are delayed as ever.
        """
        shares = [(self._queues.prompts(owner) - 1) / count for owner, count in decoding.items()]
        return max(0.0, min(shares, default=0.0))

    def _shares(self, batch: Batch) -> dict[str, float]:
        """Return how many times its share of the prefill each peer had; keep the excess over the budget as a debt."""
        prefilled: defaultdict[str, int] = defaultdict(int)
        for task, tokens, _, decodes in batch.parts:
            if not decodes:
                prefilled[task.owner] += tokens * task.rows
        if batch.budget.decoding:
            excess = max(0, sum(prefilled.values()) - batch.budget.left)
            self._debt = min(self._limits.batch.debt_tokens_max, self._debt + excess)
        share = max(1, batch.budget.granted) / max(1, self._queues.n_prefilling)
        return {owner: tokens / share for owner, tokens in prefilled.items()}

    def _note_cost(self, parts: Sequence[Part], failed: Container[Task], now: float, took_s: float) -> None:
        """Note how long a batch took, unless it tells nothing: one of its tasks failed, is gone or is like no other."""
        step_tokens = prefill_tokens = n_blocks = 0
        cost: Hashable | None = None
        for task, tokens, queue, decodes in parts:
            cost, tenure = task.cost, task.tenure
            if cost is None or task in failed or is_gone(task):
                return
            if tenure is not None:
                n_blocks = tenure.n_blocks
            if decodes:
                step_tokens += tokens * task.rows
                queue.stepped_at = now
            else:
                prefill_tokens += tokens * task.rows
        if cost is not None:
            self._costs[cost].observe(step_tokens, prefill_tokens, took_s)
        if n_blocks:
            self.token_s = max(took_s / (step_tokens + prefill_tokens) / n_blocks, 0.9 * self.token_s)
