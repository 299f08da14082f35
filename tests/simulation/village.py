"""A village: twenty servers that come back when they are killed, and one client, in virtual time."""

from collections.abc import Awaitable, Callable, Collection, Coroutine
from random import Random
from typing import Any, TypeVar

import torch

from swarm.blocks import Blocks
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.promise import Held
from swarm.client.planning.route import Hop
from swarm.client.planning.router import Router, Wanted
from swarm.client.session.limits import SessionLimits
from swarm.client.session.membership import Membership
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import First, Session
from swarm.identity import Identity
from swarm.server.limits import HandlerLimits, MemoryLimits
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import NUMERIC_CLASS
from tests.simulation.network import Trace
from tests.simulation.run import events_into, tear_down
from tests.simulation.world import MODEL, N_BLOCKS, ROOT, Client, Host, Weather, World

Result = TypeVar("Result")
SPANS = [Blocks(0, 4), Blocks(2, 6), Blocks(4, 8), Blocks(6, 10), Blocks(8, 12)]  # each twice listed, twice not
LISTED = 2 * len(SPANS)
HORIZON_S = 4 * 3600.0
PLAN = SessionPlan(root=ROOT, positions_max=4096, rollback_max=0, step_timeout_s=120.0, wait_for_blocks_s=60.0)


def preferences(kind: str, listed: list[Identity], others: list[Identity]) -> Preferences:
    ours, theirs = ([one.peer_id for one in group] for group in (listed, others))
    match kind:
        case "allowed_peers":
            return Preferences.checked(ours, (), "latency")
        case "everybody":
            return Preferences.checked(None, (), "latency")
        case "blocked_peers":
            return Preferences.checked(None, theirs, "latency")
        case _:
            return Preferences.checked(None, (), "latency", {f"0:{N_BLOCKS}": ours})


class Village:
    """A swarm whose servers come back as soon as they are killed, and a client that trusts half of them."""

    def __init__(
        self,
        loop: VirtualLoop,
        kind: str,
        seed: int,
        limits: HandlerLimits | None = None,
        memory_limits: MemoryLimits | None = None,
        client_limits: SessionLimits | None = None,
    ) -> None:
        """limits, memory_limits: of every server."""
        source = Random(f"identities {seed}")
        identities = [Identity(source.randbytes(32)) for _ in range(2 * LISTED)]
        self.listed = {one.peer_id for one in identities[:LISTED]}
        self.lines: list[str] = []
        self.world = World(loop, seed, Weather(servers=0), Trace(loop, self.lines), limits, memory_limits)
        self.started = 0
        for number, identity in enumerate(identities):
            self.start(identity, SPANS[number % len(SPANS)])
        client = self.client = Client(self.world, seed, client_limits)
        chosen = preferences(kind, identities[:LISTED], identities[LISTED:])
        wanted = Wanted(ROOT, MODEL, N_BLOCKS, NUMERIC_CLASS)
        order = Random(f"order {seed}")
        self.router = Router(wanted, client.directory, client.sessions.avoidance, chosen, random=order)
        self.swarm = Membership(self.router, client.sessions)
        self.planning: Callable[[], Awaitable[None]] | None = None  # is awaited before each plan of a route

    async def open(self, plan: SessionPlan, first: First | None = None) -> Session:
        """Open a session of the client's. first: as in `Sessions.open`."""

        async def planner(missing: Blocks, avoid: Collection[str], held: Held, fresh: bool) -> tuple[Hop, ...]:
            if self.planning is not None:
                await self.planning()
            return (await self.router.plan(missing, avoid, held, fresh)).hops

        return await self.client.sessions.open(
            plan, Blocks(0, N_BLOCKS), planner, first=first, renewed=self.router.renewed
        )

    def heard(self) -> set[str]:
        """The peer ids of all that ever got a message."""
        names = {line.split()[2].partition(">")[0] for line in self.lines if line.split()[1] == "message"}
        return {peer for peer, name in self._names() if name in names}

    def _names(self) -> list[tuple[str, str]]:
        processes = self.world.network.processes.values()
        return [(process.me.identity.peer_id, process.name) for process in processes]

    def host(self, peer: str) -> Host:
        """The running server of an identity."""
        return next(host for host in self.world.hosts if host.identity.peer_id == peer)

    def start(self, identity: Identity, blocks: Blocks) -> None:
        """Have another server of these blocks come."""
        self.started += 1
        host = Host(self.world, f"s{self.started}", Random(self.started), identity, blocks)
        host.start(0.5)
        self.world.hosts.append(host)

    def holders(self, block: int) -> set[str]:
        """The listed peers that serve a block."""
        return {host.identity.peer_id for host in self.world.hosts if block in host.blocks} & self.listed

    def kill(self, peer: str, *, comes_back: bool = True) -> None:
        """End a server; another process of the same identity comes."""
        host = self.host(peer)
        self.world.hosts.remove(host)
        self.world.network.kill(host.process)
        if comes_back:
            self.world.loop.call_later(1.0, self.start, host.identity, host.blocks)


def finished(loop: VirtualLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end, whatever is left by then."""
    try:
        with torch.inference_mode(), events_into(None):
            return loop.run_until_complete(work)
    finally:
        tear_down(loop)
