"""The client's place in a swarm: its event loop, its channels, its sessions. A distributed model stands on it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swarm.access import EVERYBODY, Access
from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.hf.runtime import LoopThread
from swarm.client.planning.route import Route
from swarm.client.planning.router import ANY_PEER, Preferences, Router, Wanted
from swarm.client.session.live import SessionPlan
from swarm.client.session.session import POSITIONS_TO_COME, Session
from swarm.client.session.sessions import Sessions
from swarm.dht.directory import Directory
from swarm.errors import BadConfiguration, SessionClosed, UsageError
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.flow import FlowControl
from swarm.net.limits import ChannelLimits
from swarm.net.noise import ChannelKey
from swarm.protocol.messages import ROWS_MAX
from swarm.protocol.naming import new_name

HELD_BYTES_MAX = 1 << 30  # of every session a window of steps, or of a past, may wait to be sent
STEP_TIMEOUT_S = 120.0
STEP_TIMEOUT_S_MAX = 24 * 3600.0  # what a message can say

Join = Callable[[], AbstractAsyncContextManager[Directory]]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves. Raises BadConfiguration.

    step_timeout_s: the longest that one step may take, with all its waiting and repairs, at most STEP_TIMEOUT_S_MAX.
    wait_for_blocks_s: how long to wait for somebody to serve blocks that nobody serves. preferences: which peers it
    uses, and what for. local_blocks: the first ones, which run here.
    """

    network: str = "public"
    step_timeout_s: float = STEP_TIMEOUT_S
    wait_for_blocks_s: float = 0.0
    preferences: Preferences = ANY_PEER
    local_blocks: int = 0
    access: Access = EVERYBODY

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s <= STEP_TIMEOUT_S_MAX:
            why = f"{self.step_timeout_s}; it is more than 0 and at most {STEP_TIMEOUT_S_MAX:.0f} seconds"
            raise BadConfiguration("step_timeout_s", why)


class Swarm:
    """A client that has joined. Every method is called from ordinary threads and waits."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, join: Join, identity: Identity, options: ClientOptions
    ) -> None:
        """join: enters the DHT, in the client's own loop. Raises NetworkError."""
        self.traits = checkpoint.traits
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._wanted = Wanted(
            checkpoint.root, checkpoint.public_name, checkpoint.n_blocks, str(dtype).removeprefix("torch.")
        )
        self._options = options
        self._me = Endpoint(identity, ChannelKey(), options.network, options.access)
        self._latest: Session | None = None
        self._loop = LoopThread()
        try:
            self._life = self._loop.run(self._begin(join))
        except BaseException:
            self._loop.stop()
            raise

    def open_session(self, blocks: Blocks, *, positions_max: int, rollback_max: int) -> "WaitingSession":
        """Return a session that opens with its first step, along the best route through `blocks`."""
        plan = SessionPlan(
            root=self._checkpoint.root,
            positions_max=positions_max,
            rollback_max=rollback_max,
            step_timeout_s=self._options.step_timeout_s,
            wait_for_blocks_s=self._options.wait_for_blocks_s,
        )
        return WaitingSession(self._loop, partial(self._open, blocks, plan))

    def route(self) -> Route:
        """Return the hops of the latest session, or a fresh plan where there was none."""
        if (
            self._latest is not None and self._latest.route and not self._loop.alive
        ):  # it has left the swarm, and still knows the way it took
            return self._router.explained(self._latest.route)
        return self._loop.run(self._route())

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
        async with join() as directory:
            sessions = Sessions(partial(new_name, self._me.identity.peer_id))
            self._me = replace(self._me, public=directory.public)
            flow = FlowControl(ChannelLimits(held_bytes_max=HELD_BYTES_MAX))
            sessions.dialer = Dialer(self._me, sessions.on_message, flow=flow)
            self._router = Router(self._wanted, directory, sessions, self._options.preferences)
            keeping = asyncio.create_task(self._router.keep_fresh())
            try:
                joined.set_result(None)
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                keeping.cancel()
                await sessions.close()

    async def _open(self, blocks: Blocks, plan: SessionPlan, rows: int, tokens: int) -> Session:
        soon = min(plan.positions_max, tokens + POSITIONS_TO_COME)
        self._latest = await self._router.open(blocks, replace(plan, batch=rows, positions_soon=soon))
        return self._latest

    async def _route(self) -> Route:
        if self._latest is not None and self._latest.route:  # it may be waiting for room, with none
            return self._router.explained(self._latest.route)
        return await self._router.plan(Blocks(self._options.local_blocks, self._checkpoint.n_blocks))

    async def _leave(self) -> None:
        self._life.cancel()
        await asyncio.wait({self._life})


class WaitingSession:
    """A session for a thread that waits: the `RemoteSession` of a cache. It opens with its first step.

    So whoever holds it can close it, wherever an interrupt hits: what is open is never but on its way to its owner.
    """

    def __init__(self, loop: LoopThread, opening: Callable[[int, int], Awaitable[Session]]) -> None:
        """opening: opens the session for so many rows of so many tokens. Raises what `Router.open` does."""
        self._loop = loop
        self._opening = opening
        self._session: Session | None = None
        self._closed = False

    def step(
        self,
        activations: Activations,
        *,
        keep: int,
        rows: Sequence[int] | None,
        want: int,
    ) -> Tensor:
        """As `Session.step`, from and to any device; the first one raises also what opening raises."""
        if activations.rows > ROWS_MAX:
            raise UsageError(f"a batch of {activations.rows} is more than a session can have ({ROWS_MAX}); split it")
        device = activations.hidden.device
        ours = activations.copied()  # a journal keeps them, and the caller may write to its own again

        async def step() -> Tensor:
            session = self._session or await self._open(ours.rows, ours.tokens)
            return await session.step(ours, keep=keep, rows=rows, want=want)

        return self._loop.run(step()).to(device)

    def close(self) -> None:
        """Free the leases. Does not wait: it may be called wherever a cache is collected."""
        self._loop.start(self._close())

    # In the loop

    async def _open(self, rows: int, tokens: int) -> Session:
        self._refuse_if_closed()
        self._session = await self._opening(rows, tokens)
        if self._closed:
            await self._session.close()
        self._refuse_if_closed()
        return self._session

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SessionClosed("it was closed")

    async def _close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
