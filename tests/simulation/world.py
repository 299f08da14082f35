"""The world of one run: a hundred servers that come and go, their announcements, and one client."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.auditor import AuditLimits, Auditor
from swarm.client.planning.router import Router, Wanted
from swarm.client.session.limits import SessionLimits
from swarm.client.session.membership import Membership
from swarm.client.session.sessions import Sessions
from swarm.config import PROTOCOL_VERSION
from swarm.dht.directory import Directory
from swarm.dht.records import Announcement, Span, check_clock, check_expiry, key_id
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import Entry, RecordGate
from swarm.errors import ClockSkew, RecordError
from swarm.identity import Identity
from swarm.net.dialer import Dial, Dialer
from swarm.server.announcer import Announcer, State
from swarm.server.gates import Gates
from swarm.server.handler import Handler
from swarm.server.holdings import Memory
from swarm.server.hosting import Hosting
from swarm.server.limits import HandlerLimits, MemoryLimits
from swarm.server.pool import Pool
from tests.simulation.anchors import Ways
from tests.simulation.harbour import Berth, Harbour
from tests.simulation.liars import LyingSpan, boasted, measured
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import NUMERIC_CLASS, HashSpan
from tests.simulation.network import Network, Process, Trace

NETWORK = "simulation"
MODEL = "hash/model"
ROOT = "5eed" * 16
N_BLOCKS = 12
EPOCH_S = 1_800_000_000.0  # the true time when a run begins
HOLDER_AFTER_S = 5.0  # a server counts as a holder when it has been online for so long
DHT_S = 0.15  # one operation of the DHT


@dataclass(frozen=True, slots=True)
class Weather:
    """Which faults a run has, and how many. Rates without another unit are shares from 0 to 1."""

    servers: int = 100
    departures_per_min: float = 0.0
    stalls: float = 0.4  # of departures; the others crash, vanish or leave in good order
    vanishes: float = 0.15
    leaves: float = 0.1
    partitions_per_min: float = 0.0
    disorder: float = 0.0  # of messages
    slow_links: float = 0.0
    skew_s: float = 0.0  # clocks are off by up to so much
    wrong_clocks: float = 0.0  # of servers with a clock that is five minutes off
    refusals: float = 0.0  # of servers that refuse sessions now and then
    tight_pools: float = 0.0  # of servers that have little room
    lost_announcements: float = 0.0
    anchors: int = 0  # that servers and the client meet through; without any, all are public
    anchor_deaths_per_min: float = 0.0  # of all of them together; they return
    hidden: float = 0.0  # of servers, with anchors
    cones: float = 0.0  # of routers that keep ports: two such peers punch
    rounded: float = 0.0  # of servers that announce another numeric class of the same tier
    liars: float = 0.0  # of servers that boast and compute wrongly
    lies: float = 1.0  # of the positions that a liar computes, those that are wrong
    audited: float = 0.0  # of the client's sessions


class VirtualExecutor:
    """Computes one job after another; each takes as much virtual time as the server is slow."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Process, span: HashSpan, block_ms: float) -> None:
        self.block_s = block_ms / 1000
        self._loop, self._process, self._span = loop, process, span
        self._jobs: deque[tuple[Any, Any]] = deque()
        self._busy = self._held = False

    def submit(self, job: Any, done: Any) -> None:
        """As `Executor.submit`."""
        self._jobs.append((job, done))
        if not self._busy and not self._held:
            self._begin()

    def hold(self) -> None:
        """Begin no job until `release`, as if all time went to others' jobs."""
        self._held = True

    def release(self) -> None:
        """Compute the steps that have come meanwhile."""
        self._held = False
        if self._jobs and not self._busy:
            self._begin()

    def _begin(self) -> None:
        self._busy = True
        job, done = self._jobs.popleft()
        try:
            result = job.complete()
        except Exception as error:  # noqa: BLE001 - as in the real executor
            result = error
        block_tokens, block_calls = self._span.cost.take()
        took_s = self.block_s * (block_calls + block_tokens / 16) + 1e-4
        self._loop.call_later(took_s, self._process.enter, partial(self._finish, done, result))

    def _finish(self, done: Any, result: object) -> None:
        self._busy = False
        if self._jobs and not self._held:
            self._begin()
        done(result)


class Store:
    """The DHT as one process sees it: its own clock checks what it reads, the storing nodes' what it writes."""

    def __init__(self, world: "World", process: Process, gate: RecordGate) -> None:
        self.gate = gate
        self._world, self._process = world, process

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """As `RecordStore.put`; some are lost."""
        world = self._world
        await world.alive(self._process)
        await asyncio.sleep(DHT_S)
        kept = []
        for entry in entries:
            if (
                world.network.is_cut(self._process.name, "the DHT")
                or world.lossy.random() < world.weather.lost_announcements
            ):
                kept.append(0)
                continue
            try:
                check_expiry(entry.facts.issued, entry.facts.expires, world.wall_clock())
                kept.append(int(world.storage.put(entry)))
                if entry.place is entry.facts.span:
                    world.seen_until[self._process.name] = entry.facts.expires
                    if world.harbour is not None:
                        world.harbour.note_record(self._process, entry)
            except RecordError as error:
                world.trace.note("record refused", self._process.name, error)
                kept.append(0)
        return tuple(kept)

    async def get(
        self, keys: Sequence[str], heard: object = None, sample: object = None
    ) -> dict[str, tuple[bytes, ...]]:
        """As `RecordStore.get`."""
        del heard, sample
        await asyncio.sleep(DHT_S)
        return {key: tuple(entry.data for entry in self._world.storage.entries(key_id(key))) for key in keys}


class Host:
    """One server: production handler, pool, dialer, directory and announcer in a virtual process."""

    def __init__(self, world: "World", name: str, rng: Random, identity: Identity, blocks: Blocks) -> None:
        self.world, self.name, self.blocks, self.identity = world, name, blocks, identity
        weather = world.weather
        self.block_ms = rng.choice((2.0, 4.0, 8.0))
        self.tight = rng.random() < weather.tight_pools
        self.refuses = rng.random() < weather.refusals
        self.skew_s = rng.uniform(-weather.skew_s, weather.skew_s)
        if rng.random() < weather.wrong_clocks:
            self.skew_s = rng.choice((-300.0, 300.0))
        key = SimpleNamespace(public=rng.randbytes(32))
        me: Any = SimpleNamespace(identity=identity, key=key, network=NETWORK)
        self.process = Process(name, me, f"{name}:1")
        self.berth = world.harbour.berth(name, self.process) if world.harbour is not None else None
        self.lies = world.is_liar(identity.peer_id)
        self.span = HashSpan(blocks)
        if self.lies:
            self.span = LyingSpan(blocks, Random(f"lies {identity.peer_id}"), weather.lies)
        if Random(f"class {name}").random() < weather.rounded:
            self.span.numeric_class = NumericClass(NUMERIC_CLASS, "int8")
        self.pool = Pool(rng.randrange(100, 300) if self.tight else 100_000)
        self.memory = Memory.of(self.pool, limits=world.memory_limits)
        self.executor = VirtualExecutor(world.loop, self.process, self.span, self.block_ms)
        self.steady_since: float | None = None  # when it became a holder of its blocks
        self._tasks: list[asyncio.Task[Any]] = []
        self.handler = Handler(
            Hosting(ROOT, NETWORK, self.span),  # type: ignore[arg-type]
            self.executor,
            self.memory,
            lambda take: Dialer(me, take, world.dial_from(self.process, self.berth)),
            self.wall_clock,
            limits=world.limits,
            gates=world.gates,
        )
        self.process.on_message = self.handler.on_message
        store = Store(world, self.process, world.gate(self.wall_clock))
        self.directory = Directory(store, identity=identity, network=NETWORK, clock=self.wall_clock)
        self.announcer = Announcer(self.directory, self.announcement)
        if self.berth is not None:
            self.berth.follow(self.announcer)

    def wall_clock(self) -> float:
        """The time of this server's clock."""
        return self.world.wall_clock() + self.skew_s

    def announcement(self, state: State) -> Announcement:
        """As `Server.announcement`."""
        now = self.wall_clock()
        bare = Announcement(
            protocol=PROTOCOL_VERSION,
            version="1",
            network=NETWORK,
            public_key=self.identity.public_key.hex(),
            root=ROOT,
            model=MODEL,
            n_blocks=N_BLOCKS,
            blocks=Span(self.blocks.start, self.blocks.stop),
            numeric_class=str(self.span.numeric_class),
            addresses=(self.process.address,),
            channel_key=self.process.me.key.public.hex(),
            decode_tps=1000.0 / (self.block_ms * len(self.blocks)),
            free_tokens=self.pool.free(),
            load=float(self.handler.steps_under_way),
            state=state,
            sequence=0,
            issued=now,
            expires=now + 1,
        )
        bare = self._with_trips(bare) if self.world.weather.liars else bare
        return bare if self.berth is None else self.berth.reach.applied(bare)

    def _with_trips(self, bare: Announcement) -> Announcement:
        """Add round trips, and lies: among liars it matters how far honest servers are from each other."""
        others = [host for host in self.world.hosts if host is not self]
        if self.lies:
            return boasted(bare, [host.identity for host in others])
        network = self.world.network
        return measured(
            bare, [(host.identity, 2000.0 * network.link(self.name, host.name).latency_s) for host in others]
        )

    def start(self, after_s: float) -> None:
        """Join, announce, serve. Raises ClockSkew."""
        self.world.network.processes[self.process.address] = self.process
        check_clock([self.skew_s])
        self._tasks.append(self.world.loop.create_task(self._live(after_s)))

    async def _live(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if self.berth is not None:
            await self.berth.find(self.announcer)
            looks = self.berth.reach.run(lambda: self.directory.latest)
            self._tasks.append(self.world.loop.create_task(looks))
        self.announcer.state = "online"
        self.steady_since = self.world.loop.time()
        if self.refuses:
            self._tasks.append(self.world.loop.create_task(self._refuse_now_and_then()))
        await self.announcer.run()

    async def _refuse_now_and_then(self) -> None:
        admission = self.handler.admission
        while self in self.world.hosts:
            admission.draining = not admission.draining  # announced as online, and takes no sessions
            await asyncio.sleep(5.0 + 20.0 * self.world.rng.random())

    def leave(self) -> None:
        """Drain, then withdraw and end."""
        self.steady_since = None
        self._tasks.append(self.world.loop.create_task(self._drain()))

    async def _drain(self) -> None:
        self.announcer.change("draining")
        await self.handler.drain(30.0)
        await self.handler.close()
        await self.handler.links.dialer.close()
        self.world.network.kill(self.process)

    @property
    def serves(self) -> bool:
        """Whether it runs and takes sessions."""
        return self.process.state == "running" and not self.handler.admission.draining

    def holds(self, now: float) -> bool:
        """Whether the client can count on it: it serves, has room, can be reached and is known to the directory.

        And it computes as it should.
        """
        world = self.world
        if self.lies:
            return False
        if world.seen_until.get(self.name, 0.0) <= world.wall_clock() + world.client_skew_s:
            return False
        if self.berth is not None and not self.berth.is_reached(now):
            return False
        steady = self.steady_since is not None and now - self.steady_since >= HOLDER_AFTER_S
        return steady and self.serves and not self.tight and not world.network.is_cut(self.name, "client")


@dataclass(slots=True)
class Counts:
    """The faults of a run, counted."""

    crashes: int = 0
    stalls: int = 0
    leaves: int = 0
    partitions: int = 0
    skewed: int = 0
    uncovered: list[float] = field(default_factory=list)  # when some block had no holder


class World:
    """Everything but the client's own doings. The same seed and weather make the same world."""

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        weather: Weather,
        trace: Trace,
        limits: HandlerLimits | None = None,
        memory_limits: MemoryLimits | None = None,
        gates: Gates | None = None,
    ) -> None:
        """limits, memory_limits, gates: of every server."""
        self.loop, self.weather, self.trace = loop, weather, trace
        self.limits, self.memory_limits, self.gates = limits, memory_limits, gates
        self.rng = Random(f"world {seed}")
        self.lossy = Random(f"lossy {seed}")
        self.counts = Counts()
        self.network = Network(loop, seed, trace)
        self.network.disorder, self.network.slow_links = weather.disorder, weather.slow_links
        self.storage = RecordStorage(self.wall_clock)
        self.harbour = Harbour(self, seed, NETWORK) if weather.anchors else None
        self.hosts: list[Host] = []
        self.seen_until: dict[str, float] = {}  # when the record that the DHT has of a process ends
        self.client_skew_s = 0.0
        self._gates: list[RecordGate] = []
        self._names = 0
        if self.harbour is not None:
            self.harbour.populate()

    def wall_clock(self) -> float:
        """The true time, seconds since 1970."""
        return EPOCH_S + self.loop.time()

    def gate(self, clock: Any) -> RecordGate:
        """A gate with its own clock; signatures that one process has verified are not verified again by others."""
        gate = RecordGate(NETWORK, clock)
        if self._gates:
            gate._verified = self._gates[0]._verified
        else:
            self._gates.append(gate)
        return gate

    def dial_from(self, process: Process, berth: Berth | None = None) -> Dial:
        """Return the way in which a process dials."""
        if berth is not None:
            return berth.ways.dial
        return partial(self.network.dial, process) if self.harbour is None else Ways(self.harbour, process).dial

    async def alive(self, process: Process) -> None:
        """Return while the process runs; later if it is stopped, never if it is dead."""
        if process.state != "running" or process.waiting:
            going_on: asyncio.Future[None] = self.loop.create_future()
            process.enter(partial(going_on.set_result, None))
            await going_on

    def is_liar(self, peer: str) -> bool:
        """Whether a server of this identity lies; it does so again after a restart."""
        return Random(f"liar {peer}").random() < self.weather.liars

    # Servers

    def populate(self) -> None:
        """Start with servers that have been there for a while."""
        for _ in range(self.weather.servers):
            self.arrive(20.0 * self.rng.random())

    def arrive(self, after_s: float, identity: Identity | None = None) -> None:
        """A server comes."""
        self._names += 1
        rng = Random(self.rng.randbytes(16))
        size = rng.randrange(2, 6)
        start = rng.randrange(1 - size, N_BLOCKS)  # every block is as likely as any other
        blocks = Blocks(max(0, start), min(N_BLOCKS, start + size))
        host = Host(self, f"s{self._names}", rng, identity or Identity(rng.randbytes(32)), blocks)
        try:
            host.start(after_s)
        except ClockSkew as skew:
            self.counts.skewed += 1
            self.trace.note("refused", host.name, skew)
            return
        self.hosts.append(host)
        self.trace.note("arrives", host.name, host.blocks)

    async def churn(self) -> None:
        """Departures, and as many arrivals."""
        rng, rate = self.rng, self.weather.departures_per_min / 60
        while rate:
            await asyncio.sleep(rng.expovariate(rate))
            running = [host for host in self.hosts if host.serves]
            if running:
                self.depart(rng.choice(running))
                self.note_coverage()

    def depart(self, host: Host) -> None:
        """A server goes, one way or another; another one comes, or it comes back."""
        rng, weather = self.rng, self.weather
        draw = rng.random()
        host.steady_since = None
        if draw < weather.stalls:
            self.counts.stalls += 1
            self.trace.note("stalls", host.name)
            host.process.stop()
            self.loop.call_later(rng.uniform(1.0, 40.0), self._wake, host)
            return
        self.hosts.remove(host)
        if draw < weather.stalls + weather.leaves:
            self.counts.leaves += 1
            self.trace.note("leaves", host.name)
            host.leave()
        elif draw < weather.stalls + weather.leaves + weather.vanishes:
            self.counts.crashes += 1
            self.trace.note("vanishes", host.name)
            self.network.vanish(host.process)
        else:
            self.counts.crashes += 1
            self.trace.note("crashes", host.name)
            self.network.kill(host.process)
        again = host.identity if rng.random() < 0.3 else None
        self.loop.call_later(rng.uniform(0.5, 5.0), self.arrive, 1.0, again)

    def _wake(self, host: Host) -> None:
        self.trace.note("wakes", host.name)
        host.steady_since = self.loop.time()
        host.process.resume()

    async def cut_links(self, client: Process) -> None:
        """Partitions: between two servers, or of one server from all others."""
        rng, rate = self.rng, self.weather.partitions_per_min / 60
        while rate:
            await asyncio.sleep(rng.expovariate(rate))
            one, other = rng.sample(self.hosts, 2)
            b = other.name
            if rng.random() < 0.3:
                b, one.steady_since = "*", None
            self.counts.partitions += 1
            self.trace.note("cut", one.name, b)
            self.network.cut(one.name, b)
            self.note_coverage()
            self.loop.call_later(rng.uniform(2.0, 60.0), self._mend, one, b)

    def _mend(self, host: Host, b: str) -> None:
        self.trace.note("mended", host.name, b)
        self.network.mend(host.name, b)
        if b == "*":
            host.steady_since = self.loop.time()

    async def watch_coverage(self) -> None:
        """Look every second: records end, and pools fill, without an event."""
        while True:
            self.note_coverage()
            await asyncio.sleep(1.0)

    def note_coverage(self) -> None:
        """Note it when some block has no holder that the client can count on."""
        if not self._covered():
            self.counts.uncovered.append(self.loop.time())

    def _covered(self) -> bool:
        now, missing = self.loop.time(), set(range(N_BLOCKS))
        for host in self.hosts:
            if not missing.isdisjoint(host.blocks) and host.holds(now):
                missing.difference_update(host.blocks)
                if not missing:
                    return True
        return False


class Client:
    """The client's process: production directory, router, sessions and dialer."""

    def __init__(self, world: World, seed: int, limits: SessionLimits | None = None) -> None:
        self.world = world
        rng = Random(f"client {seed}")
        identity = Identity(rng.randbytes(32))
        me: Any = SimpleNamespace(identity=identity, key=SimpleNamespace(public=rng.randbytes(32)), network=NETWORK)
        self.process = Process("client", me, "client:1")
        world.network.processes[self.process.address] = self.process
        self.skew_s = world.client_skew_s = rng.uniform(-world.weather.skew_s, world.weather.skew_s)
        dial = world.dial_from(self.process)
        self.sessions = Sessions(lambda: rng.randbytes(16).hex(), lambda heard: Dialer(me, heard, dial), limits)

        def clock() -> float:
            return world.wall_clock() + self.skew_s

        store = Store(world, self.process, world.gate(clock))
        self.directory = Directory(store, identity=None, network=NETWORK, clock=clock)
        wanted = Wanted(ROOT, MODEL, N_BLOCKS, NUMERIC_CLASS)
        router = Router(wanted, self.directory, self.sessions.avoidance, random=Random(f"order {seed}"))
        self.swarm = Membership(router, self.sessions)
        audits = AuditLimits(share=world.weather.audited)
        draws = Random(f"references {seed}")
        self.swarm.auditor = Auditor(router, self.sessions, audits, Random(f"audits {seed}").random, draws)


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
