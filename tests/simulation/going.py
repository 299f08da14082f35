"""A session under way in a village, faults for it, and hops that lie."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.limits import ChunkLimits, SessionLimits
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import First, Session
from swarm.protocol.base import Message
from swarm.protocol.tensors import meta_of
from swarm.server.limits import HandlerLimits, MemoryLimits
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import HIDDEN_SIZE, HashSpan, embed
from tests.simulation.village import PLAN, Village, finished
from tests.simulation.world import N_BLOCKS, Host

LIMITS = SessionLimits()
SCENARIO_S = 1200.0  # of virtual time: a session is idle for 900; a scenario that hangs fails then


class Going:
    """A session under way in a village. Every output of it is compared."""

    def __init__(self, village: Village, session: Session) -> None:
        self.village, self.session = village, session
        self.loop = village.world.loop
        self._local = HashSpan(Blocks(0, N_BLOCKS))
        self._past = self._local.new_cache()

    @classmethod
    async def ahead(cls, village: Village, tokens: int, plan: SessionPlan = PLAN) -> "tuple[Going, float]":
        """Open a session. Its first step, of some tokens, travels ahead. Returns how long both took, in seconds."""
        began = village.world.loop.time()
        first = First(Activations(embed([range(tokens)])), 1)
        going = cls(village, await village.open(plan, first))
        await going._take(first.activations)
        return going, going.loop.time() - began

    async def say(self, tokens: int = 1) -> float:
        """Go on by some tokens. Returns how long that took, in seconds."""
        began = self.loop.time()
        await self._take(Activations(embed([[self._past.length + number for number in range(tokens)]])))
        return self.loop.time() - began

    async def _take(self, given: Activations) -> None:
        hidden = given.hidden
        got = await self.session.step(given, want=1)
        assert torch.equal(got, self._local.forward(hidden, cache=self._past)[:, -1:])

    @property
    def hosts(self) -> list[Host]:
        """The servers of the route, in order."""
        return [self.village.host(hop.peer_id) for hop in self.session.route]

    def failures(self) -> list[str]:
        """Processes that are held to have failed."""
        return list(self.village.client.sessions.avoidance.failures)

    def edge(self, index: int) -> tuple[str, str]:
        """The connection from one hop of the route to the next one."""
        before, after = self.session.route[index : index + 2]
        return before.process, after.process

    async def relayed(self, *edges: int) -> "Going":
        """End this session, and open one on the same route that the client relays these edges of."""
        avoidance, before = self.village.client.sessions.avoidance, self.session.route
        for index in edges:
            avoidance.block(self.edge(index))
        await self.session.close()
        await asyncio.sleep(1.0)
        other = Going(self.village, await self.village.open(PLAN))
        assert [hop.process for hop in other.session.route] == [hop.process for hop in before]
        await other.say()
        return other


def played(
    scenario: Callable[[Going], Coroutine[Any, Any, None]],
    far_s: float | None = None,
    plan: SessionPlan = PLAN,
    limits: HandlerLimits | None = None,
    memory_limits: MemoryLimits | None = None,
    client: SessionLimits = LIMITS,
) -> None:
    """Open a session and go through a scenario. far_s: how far from the client all servers are, one way.

    limits, memory_limits: of every server. client: of all sessions of the client's.
    """
    loop = VirtualLoop(SCENARIO_S)
    unheard: list[Any] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))

    async def play() -> None:
        village = Village(loop, "allowed_peers", 3, limits, memory_limits, client)
        await asyncio.sleep(25.0)  # all servers have announced
        for process in village.world.network.processes.values() if far_s else ():
            village.world.network.link("client", process.name).latency_s = far_s
        session = await village.open(plan)
        await scenario(Going(village, session))
        await session.close()
        await village.client.sessions.close()
        await asyncio.sleep(1.0)
        gc.collect()
        assert not unheard  # no task has ended with an exception that was never taken

    finished(loop, play())


def small_chunks(tokens: int) -> SessionLimits:
    """Return the limits of a client that cuts long steps into messages of so many positions."""
    return SessionLimits(chunks=ChunkLimits(chunk_bytes=tokens * HIDDEN_SIZE * 4))


# Faults


def only_these(going: Going) -> None:
    """From now on the client takes the servers of this route alone."""
    router = going.village.router
    peers = frozenset(hop.peer_id for hop in going.session.route)
    router.preferences = replace(router.preferences, allowed_peers=peers)


def crowd_out(hosts: list[Host], spare: int) -> list[Any]:
    """Leave these servers so much cache, and give nearly all of it to others. Returns their leases."""
    leases = []
    for host in hosts:
        host.pool.capacity = host.pool.used + spare
        lease = host.pool.lease("somebody else")
        lease.resize(lease.room)
        leases.append(lease)
    return leases


class Crowded:
    """Hosts that compute for others alone: steps wait until it is their turn."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        for host in hosts:
            host.executor.hold()

    async def serve_others(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for host in self._hosts:
                host.handler.jobs_done += 1

    def end(self) -> None:
        for host in self._hosts:
            host.executor.release()


# Hops that lie


def silent(kind: type[Message]) -> Callable[..., Any]:
    """Return a hop's way to send, which leaves out messages of this kind."""
    return lambda _, message, sent: [] if isinstance(message, kind) else [(message, sent)]


def spoiling(kind: type[Message], spoilt: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hop's way to send: `spoilt(message, activations)` takes the place of messages of this kind, or None."""

    def send(_: Any, message: Any, sent: Any) -> Any:
        instead = spoilt(message, sent) if isinstance(message, kind) else (message, sent)
        return [] if instead is None else [instead]

    return send


def nothing(message: Any, sent: Any) -> None:
    """Do not send it."""


def without_numbers(message: Any, sent: Any) -> Any:
    """Send activations that are none."""
    return message, sent.with_hidden(torch.full_like(sent.hidden, torch.nan))


def of_another_shape(message: Any, sent: Any) -> Any:
    """Send them without a position."""
    fewer = sent.hidden[:, 1:].contiguous()
    return message.model_copy(update={"hidden": meta_of(fewer)}), sent.with_hidden(fewer)


def whole_numbers(message: Any, sent: Any) -> Any:
    """Send them as integers."""
    whole = sent.hidden.to(torch.int64)
    return message.model_copy(update={"hidden": meta_of(whole)}), sent.with_hidden(whole)
