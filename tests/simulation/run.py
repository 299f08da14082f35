"""One run: a seed makes a world and a client's sessions in it; what comes out is compared with the local model."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

import structlog
import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.limits import ChunkLimits, SessionLimits
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import First, Session
from swarm.errors import SwarmError
from swarm.protocol.inbox import InboxLimits
from swarm.protocol.replay import ReplayLimits
from swarm.server.gates import Gates
from swarm.server.limits import HandlerLimits, HostedLimits
from tests.simulation.invariants import watched
from tests.simulation.loop import NothingLeft, Overdue, VirtualLoop
from tests.simulation.model import HIDDEN_SIZE, HashSpan, embed, greedy
from tests.simulation.network import Trace
from tests.simulation.world import N_BLOCKS, ROOT, Client, Weather, World, ended

TOKENS = 256
CHUNK_BYTES = 8 * HIDDEN_SIZE * 4  # long steps and replays travel in many messages, although the model is small
LIMITS = SessionLimits(chunks=ChunkLimits(chunk_bytes=CHUNK_BYTES), replay=ReplayLimits(chunk_bytes=CHUNK_BYTES))
HOSTED = HostedLimits(inbox=InboxLimits(window_steps=8), replay=ReplayLimits(chunk_bytes=CHUNK_BYTES))
GATES = Gates()  # of every server
ROLLBACK_MAX = 16
STEP_TIMEOUT_S = 120.0
HANG_S = STEP_TIMEOUT_S + 30.0  # a step that has neither answered nor raised by then hangs
HORIZON_S = 4 * 3600.0
BUGS = (LookupError, TypeError, AttributeError, AssertionError, ValueError, RuntimeError, asyncio.InvalidStateError)


@dataclass(slots=True)
class Outcome:
    """What one run came to."""

    seed: int
    departures_per_min: float
    tokens: int = 0  # that came out
    wrong: int = 0  # of them, those that differ from the reference
    hung: bool = False
    error: str = ""  # why the run ended early
    covered: bool = True  # every block kept a reachable holder
    repairs: int = 0
    crashes: int = 0
    stalls: int = 0
    leaves: int = 0
    partitions: int = 0
    skewed: int = 0  # servers that were refused because of their clocks
    user: str = "User"  # the class that generates
    anchored: bool = False  # some servers are hidden, and anchors die
    anchor_deaths: int = 0
    relayed: int = 0  # channels
    punched: int = 0
    liars: float = 0.0  # of servers
    lies: float = 1.0  # of a liar's positions
    sessions: int = 0  # of users that open one after the other
    wrong_sessions: int = 0  # of them
    met: int = 0  # liars in the routes of these sessions
    found: int = 0  # of them, that audits have shown as wrong
    slandered: int = 0  # honest servers that audits have taken for wrong
    agreed: int = 0  # audits
    disputed: int = 0
    unaudited: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0
    digest: str = ""
    faults: list[str] = field(default_factory=list)  # exceptions that no production code caught

    @property
    def good(self) -> bool:
        """Whether everything held that must hold. Among liars some tokens are wrong, and no honest server is blamed."""
        wrong = self.slandered if self.liars else self.wrong
        return not (wrong or self.hung or self.faults or (self.error and self.covered))

    def row(self) -> dict[str, Any]:
        """As written to a file."""
        return asdict(self)


def settle() -> None:
    """Call it before many runs: what was imported is then not looked through whenever garbage is collected."""
    gc.collect()
    gc.freeze()


def weather_of(seed: int, departures_per_min: float) -> Weather:
    """Each fault comes with about every second seed."""
    rng = Random(f"weather {seed}")

    def maybe(value: float) -> float:
        return value if rng.random() < 0.5 else 0.0

    return Weather(
        departures_per_min=departures_per_min,
        partitions_per_min=maybe(20.0),
        disorder=maybe(0.002),
        slow_links=maybe(0.05),
        skew_s=maybe(15.0),
        wrong_clocks=maybe(0.05),
        refusals=maybe(0.1),
        tight_pools=maybe(0.1),
        lost_announcements=maybe(0.15),
    )


def anchored_weather_of(seed: int, departures_per_min: float) -> Weather:
    """The same, with hidden servers, and two to four anchors that die."""
    rng = Random(f"anchored weather {seed}")
    anchors = rng.choice((2, 3, 4))
    return replace(
        weather_of(seed, departures_per_min),
        servers=60,
        anchors=anchors,
        anchor_deaths_per_min=anchors * rng.choice((0.5, 2.0)),
        hidden=rng.choice((0.3, 0.6, 0.8)),
        cones=rng.choice((0.0, 0.5)),
    )


def simulate(
    seed: int,
    departures_per_min: float,
    weather: Weather | None = None,
    lines: list[str] | None = None,
    user: "type[User] | None" = None,
) -> Outcome:
    """Run one seed. lines: gets a readable trace. user: what generates; User by default."""
    weather, user = weather or weather_of(seed, departures_per_min), user or User
    outcome = Outcome(seed, departures_per_min, anchored=weather.anchors > 0, user=user.__name__)
    outcome.liars, outcome.lies = weather.liars, weather.lies
    began = time.process_time()
    loop = VirtualLoop(HORIZON_S)
    trace = Trace(loop, lines)
    loop.set_exception_handler(lambda _, context: outcome.faults.append(_described(context)))
    loop.set_task_factory(_watching(outcome.faults))
    readable = trace if lines is not None else None
    with events_into(readable), torch.inference_mode():
        try:
            loop.run_until_complete(_run(loop, seed, weather, trace, outcome, user))
        except (NothingLeft, Overdue) as hang:
            outcome.hung, outcome.error = True, str(hang)
        finally:
            outcome.virtual_s, outcome.digest, outcome.events = round(loop.time(), 6), trace.digest, trace.events
            tear_down(loop)
    outcome.cpu_s = round(time.process_time() - began, 4)
    return outcome


async def _run(
    loop: VirtualLoop, seed: int, weather: Weather, trace: Trace, outcome: Outcome, kind: "type[User]"
) -> None:
    world = World(loop, seed, weather, trace, HandlerLimits(session=kind.hosted), gates=watched(GATES, outcome.faults))
    world.populate()
    client = Client(world, seed, LIMITS)
    await asyncio.sleep(25.0)  # everybody has announced
    world.counts.uncovered.clear()
    lives = [
        loop.create_task(life) for life in (world.churn(), world.cut_links(client.process), world.watch_coverage())
    ]
    harbour = world.harbour
    if harbour is not None:
        lives += [loop.create_task(harbour.churn()), loop.create_task(harbour.watch())]
    users = [kind(f"user {seed}", TOKENS, client, outcome)]
    if seed % 3 == 0 and not weather.liars:
        users.append(kind(f"other user {seed}", TOKENS // 4, client, outcome))
    try:
        async with client.swarm.auditor:
            await asyncio.gather(*(user.run() for user in users))
    except SwarmError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    except Hang as hang:
        outcome.hung, outcome.error = True, str(hang)
    world.note_coverage()
    await ended(lives)
    counts = world.counts
    outcome.covered = not counts.uncovered
    outcome.crashes, outcome.stalls, outcome.leaves = counts.crashes, counts.stalls, counts.leaves
    outcome.partitions, outcome.skewed = counts.partitions, counts.skewed
    if harbour is not None:
        outcome.anchor_deaths, outcome.relayed, outcome.punched = harbour.deaths, harbour.relayed, harbour.punched
    await client.sessions.close()


class Hang(Exception):
    """A step neither answered nor raised."""


class User:
    """Generates: a prefill in chunks, tokens one by one and in windows, rollbacks, gathers; checks every output."""

    batches: tuple[int, ...] = (1, 1, 1, 2, 3)  # rows, one drawn at random
    rollback_max = ROLLBACK_MAX
    hosted = HOSTED  # of each of its sessions on every server

    def __init__(self, seed: str, tokens: int, client: Client, outcome: Outcome) -> None:
        self._rng = Random(seed)
        self._goes_ahead = Random(f"{seed} ahead").random() < 0.7  # its first step, behind the Opens
        self._tokens = tokens
        self._client = client
        self._outcome = outcome
        self._local = HashSpan(Blocks(0, N_BLOCKS))
        self._past = self._local.new_cache()
        self._mask: Tensor | None = None
        self._offset = 0  # of position ids, where there is padding
        self.peers: set[str] = set()  # of the session's hops

    async def run(self) -> None:
        """Open a session, generate, close it. Raises Hang, or what the session raises."""
        n_rows = self._rng.choice(self.batches)
        length = self._rng.randrange(1, 64)
        prompt = [[self._rng.randrange(4000) for _ in range(length)] for _ in range(n_rows)]
        plan = SessionPlan(
            root=ROOT,
            positions_max=self._tokens * 2 + 128,
            rollback_max=self.rollback_max,
            step_timeout_s=STEP_TIMEOUT_S,
            wait_for_blocks_s=0.0,
            batch=n_rows,
            positions_soon=length + LIMITS.chunks.positions_to_come,
        )
        mask = None
        if n_rows > 1 and length > 4 and self._rng.random() < 0.5:
            mask = torch.ones(n_rows, length, dtype=torch.uint8)
            mask[0, : self._rng.randrange(1, length)] = 0
        first = First(_activations(prompt, mask), 1) if self._goes_ahead else None
        session = await in_time(self._client.swarm.open(Blocks(0, N_BLOCKS), plan, first=first))
        try:
            await self._generate(session, prompt, mask)
        finally:
            self._outcome.repairs += session.repairs
            await session.close()

    async def _generate(self, session: Session, prompt: list[list[int]], mask: Tensor | None) -> None:
        rng = self._rng
        next_tokens = await self._step(session, prompt, mask=mask)
        done = 0
        while done < self._tokens:
            draw = rng.random()
            keep, rows = None, None
            window = [[token] for token in next_tokens]
            if draw < 0.03 and session.length > ROLLBACK_MAX:
                keep = session.length - rng.randrange(1, ROLLBACK_MAX)
            elif draw < 0.06:
                count = rng.randrange(1, 4)
                rows = [rng.randrange(len(window)) for _ in range(count)]
                window = [window[row] for row in rows]
            if rng.random() < 0.05:  # a speculative window
                extra = rng.randrange(1, 5)
                window = [row + [rng.randrange(4000) for _ in range(extra)] for row in window]
            next_tokens = await self._step(session, window, keep=keep, rows=rows)
            done += len(window[0])

    async def _step(
        self,
        session: Session,
        tokens: Sequence[Sequence[int]],
        *,
        mask: Tensor | None = None,
        keep: int | None = None,
        rows: list[int] | None = None,
    ) -> list[int]:
        """Run one step in the swarm and locally. Returns the next token of each row."""
        given = _activations(tokens, mask)
        hidden, positions = given.hidden, given.positions
        want = hidden.shape[1] if keep is not None else 1
        got = await in_time(session.step(given, keep=keep, rows=rows, want=want))
        expected = self._locally(hidden, positions, mask, keep, rows)[:, -want:]
        self._outcome.tokens += len(tokens[0])
        self.peers.update(hop.peer_id for hop in session.route)
        if not torch.equal(got, expected):
            self._outcome.wrong += len(tokens[0])
        return greedy(expected)

    def _locally(
        self, hidden: Tensor, positions: Tensor | None, mask: Tensor | None, keep: int | None, rows: list[int] | None
    ) -> Tensor:
        past = self._past
        if keep is not None and keep < past.length:
            past.keep(keep)
            self._mask = None if self._mask is None else self._mask[:, :keep]
        if rows is not None:
            past.gather(torch.tensor(rows))
            self._mask = None if self._mask is None else self._mask[rows]
        if mask is not None or self._mask is not None:
            n_rows, tokens, _ = hidden.shape
            old = self._mask if self._mask is not None else torch.ones(n_rows, past.length, dtype=torch.uint8)
            new = mask if mask is not None else torch.ones(n_rows, tokens, dtype=torch.uint8)
            self._mask = torch.cat([old, new], dim=1)
        return self._local.forward(hidden, cache=past, positions=positions, mask=self._mask)


def _activations(tokens: Sequence[Sequence[int]], mask: Tensor | None) -> Activations:
    """Return a step's activations. mask: of a prompt with padding."""
    positions = None if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
    return Activations(embed(tokens), positions, mask)


async def in_time(work: Any) -> Any:
    """Await. Raises Hang."""
    try:
        async with asyncio.timeout(HANG_S):
            return await work
    except TimeoutError:
        raise Hang(f"neither an answer nor an error within {HANG_S:.0f} s") from None


@contextlib.contextmanager
def events_into(trace: Trace | None) -> Iterator[None]:
    """Keep production code's events out of the way, or write them into the trace."""

    def note(_logger: object, _method: str, event: dict[str, Any]) -> str:
        assert trace is not None
        if trace.lines is not None:
            facts = " ".join(f"{key}={value}" for key, value in event.items() if key not in {"event", "exc_info"})
            trace.lines.append(f"{trace._loop.time():.6f}     {event['event']} {facts}")
        raise structlog.DropEvent

    before = structlog.get_config()
    level = 10 if trace is not None else 50
    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.configure(**before)


def _described(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message', '')}: {error!r}"


def _watching(faults: list[str]) -> Any:
    """A task factory: what ends a task and is neither a SwarmError nor meant for control is a bug, whoever sees it."""

    def look(task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BUGS):
            faults.append(repr(error))

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **more)
        task.add_done_callback(look)
        return task

    return make


def tear_down(loop: VirtualLoop) -> None:
    """End what is left; the run is over and its outcome is known."""
    loop.set_exception_handler(lambda *_: None)
    loop.horizon_s = float("inf")
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(NothingLeft):
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
