"""Tasks without a model, and the scheduler on a fake clock."""

from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace

import torch
from torch import Tensor

from swarm.blocks import Blocks
from swarm.compute.batch import Ready
from swarm.compute.scheduler import Batch, Idle, Scheduler
from tests.compute.arrivals import Job, Session, World


@dataclass(eq=False)
class Tenure:
    """What the scheduler sees of a session."""

    over: bool = False
    tenant: str | None = None
    n_blocks: int = 1


@dataclass(eq=False)
class Fake:
    """Some positions of a session."""

    owner: str
    tokens: int = 1
    rows: int = 1
    packs: bool = True
    cost: int | None = 1
    tenure: Tenure | None = field(default_factory=Tenure)
    done: int = 0
    has_past: bool = False
    replays: bool = False
    is_skipped: bool = False

    def ready(self, *, decodes: bool) -> Ready:
        return Ready(self.owner, "group", self.rows, self.tokens - self.done, self.packs, decodes=decodes)


def iteration(scheduler: Scheduler, now: float = 0.0, took_s: float = 0.01) -> list[tuple[Fake, int]]:
    """Run one iteration, without lingering. Returns the tasks that ran, and how many positions of each."""
    batch = scheduler.form(now, linger=False)
    if isinstance(batch, Idle):
        return []
    finish(scheduler, batch, now, took_s)
    return [(part.task, part.tokens) for part in batch.parts]


def finish(scheduler: Scheduler, batch: Batch, now: float = 0.0, took_s: float = 0.01, failed=()) -> list[Fake]:
    """Let a batch run, and end at `now`. Returns the tasks that are over."""
    for part in batch.parts:
        if part.task not in failed and not (part.task.tenure and part.task.tenure.over):
            part.task.done += part.tokens
    finished = list(scheduler.ran(batch, failed))
    scheduler.learn(batch, now, took_s, failed)
    return finished


@dataclass(eq=False)
class Cache:
    """Counts positions."""

    length: int = 0


@dataclass(eq=False)
class Doubling:
    """A span that doubles what it gets. calls: the positions of each call; of packed ones, of each session."""

    blocks: Blocks = field(default_factory=lambda: Blocks(2, 5))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    traits: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(has_wide_residual=False))
    packs: bool = True
    n_caches: int = 0
    calls: list[list[int]] = field(default_factory=list)

    def new_cache(self, rollback_max: int) -> Cache:
        del rollback_max
        self.n_caches += 1
        return Cache()

    def forward(self, hidden: Tensor, *, cache: Cache, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        del positions, mask
        self.calls.append([hidden.shape[1]])
        cache.length += hidden.shape[1]
        return 2 * hidden

    def forward_packed(self, segments) -> list[Tensor]:
        self.calls.append([segment.tokens for segment in segments])
        for segment in segments:
            segment.cache.length += segment.tokens
        return [2 * segment.hidden for segment in segments]


class _Arrival:
    """A job of the world as the scheduler sees it."""

    has_past = replays = is_skipped = False

    def __init__(self, job: Job, tenure: Tenure | None) -> None:
        session = job.session
        self.job = job
        self.tenure = tenure
        self.owner = session.owner if session else ""
        self.cost = session.n_blocks if session else None
        self.rows, self.tokens = job.rows, job.tokens

    @property
    def done(self) -> int:
        return self.job.done

    def ready(self, *, decodes: bool) -> Ready:
        session = self.job.session
        if session is None:
            return Ready("", None, 1, 1, packs=False, cuts=False, decodes=decodes)
        tokens = self.tokens - self.done
        decodes = decodes or (tokens == 1 and self.rows <= 32)  # the version before took a prompt's last position so
        return Ready(session.owner, session.group, self.rows, tokens, session.packs, decodes=decodes)


class _Session:
    """A session of the world as the scheduler sees it."""

    tenant = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self.n_blocks = session.n_blocks

    @property
    def over(self) -> bool:
        return self._session.over


def simulate(seed: int, scheduler: Scheduler) -> list[object]:
    """Let a scheduler serve a world. Returns all batches and deliveries, in order."""
    world, tenures = World(seed), {}

    def add(arrived) -> None:
        for job, at in arrived:
            session, tenure = job.session, None
            if session is not None:
                tenure = tenures.setdefault(session.name, _Session(session))
            scheduler.add(_Arrival(job, tenure), at)

    while True:
        add(world.advance(world.now))
        plan = scheduler.form(world.now)
        if isinstance(plan, Idle):
            if world.next_at is None and plan.until == inf:
                return world.log
            add(world.advance(min(plan.until, inf if world.next_at is None else world.next_at)))
            continue
        began, arrived, failed = world.now, [], set()
        if plan.parts:
            jobs, arrived = world.run([(part.task.job, part.tokens) for part in plan.parts])
            failed = {part.task for part in plan.parts if part.task.job in jobs}
        finished = scheduler.ran(plan, failed)
        scheduler.learn(plan, world.now, world.now - began, failed)  # deliveries come out later than this
        if finished:
            world.deliver([(task.job, _outcome(task, failed)) for task in finished])
        add(arrived)


def _outcome(task: _Arrival, failed: set[_Arrival]) -> str:
    if task in failed:
        return "failed"
    return "gone" if task.job.is_gone else "ok"
