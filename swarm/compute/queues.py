"""The tasks that wait, one queue for each session, and whose turn it is. Pure.

Any peer may queue much prefill. So prefill is kept by peer, and the planner looks only at the first queues of each
peer. A peer finishes the prefill that it has begun; one that names tenants does so for each of them, in turn.
"""

import weakref
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from itertools import islice, zip_longest
from math import inf

from swarm.compute.limits import SchedulerLimits
from swarm.compute.linger import Presence
from swarm.compute.task import Task, Tenure, is_gone


class Queue(Presence):
    """The tasks of one session, or one task that belongs to none. The facts of its head are fields.

    single: whether the head is a decode step (`BatchLimits.decodes`). since: how many iterations were over when the
    head came. stepped_at: when the session's last decode step ran.
    """

    __slots__ = ("_tenure", "head", "since", "single", "stepped_at", "tasks", "tenant")

    head: Task  # while one waits

    def __init__(self, tenure: Tenure | None, owner: str) -> None:
        """owner: the peer whose session it is."""
        super().__init__(owner)
        self.tenant = None if tenure is None else tenure.tenant
        self._tenure = None if tenure is None else weakref.ref(tenure)  # a queue keeps no cache in memory
        self.tasks: deque[tuple[Task, int]] = deque()  # the head first, each with the number of iterations before it
        self.single = False
        self.since = 0
        self.stepped_at = -inf

    @property
    def is_alive(self) -> bool:
        """Whether its session goes on."""
        tenure = None if self._tenure is None else self._tenure()
        return tenure is not None and not tenure.over


class Tenants:
    """One peer's queues whose heads are prefill, by tenant. The tenant that was served longest ago goes first."""

    def __init__(self) -> None:
        self.n_queues = 0
        self._of: dict[str | None, dict[Queue, None]] = {}  # the tenant whose turn it is first; queues as they came

    def add(self, queue: Queue) -> None:
        """Put a queue behind those of its tenant."""
        self._of.setdefault(queue.tenant, {})[queue] = None
        self.n_queues += 1

    def remove(self, queue: Queue) -> None:
        """Forget a queue."""
        queues = self._of[queue.tenant]
        del queues[queue]
        if not queues:
            del self._of[queue.tenant]
        self.n_queues -= 1

    def served(self, queue: Queue) -> None:
        """Put its tenant behind the others."""
        self._of[queue.tenant] = self._of.pop(queue.tenant)

    def first(self, count: int) -> list[Queue]:
        """Return the queues whose turn it is: the first of every tenant before the second of any."""
        rounds = zip_longest(*(islice(queues, count) for queues in self._of.values()))
        return list(islice((queue for each in rounds for queue in each if queue is not None), count))


class Queues:
    """All queues, and the order in which their heads run."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._of: weakref.WeakKeyDictionary[Tenure, Queue] = weakref.WeakKeyDictionary()
        self.single: dict[Queue, None] = {}  # those whose head is single
        self.replaying: Counter[str] = Counter()  # by peer, those whose head is a past that was lost; no zeros
        self._long: dict[str, Tenants] = {}  # the others, by peer
        self._served: dict[tuple[str, bool], float] = {}  # peers' single steps, or prefill: their last iteration
        self._n_iterations = 0

    @property
    def n_prefilling(self) -> int:
        """How many peers wait for prefill."""
        return len(self._long)

    @property
    def lone(self) -> Queue | None:
        """The only queue in which anything waits, if its head is single."""
        return next(iter(self.single)) if len(self.single) == 1 and not self._long else None

    def __bool__(self) -> bool:
        return bool(self.single or self._long)

    def add(self, task: Task) -> Queue:
        """Queue a task behind those of its session. Returns its queue."""
        queue = None if task.tenure is None else self._of.get(task.tenure)
        if queue is None:
            queue = Queue(task.tenure, task.owner)
            if task.tenure is not None:
                self._of[task.tenure] = queue
        queue.tasks.append((task, self._n_iterations))
        if len(queue.tasks) == 1:
            self._file(queue)
        return queue

    def heads(self) -> list[Queue]:
        """Return the queues whose heads can run next, in the order of their turns.

        A peer that waits for longest, or was served longest ago, goes first.
        """
        of_each = max(1, self._limits.prefills_seen // max(1, len(self._long)))
        queues = [*self.single, *(queue for of_peer in self._long.values() for queue in of_peer.first(of_each))]
        return sorted(queues, key=self._turn)

    def expected(self, since: float) -> Counter[str]:
        """Count by peer the sessions that have decoded later than that, are alive, and have nothing waiting."""
        return Counter(
            queue.owner
            for queue in self._of.values()
            if queue.stepped_at > since and not queue.tasks and queue.is_alive
        )

    def prompts(self, owner: str) -> int:
        """How many prompts of a peer wait."""
        return self._long[owner].n_queues if owner in self._long else 0

    def ran(self, queues: Iterable[Queue], failed: Container[Task], shares: Mapping[str, float]) -> list[Task]:
        """Note that these heads had their part of an iteration. Returns those that are over, which wait no more.

        shares: how many times its share of an iteration's prefill each peer had, which waits so much longer for the
        next.
        """
        self._n_iterations += 1
        over = []
        for queue in queues:
            task = queue.head
            more = 0.0 if queue.single else max(0.0, shares.get(task.owner, 0.0) - 1.0)
            self._served[task.owner, queue.single] = self._n_iterations + more
            if not queue.single:
                self._long[task.owner].served(queue)
            if task in failed or task.done == task.tokens or is_gone(task):  # else it keeps its place
                over.append(task)
                self._pop(queue)
        if len(self._served) > self._limits.peers_remembered:
            waiting = {(queue.head.owner, queue.single) for queue in self._of.values() if queue.tasks}
            self._served = {turn: at for turn, at in self._served.items() if turn in waiting}
        return over

    def _file(self, queue: Queue) -> None:
        """Give a queue with a new head its place."""
        queue.head, queue.since = task, _ = queue.tasks[0]
        queue.single = self._limits.batch.decodes(task.rows, task.tokens, has_past=task.has_past)
        if queue.single:
            self.single[queue] = None
        else:
            self._long.setdefault(task.owner, Tenants()).add(queue)
            if task.replays:
                self.replaying[task.owner] += 1

    def _pop(self, queue: Queue) -> None:
        """Remove a queue's head."""
        task = queue.tasks.popleft()[0]
        if queue.single:
            del self.single[queue]
        else:
            of_peer = self._long[task.owner]
            of_peer.remove(queue)
            if task.replays:
                self.replaying -= Counter((task.owner,))
            if not of_peer.n_queues:
                del self._long[task.owner]
        if queue.tasks:
            self._file(queue)
        else:
            del queue.head  # or the queue would keep its tenure alive

    def _turn(self, queue: Queue) -> float:
        served = self._served.get((queue.head.owner, queue.single), 0)
        return max(queue.since, served) if queue.single else served  # many that run alone are not all before others'
