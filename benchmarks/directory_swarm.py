"""The swarm of `directory.py`: production nodes and directories over a network in memory, on a virtual clock.

Nodes, searches, samples, records and their levels are the product's. Left out: p2pd, time on the wire, and the upkeep
of routing tables. All nodes share one memory of verified signatures, because only messages and bytes count.
"""

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

from directory_routes import Judge

from swarm.config import PROTOCOL_VERSION
from swarm.dht.directory import Directory
from swarm.dht.keepers import KeeperLimits, Keepers
from swarm.dht.member import Member, MemberLimits
from swarm.dht.node import NodeConfig, SwarmNode
from swarm.dht.records import RECORD, Announcement, Rtt, SignedAnnouncement, Span, key_id, span_key
from swarm.dht.sampling import SAMPLING, Sample
from swarm.dht.search import SearchLimits
from swarm.dht.validator import Entry, OnEntries, RecordGate
from swarm.identity import Identity
from swarm.net.p2p import Daemon, P2PConfig
from tests.dht.liars import Lie, lie, peer_bytes
from tests.dht.memory import MemoryDaemon, MemoryNetwork

NETWORK, ROOT, NOW = "benchmark", "ab" * 32, 1_800_000_000.0
QUIET = MemberLimits(maintain_s=1e9)
REGIONS = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """A swarm: serving nodes, servers of one model, its blocks, and the lengths of their spans."""

    nodes: int
    servers: int
    n_blocks: int = 80
    lengths: tuple[int, ...] = (4, 8, 16, 32)


# Servers --------------------------------------------------------------------------------------------------------------


def make_servers(shape: Shape, draw: random.Random, identities: Sequence[Identity]) -> list[Announcement]:
    """Draw servers in regions. Most spans are aligned; each server has measured near peers that may come next to it."""
    centres = [(draw.random() * 100, draw.random() * 60) for _ in range(REGIONS)]
    homes = [draw.choice(centres) for _ in identities]
    places = [(draw.gauss(x, 3), draw.gauss(y, 3), draw.lognormvariate(1.3, 0.6)) for x, y in homes]
    spans = [_span(shape, draw) for _ in identities]
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for i, (start, stop) in enumerate(spans):
        starts.setdefault(start, []).append(i)
        stops.setdefault(stop, []).append(i)

    def rtt(i: int, j: int) -> float:
        (x, y, last), (u, v, other) = places[i], places[j]
        return 1.6 * math.hypot(x - u, y - v) + last + other

    def measured(i: int) -> tuple[Rtt, ...]:
        chosen: dict[int, None] = {}
        for side in (starts.get(spans[i].stop, []), stops.get(spans[i].start, [])):
            met = [j for j in draw.sample(side, min(len(side), 60)) if j != i]
            near = sorted(met, key=lambda j: rtt(i, j))
            chosen |= dict.fromkeys([*near[:6], *draw.sample(met, min(2, len(met)))])
        keys = [identities[j].public_key.hex()[:16] for j in chosen]
        return tuple(Rtt(key, round(rtt(i, j), 1)) for key, j in zip(keys, chosen, strict=True))[: RECORD.rtts_max]

    return [
        Announcement(
            protocol=PROTOCOL_VERSION,
            version="0.1.0",
            network=NETWORK,
            public_key=identity.public_key.hex(),
            root=ROOT,
            model="org/model",
            n_blocks=shape.n_blocks,
            blocks=span,
            numeric_class="bfloat16",
            addresses=(f"{draw.randrange(1, 224)}.{draw.randrange(256)}.{draw.randrange(256)}.7:31330",),
            channel_key=draw.randbytes(32).hex(),
            decode_tps=round(draw.lognormvariate(6.0, 0.8) / len(range(*span)), 2),
            prefill_tps=round(draw.lognormvariate(8.0, 0.8) / len(range(*span)), 2),
            load=float(draw.choice((0, 0, 0, 1, 2))),
            free_tokens=draw.randrange(2048, 400_000),
            state="online",
            rtts=measured(i),
            sequence=1,
            issued=NOW,
            expires=NOW + 60,
        )
        for i, (identity, span) in enumerate(zip(identities, spans, strict=True))
    ]


def _span(shape: Shape, draw: random.Random) -> Span:
    length = draw.choice(shape.lengths)
    if draw.random() < 0.7:
        start = draw.randrange(shape.n_blocks // length) * length
    else:
        start = draw.randrange(shape.n_blocks - length + 1)
    return Span(start, start + length)


# The swarm ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Publisher:
    """A server's store: a node's membership, with a memory of keepers of its own, as if it were a node of its own."""

    member: Member

    @property
    def gate(self) -> RecordGate:
        """The gate that accepts records or rejects them."""
        return cast(RecordGate, self.member.protocol.gate)

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Store entries."""
        return tuple(await self.member.put(entries))

    async def get(
        self, keys: Sequence[str], on_entries: OnEntries | None = None, sample: Sample | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Read a sample."""
        assert sample is not None
        return await self.member.sample(keys, sample, on_entries)


@dataclass(slots=True)
class LookUps:
    """Costs and findings of look-ups for plans, one number for each."""

    bytes: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # an experienced client's route / the best; inf: no route
    new: list[float] = field(default_factory=list)  # a new client's route / its route with all servers; inf: no route

    def take(self, servers: Sequence[SignedAnnouncement], judge: Judge) -> None:
        """Judge the routes through a sample."""
        self.servers.append(len(servers))
        self.ratios.append(judge.experienced_ms(servers) / judge.best_ms)
        self.new.append(judge.new_ms(servers) / judge.new_best_ms)

    def summary(self) -> dict[str, float]:
        """Return medians and extremes."""
        found = [ratio for ratio in self.ratios if ratio < math.inf]
        return {
            "look-ups": len(self.ratios),
            "with a route": len(found),
            "bytes, median": statistics.median(self.bytes),
            "bytes, most": max(self.bytes),
            "calls, median": statistics.median(self.calls),
            "servers seen, median": statistics.median(self.servers),
            "route / best route, median": round(statistics.median(found), 4),
            "route / best route, mean": round(statistics.mean(found), 4),
            "route / best route, worst": round(max(found), 4),
            "a new client's route / with all servers, mean": round(statistics.mean(self.new), 4),
        }


class Swarm:
    """Serving nodes that have met, servers that announce through them, and readers."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.draw, self.network = shape, random.Random(seed), MemoryNetwork()
        self.gate = RecordGate(NETWORK, self.clock)
        self.identities = [Identity(self.draw.randbytes(32)) for _ in range(shape.servers)]
        self.announcements = make_servers(shape, self.draw, self.identities)
        self.nodes: list[tuple[SwarmNode, Identity]] = []
        self.readers: list[SwarmNode] = []
        self.keepers = Keepers()  # that servers remember in common
        self.publishers: list[Publisher] = []
        self.directories: list[Directory] = []

    def clock(self) -> float:
        """Wall seconds."""
        return NOW + asyncio.get_running_loop().time()

    async def join(self, stack: AsyncExitStack, n_readers: int) -> None:
        """Let nodes join one after the other, then readers."""
        for i in range(self.shape.nodes):
            own = Identity(self.draw.randbytes(32))
            self.nodes.append((await stack.enter_async_context(self._node(own, i, client=False)), own))
        for node, _ in self.nodes:  # as nodes do every 15 s: else they judge distances by when they joined
            assert node.member is not None
            await node.member.learn(SearchLimits().samples)
        for i in range(n_readers):
            self.readers.append(await stack.enter_async_context(self._node(Identity.generate(), 9000 + i, client=True)))
        for i, identity in enumerate(self.identities):
            member = self.nodes[i % len(self.nodes)][0].member
            assert member is not None
            self.publishers.append(Publisher(replace(member, keepers=self.keepers)))
            self.directories.append(
                Directory(
                    self.publishers[-1],
                    identity=identity,
                    network=NETWORK,
                    clock=self.clock,
                    source=random.Random(i),
                )
            )

    def _node(self, own: Identity, seed: int, *, client: bool) -> Any:  # noqa: ANN401 - a context manager
        p2p = self.network.join(own)
        first = self.nodes[self.draw.randrange(len(self.nodes))][0].addresses if self.nodes else ()
        listen = None if client else ("127.0.0.1", 0)
        config = NodeConfig(NETWORK, P2PConfig(None, listen), tuple(first), member_limits=QUIET)
        node = SwarmNode(config, self.clock, random.Random(seed))
        node.gate = self.gate

        async def attached(stack: AsyncExitStack) -> SwarmNode:
            await stack.enter_async_context(node.attach(cast(Daemon, MemoryDaemon(p2p))))
            return node

        return _Entered(attached)

    def forget(self) -> None:
        """Let one server in six forget the nodes around its key, as they do within two minutes."""
        known = KeeperLimits().known_s
        for publisher in self.publishers[:: int(known // RECORD.refresh_s) + 1]:
            publisher.member = replace(publisher.member, keepers=Keepers())

    async def refresh(self, rounds: int) -> None:
        """Let all servers announce every 20 s, spread over that time."""

        async def one(i: int) -> None:
            directory, announcement = self.directories[i], self.announcements[i]
            await asyncio.sleep(RECORD.refresh_s * i / len(self.directories))
            for _ in range(rounds):
                due = asyncio.get_running_loop().time() + RECORD.refresh_s
                await directory.announce(announcement)
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as group:
            for i in range(len(self.directories)):
                group.create_task(one(i))

    async def read(self) -> None:
        """Let all servers know about as many others as a reader's sample has: then they announce the name less often.

        Each would read for itself; here they take the number from the records of one plan's bytes.
        """
        seen = min(len(self.announcements), SAMPLING.plan_bytes // 640)
        for directory in self.directories:
            directory.seen[ROOT] = seen

    async def searches(self, count: int) -> dict[str, float]:
        """Let readers search for the model's first key, one after the other, and fetch nothing."""
        n_bytes, n_calls, draw = [], [], random.Random(1)
        for reader in self.readers[:count]:
            assert reader.member is not None
            own, key = reader.member.daemon.p2p.peer_id, key_id(span_key(NETWORK, ROOT))
            calls, moved = self.network.calls, self.network.moved[own]
            await reader.member.search((key,), salt=draw.randbytes(8))
            n_bytes.append(self.network.moved[own] - moved)
            n_calls.append(self.network.calls - calls)
        return {"bytes, median": statistics.median(n_bytes), "calls, median": statistics.median(n_calls)}

    async def look_ups(self, count: int) -> LookUps:
        """Let readers look up for plans, one after the other, and compare with the best route of all servers."""
        everyone = [SignedAnnouncement(a, b"") for a in self.announcements]
        judge, found = Judge(everyone, self.shape.n_blocks, random.Random(2)), LookUps()
        for i in range(count):
            reader = self.readers[i % len(self.readers)]
            assert reader.member is not None
            own = reader.member.daemon.p2p.peer_id
            calls, moved = self.network.calls, self.network.moved[own]
            directory = Directory(reader, identity=None, network=NETWORK, clock=self.clock)
            survey = await directory.survey(ROOT, self.shape.n_blocks)
            found.bytes.append(self.network.moved[own] - moved)
            found.calls.append(self.network.calls - calls)
            found.take(survey.servers, judge)
        return found

    def corrupt(self, share: float) -> int:
        """Let a share of the nodes lie from now on, in every way in turn. Returns how many."""
        liars = self.draw.sample(self.nodes, int(share * len(self.nodes)))
        names = [peer_bytes(own) for _, own in liars]
        for i, (node, _) in enumerate(liars):
            lie(node, list(Lie)[i % len(Lie)], names, self.draw)
        return len(liars)


@dataclass(slots=True)
class _Entered:
    """An async context manager of a function that enters others."""

    enter: Callable[[AsyncExitStack], Awaitable[SwarmNode]]
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> SwarmNode:
        return await self.enter(self.stack)

    async def __aexit__(self, *error: object) -> None:
        await self.stack.aclose()
