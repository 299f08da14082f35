"""A whole day: laptops sleep, clocks jump, grants end, servers crash, and a chat takes a step every five minutes.

It is longer than a grant and than a record counts: 24 hours.

Ten of the twenty servers are laptops. The others run all day, so that every block always has a holder. They are slow,
so clients prefer laptops.
"""

import asyncio
import gc
from collections.abc import Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch

from swarm.activations import Activations
from swarm.client.session.session import Session
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import HashSpan, embed
from tests.simulation.village import LISTED, PLAN, Village, finished
from tests.simulation.world import N_BLOCKS, Blocks, Host, ended

HOUR_S = 3600.0
STEP_S_MAX = PLAN.step_timeout_s + PLAN.wait_for_blocks_s
BOUND = 2.0  # tasks at the end of a day, at most so many times those of its first hour


@dataclass(slots=True)
class Day:
    """A village's day, and what was counted. hours: longer than a grant lives, which is 24."""

    village: Village
    rng: Random
    hours: float
    steps: int = 0
    repairs: int = 0
    did: dict[str, int] = field(default_factory=dict)
    tasks: list[int] = field(default_factory=list)  # that are alive, each hour

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.village.world.loop

    @property
    def is_over(self) -> bool:
        return self.loop.time() > self.hours * HOUR_S

    async def live(self) -> None:
        """Everything goes on beside each other until the day is over."""
        users = (self.chat(), self.visits())
        faults = (self.nights(), self.naps(), self.clocks(), self.crashes(), self.count())
        lives = [self.loop.create_task(life) for life in faults]
        await asyncio.gather(*users)
        await ended(lives)

    # Users

    async def chat(self) -> None:
        """One session all day: a step every five minutes, sometimes none for longer than servers keep a session."""
        session = await self.village.open(PLAN)
        text = Text(session)
        while not self.is_over:
            await self._said(text, self.rng.randrange(1, 4))
            await asyncio.sleep(300.0 if self.rng.random() > 0.02 else 1500.0)
        await session.close()
        self.repairs += session.repairs

    async def visits(self) -> None:
        """Short sessions of other users."""
        while not self.is_over:
            session = await self.village.open(PLAN)
            text = Text(session)
            for _ in range(10):
                await self._said(text, 2)
            await session.close()
            self.repairs += session.repairs
            await asyncio.sleep(self.rng.uniform(300.0, 1500.0))

    async def _said(self, text: "Text", tokens: int) -> None:
        began = self.loop.time()
        await text.say(tokens)
        self.steps += 1
        assert self.loop.time() - began <= STEP_S_MAX

    # Faults

    async def nights(self) -> None:
        """Each laptop sleeps once, for a quarter to a third of the day."""
        day_s = self.hours * HOUR_S
        for host in self._laptops():
            self._later(self.rng.uniform(0.0, day_s), self._sleep(host, day_s / 4, day_s / 3))

    async def naps(self) -> None:
        """Lids are closed for some minutes."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 1200.0))
            self._later(0.0, self._sleep(self.rng.choice(self._laptops()), 60.0, 1200.0))

    async def clocks(self) -> None:
        """Clocks jump, and are set again: a laptop's by up to an hour, the client's by less than peers tolerate."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 1800.0))
            self._count("clocks that jump")
            host = self.rng.choice(self._laptops())
            host.skew_s = self.rng.choice((-3600.0, -300.0, -20.0, 20.0, 300.0, 3600.0))
            self.village.client.skew_s = self.rng.uniform(-15.0, 15.0)
            self.loop.call_later(self.rng.uniform(60.0, 2400.0), setattr, host, "skew_s", 0.0)

    async def crashes(self) -> None:
        """A server's process dies and is started again: another one of the same identity."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 600.0))
            awake = [host for host in self.village.world.hosts if host.process.state == "running"]
            self._count("crashes")
            self.village.kill(self.rng.choice(awake).identity.peer_id)

    async def count(self) -> None:
        """Count what is alive."""
        while True:
            await asyncio.sleep(HOUR_S)
            gc.collect()
            dead = self.did.get("crashes", 0)  # their announcers wait for ever
            self.tasks.append(len(asyncio.all_tasks()) - dead)

    async def _sleep(self, host: Host, least_s: float, most_s: float) -> None:
        if host.process.state != "running":
            return
        self._count("sleeps")
        host.process.stop()
        await asyncio.sleep(self.rng.uniform(least_s, most_s))
        host.process.resume()

    def _laptops(self) -> list[Host]:
        """The hosts, of those that run now, that are no servers of the first ten identities."""
        return [host for host in self.village.world.hosts if host.identity.peer_id not in self.village.listed]

    def _later(self, after_s: float, work: Coroutine[Any, Any, None]) -> None:
        self.loop.call_later(after_s, self.loop.create_task, work)

    def _count(self, what: str) -> None:
        self.did[what] = self.did.get(what, 0) + 1


class Text:
    """A session and what its outputs must be."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._local = HashSpan(Blocks(0, N_BLOCKS))
        self._past = self._local.new_cache()

    async def say(self, tokens: int) -> None:
        """Go on by some tokens, and compare."""
        hidden = embed([[self._past.length + number for number in range(tokens)]])
        got = await self._session.step(Activations(hidden), want=1)
        assert torch.equal(got, self._local.forward(hidden, cache=self._past)[:, -1:])


@pytest.mark.long
@pytest.mark.virtual_clock
def test_a_chat_goes_on_all_day_though_laptops_sleep_and_clocks_jump() -> None:
    hours = 26.0
    loop = VirtualLoop((hours + 2) * HOUR_S)
    unheard: list[Any] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))

    async def live() -> None:
        village = Village(loop, "everybody", 3)
        day = Day(village, Random("day"), hours)
        for host in village.world.hosts:
            if host.identity.peer_id in village.listed:
                host.block_ms, host.executor.block_s = 50.0, 0.05
        await asyncio.sleep(25.0)
        async with village.swarm:  # keeps the survey fresh
            await day.live()
        assert day.steps > 20 * hours
        assert day.repairs > hours / 2, "nothing failed"
        assert min(day.did[name] for name in ("sleeps", "clocks that jump", "crashes")) > hours / 4
        assert max(day.tasks) <= BOUND * day.tasks[0]
        await asyncio.sleep(1200.0)  # sessions of servers that slept end when they are idle
        assert not any(host.handler.sessions for host in village.world.hosts if host.process.state == "running")
        assert LISTED <= len(village.world.hosts) == 2 * LISTED
        await village.client.sessions.close()
        await asyncio.sleep(1.0)
        gc.collect()
        assert not unheard

    finished(loop, live())
