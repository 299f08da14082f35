"""The client's place in a swarm: its event loop, its channels, its sessions. A distributed model stands on it."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.blocks import Blocks
from swarm.client.live import Plan, SessionPlan
from swarm.client.route import Hop, plan_route
from swarm.client.runtime import LoopThread
from swarm.client.session import WAIT_POLL_S, Session, Sessions
from swarm.dht.directory import Directory
from swarm.dht.records import SignedAnnouncement
from swarm.errors import HopFailed, NoRoute, Refused, RootMismatch
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint
from swarm.net.channel import Self
from swarm.net.dialer import Dialer
from swarm.net.noise import ChannelKey

OPEN_TRIES = 4  # routes tried for one session: each leaves out the peers that failed in the ones before
DIRECTORY_AGE_S = 10.0  # a look-up is used again for so long
STEP_TIMEOUT_S = 120.0

Join = Callable[[], AbstractAsyncContextManager[Directory]]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves.

    step_timeout_s: the longest that one step may take, with all its waiting and repairs. wait_for_blocks_s: how long to
    wait for somebody to serve blocks that nobody serves.
    """

    network: str = "public"
    step_timeout_s: float = STEP_TIMEOUT_S
    wait_for_blocks_s: float = 0.0


class Swarm:
    """A client that has joined. Every method is called from ordinary threads and waits."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, join: Join, identity: Identity, options: ClientOptions
    ) -> None:
        """join: enters the DHT, in the client's own loop. Raises NetworkError."""
        self.traits = checkpoint.traits
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._options = options
        self._me = Self(identity, ChannelKey(), options.network)
        self._latest: Session | None = None
        self._servers: tuple[float, tuple[SignedAnnouncement, ...]] = (float("-inf"), ())
        self._loop = LoopThread()
        try:
            self._life = self._loop.run(self._begin(join))
        except BaseException:
            self._loop.stop()
            raise

    def open_session(self, blocks: Blocks, *, positions_max: int, rollback_max: int) -> "WaitingSession":
        """Open a session along the best route through `blocks`. Raises NoRoute, HopFailed or Refused."""
        plan = SessionPlan(
            root=self._checkpoint.root,
            positions_max=positions_max,
            rollback_max=rollback_max,
            step_timeout_s=self._options.step_timeout_s,
            wait_for_blocks_s=self._options.wait_for_blocks_s,
        )
        return WaitingSession(self._loop, self._loop.run(self._open(blocks, plan)))

    def route(self) -> tuple[Hop, ...]:
        """Return the hops of the latest session, or a fresh plan where there was none."""
        if self._latest is not None:
            return self._latest.route
        return self._loop.run(self._plan(Blocks(0, self._checkpoint.n_blocks), ()))

    def close(self) -> None:
        """Leave the swarm. Closing twice is fine."""
        if self._loop.alive:
            self._loop.run(self._leave())
            self._loop.stop()

    async def _begin(self, join: Join) -> "asyncio.Task[None]":
        """Join, and return the task that lives as long as the membership."""
        joined = asyncio.get_running_loop().create_future()
        life = asyncio.create_task(self._live(join, joined))
        await asyncio.wait({life, joined}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        return life

    async def _live(self, join: Join, joined: "asyncio.Future[None]") -> None:
        async with join() as self._directory:
            self._sessions = Sessions()
            self._sessions.dialer = Dialer(self._me, self._sessions.on_message)
            try:
                joined.set_result(None)
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                await self._sessions.close()

    async def _leave(self) -> None:
        self._life.cancel()
        await asyncio.wait({self._life})

    async def _open(self, blocks: Blocks, plan: SessionPlan) -> Session:
        avoid: list[str] = []
        while True:
            route = await self._plan(blocks, avoid)
            try:
                self._latest = await self._sessions.open(plan, route, self._replanner(route))
                return self._latest
            except (HopFailed, Refused) as error:
                # A process, not its peer: a server that was started again has a record that is newer than ours.
                avoid.append(next((hop.process for hop in route if hop.peer_id == error.peer), error.peer))
                failed = error
            if len(avoid) >= OPEN_TRIES:
                raise failed
            try:
                await self._plan(blocks, avoid)
            except NoRoute:
                raise failed from None  # what is wrong with the only holder says more than that there is no other

    def _replanner(self, route: Sequence[Hop]) -> Plan:
        """Return how hops are found to take over in this route: in its numeric class."""
        numeric_class = route[0].announcement.numeric_class

        async def replan(blocks: Blocks, avoid: Collection[str]) -> tuple[Hop, ...]:
            return await self._plan_now(blocks, avoid, numeric_class)

        return replan

    async def _plan(self, blocks: Blocks, avoid: Collection[str]) -> tuple[Hop, ...]:
        """Plan a route; while nobody serves some block, wait as long as the options say. Raises NoRoute."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.wait_for_blocks_s
        while True:
            try:
                return await self._plan_now(blocks, avoid)
            except NoRoute:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(min(WAIT_POLL_S, max(0.0, deadline - loop.time())))

    async def _plan_now(
        self, blocks: Blocks, avoid: Collection[str], numeric_class: str | None = None
    ) -> tuple[Hop, ...]:
        """Plan with the servers that were looked up lately, if they suffice; else look again."""
        name = self._checkpoint.public_name
        dtype = str(self.dtype).removeprefix("torch.")

        def plan(servers: Sequence[SignedAnnouncement]) -> tuple[Hop, ...]:
            return plan_route(name, blocks, servers, dtype=dtype, numeric_class=numeric_class, avoid=avoid)

        looked_up_at, servers = self._servers
        now = asyncio.get_running_loop().time()
        if now - looked_up_at < DIRECTORY_AGE_S:
            with contextlib.suppress(NoRoute):
                return plan(servers)
        survey = await self._directory.survey(self._checkpoint.root, self._checkpoint.n_blocks)
        self._servers = (now, survey.servers)
        try:
            return plan(survey.servers)
        except NoRoute as nobody:
            if not survey.servers:
                await self._explain(nobody)
            if survey.other_protocols:
                why = f"{nobody.why}; servers of protocol {survey.other_protocols} were left out"
                raise NoRoute(nobody.model, nobody.missing, why) from None
            raise

    async def _explain(self, nobody: NoRoute) -> None:
        """Raise RootMismatch if others serve a model of this name."""
        for entry in await self._directory.models(nobody.model):
            if entry.root != self._checkpoint.root:
                raise RootMismatch(nobody.model, entry.root, self._checkpoint.root) from None


class WaitingSession:
    """A session for a thread that waits: the `RemoteSession` of a cache."""

    def __init__(self, loop: LoopThread, session: Session) -> None:
        self._loop = loop
        self._session = session

    def step(
        self,
        hidden: Tensor,
        *,
        positions: Tensor | None,
        mask: Tensor | None,
        keep: int,
        rows: Sequence[int] | None,
        want: int,
    ) -> Tensor:
        """As `Session.step`, from and to any device."""
        output = self._loop.run(
            self._session.step(
                hidden.to("cpu"),
                positions=None if positions is None else positions.to("cpu"),
                mask=None if mask is None else mask.to("cpu"),
                keep=keep,
                rows=rows,
                want=want,
            )
        )
        return output.to(hidden.device)

    def close(self) -> None:
        """Free the leases. Does not wait: it may be called wherever a cache is collected."""
        self._loop.start(self._session.close())
