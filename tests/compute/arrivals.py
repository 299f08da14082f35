"""A server's work on a fake clock: peers come and go, and each session's next task waits for its last one's output.

The world decides when tasks arrive, how long an iteration takes and which tasks fail; the scheduler under test decides
only what runs. So two schedulers that choose alike see the same world, down to the last batch.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

ENDS_S = 20.0  # no session begins later


@dataclass(eq=False)
class Job:
    """One task of a session, or a probe."""

    number: int
    session: "Session | None"
    rows: int = 1
    tokens: int = 1
    fails: bool = False
    done: int = 0

    @property
    def is_gone(self) -> bool:
        return self.session is not None and self.session.over


@dataclass(eq=False)
class Session:
    """A session's place in the world. turns: of each the tokens of its prompt's pieces, and how many steps follow."""

    name: str
    owner: str
    rows: int
    n_blocks: int
    group: object
    packs: bool
    away_s: float
    rng: random.Random
    turns: list[tuple[list[int], int]]
    over: bool = False
    waiting: int = 0
    steps_left: int = 0


@dataclass(eq=False)
class World:
    """Arrivals and their clock."""

    seed: int
    now: float = 0.0
    log: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._noise = random.Random(self.seed + 1)
        self._numbers, self._order = count(), count()
        self._events: list[tuple[float, int, Job | Callable[[], None]]] = []
        self._n_peers = self._rng.choice([1, 2, 5, 12])
        self._piece_s = self._rng.choice([0.0, 0.001, 0.010])
        self._step_s = self._rng.choice([0.003, 0.015, 0.045])
        self._alike = self._rng.random() < 0.3  # all sessions are alike: they pack
        for _ in range(self._rng.choice([1, 3, 10, 40])):
            self._at(self._rng.uniform(0, 2), self._begin)
        if not self._alike:
            self._at(0.5, self._probe)

    # Time

    @property
    def next_at(self) -> float | None:
        """When the next task arrives or a session is closed."""
        return self._events[0][0] if self._events else None

    def advance(self, to: float) -> list[tuple[Job, float]]:
        """Let time pass. Returns the jobs that arrive until then, and when."""
        arrived = []
        while self._events and self._events[0][0] <= to:
            at, _, event = heapq.heappop(self._events)
            self.now = max(self.now, at)
            if isinstance(event, Job):
                arrived.append((event, at))
            else:
                event()
        self.now = max(self.now, to)
        return arrived

    # The machine

    def run(self, parts: Sequence[tuple[Job, int]]) -> tuple[list[Job], list[tuple[Job, float]]]:
        """Run one iteration. Returns those that failed, and what arrives meanwhile."""
        self.log.append([round(self.now, 6), *((job.number, tokens) for job, tokens in parts)])
        running = [(job, tokens) for job, tokens in parts if not job.is_gone]
        rows = sum(job.rows for job, tokens in running if job.tokens == 1)
        prefill = sum(job.rows * tokens for job, tokens in running if job.tokens > 1)
        took_s = self._step_s * (1 + rows / 50) + (self._piece_s + 0.0003 * prefill if prefill else 0.0)
        took_s *= self._noise.lognormvariate(0, 0.1)
        if self._noise.random() < 0.02:
            took_s += 0.05
        arrived = self.advance(self.now + took_s)
        failed = []
        for job, tokens in running:
            if job.fails:
                failed.append(job)
            else:
                job.done += tokens
        return failed, arrived

    def deliver(self, finished: Sequence[tuple[Job, str]]) -> None:
        """Take results; their sessions go on."""
        self.log.append([(job.number, outcome) for job, outcome in finished])
        for job, _ in finished:
            if job.session is not None:
                self._go_on(job.session)

    # Peers

    def _at(self, at: float, event: Job | Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _begin(self) -> None:
        if self.now > ENDS_S:
            return
        rng = random.Random(self._rng.random())
        part = rng.random() < 0.2 and not self._alike
        turns = [(self._pieces(rng), rng.choice([0, 1, 5, 30, 80])) for _ in range(rng.choice([1, 1, 2, 4]))]
        number = next(self._numbers)
        wide = rng.random() < 0.1 and not self._alike
        session = Session(
            name=f"s{number}",
            owner=f"peer {min(rng.randrange(self._n_peers), rng.randrange(self._n_peers))}",
            rows=rng.choice([40, 200]) if wide else rng.choice([1, 1, 1, 4]),
            n_blocks=4 if part else 12,
            group=("part", "float32") if part else ("whole", "float32"),
            packs=self._alike or rng.random() < 0.9,
            away_s=rng.choice([0.0005, 0.002, 0.010, 0.060]),
            rng=rng,
            turns=turns,
        )
        if rng.random() < 0.25:
            self._at(self.now + rng.uniform(0, 4), lambda: setattr(session, "over", True))
        self._go_on(session, first=True)

    def _pieces(self, rng: random.Random) -> list[int]:
        return [rng.choice([1, 16, 100, 512]) for _ in range(rng.choice([1, 1, 2, 8]))]

    def _go_on(self, session: Session, *, first: bool = False) -> None:
        """Send what follows a result, or the first prompt."""
        rng = session.rng
        session.waiting -= not first
        if session.waiting > 0:
            return
        if not session.over and session.steps_left > 0:
            session.steps_left -= 1
            slow = 1.2 if rng.random() < 0.01 else 0.0
            away_s = session.away_s * rng.lognormvariate(0, 0.3) + slow
            several = 2 if rng.random() < 0.02 else 1  # steps ahead of answers
            for ahead in range(several):
                self._send(session, 1, self.now + away_s + 0.0001 * ahead)
        elif not session.over and session.turns:
            pieces, session.steps_left = session.turns.pop(0)
            at = self.now + (0.0 if first else rng.choice([0.01, 0.5, 1.5]))
            for tokens in pieces:
                self._send(session, tokens, at := at + rng.choice([0.0, 0.001, 0.02]))
        else:
            session.over = True
            self._at(self.now + rng.uniform(0, 0.5), self._begin)

    def _send(self, session: Session, tokens: int, at: float) -> None:
        session.waiting += 1
        fails = session.rng.random() < 0.003
        self._at(at, Job(next(self._numbers), session, session.rows, tokens, fails))

    def _probe(self) -> None:
        self._at(self.now, Job(next(self._numbers), None))
        if self.now < ENDS_S:
            self._at(self.now + self._rng.uniform(0.1, 2.0), self._probe)
