"""A client's membership for threads that block: its event loop runs in a thread of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarm.access import EVERYBODY, Access
from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.auditor import AuditLimits
from swarm.client.auditing.ledger import Audits
from swarm.client.hf.runtime import Begun, LoopThread
from swarm.client.planning.explain import ExplainedRoute
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.promise import Crossing
from swarm.client.planning.route import Hop, load_of, step_s_of
from swarm.client.planning.router import Wanted
from swarm.client.session.limits import SessionLimits
from swarm.client.session.membership import Join, Membership, joined
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import First, Session
from swarm.errors import BadConfiguration, SessionClosed, UsageError
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint
from swarm.protocol.messages import ROWS_MAX
from swarm.protocol.tensors import Coding


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves. Raises BadConfiguration.

    step_timeout_s: the longest that one step may take, or one chunk of a long prompt, with all its waiting and repairs,
    at most a day.
    wait_for_blocks_s: how long to wait for a server of blocks that no server has. preferences: the peers that the
    client uses, and the aim of its routes. local_blocks: the first ones, which run here. limits: how long sessions wait
    and how often they try. coding: of the activations on all edges; None sends them as they are. audits: the share of
    sessions that are computed once more on other servers, and how far. dtype: only servers that compute in it, as
    "float32"; None for any.
    """

    network: str = "public"
    step_timeout_s: float = 120.0
    wait_for_blocks_s: float = 0.0
    preferences: Preferences = field(default_factory=Preferences)
    local_blocks: int = 0
    access: Access = EVERYBODY
    limits: SessionLimits = field(default_factory=SessionLimits)
    coding: Coding | None = None
    audits: AuditLimits = field(default_factory=AuditLimits)
    dtype: str | None = None

    def __post_init__(self) -> None:
        most_s = 24 * 3600.0  # the most that a message can say
        if not 0 < self.step_timeout_s <= most_s:
            why = f"{self.step_timeout_s}; it is more than 0 and at most {most_s:.0f} seconds"
            raise BadConfiguration("step_timeout_s", why)
        if not 0 <= self.audits.share <= 1:
            raise BadConfiguration("audit", f"{self.audits.share}; it is a share of sessions, between 0 and 1")


class Swarm:
    """A client that has joined. Every method is called from ordinary threads and waits."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, join: Join, identity: Identity, options: ClientOptions
    ) -> None:
        """join: enters the DHT, in the client's own loop. Raises NetworkError."""
        self.traits = checkpoint.traits
        self.dtype = dtype
        self._root = checkpoint.root
        self._options = options
        self._latest: Session | None = None
        wanted = Wanted(
            checkpoint.root,
            checkpoint.public_name,
            checkpoint.n_blocks,
            options.dtype,
            options.coding,
        )
        joining = _joined(wanted, join, identity, options)
        self._loop = LoopThread()
        try:
            self.membership, self._life = self._loop.run(_entered(joining))
        except BaseException:
            self._loop.stop()
            raise

    def open_session(self, blocks: Blocks, *, positions_max: int, rollback_max: int) -> "WaitingSession":
        """Return a session that opens with its first step, along the best route through `blocks`."""
        plan = SessionPlan(
            root=self._root,
            positions_max=positions_max,
            rollback_max=rollback_max,
            step_timeout_s=self._options.step_timeout_s,
            wait_for_blocks_s=self._options.wait_for_blocks_s,
            coding=self._options.coding,
        )
        return WaitingSession(self._loop, partial(self._open, blocks, plan))

    def route(self) -> ExplainedRoute:
        """Return the hops of the latest session, or a fresh plan where there was none."""
        if not self._loop.alive and (hops := self._hops()):  # the client has left, and still knows the route it took
            return self.membership.router.explained(hops, self._crossings())
        return self._loop.run(self._route())

    @property
    def audits(self) -> Audits:
        """What the audits of this client's sessions have shown."""
        return self.membership.auditor.audits

    def close(self) -> None:
        """Leave the swarm. Closing twice is fine."""
        if self._loop.alive:
            self._loop.run(self._leave())
            self._loop.stop()

    async def _open(self, blocks: Blocks, plan: SessionPlan, first: First) -> Session:
        rows, tokens = first.activations.rows, first.activations.tokens
        sized = plan.sized(rows, tokens, self._options.limits.chunks)
        self._latest = await self.membership.open(blocks, sized, first=first)
        return self._latest

    async def _route(self) -> ExplainedRoute:
        blocks = Blocks(self._options.local_blocks, self.traits.n_blocks)
        return await self.membership.route(blocks, self._hops(), self._crossings())

    def _hops(self) -> tuple[Hop, ...]:
        """Return the hops of the latest session; it has none while it waits for room."""
        return self._latest.route if self._latest is not None else ()

    def _crossings(self) -> tuple[Crossing, ...]:
        """Return the repairs of the latest session that brought blocks into another numeric class."""
        return self._latest.crossings if self._latest is not None else ()

    async def _leave(self) -> None:
        self._life.cancel()
        await asyncio.wait({self._life})


@asynccontextmanager
async def _joined(wanted: Wanted, join: Join, identity: Identity, options: ClientOptions) -> AsyncIterator[Membership]:
    joining = joined(join, identity, network=options.network, access=options.access, limits=options.limits)
    async with joining as member, member.of(wanted, options.preferences, options.audits) as membership:
        yield membership


async def _entered(
    joining: AbstractAsyncContextManager[Membership],
) -> tuple[Membership, "asyncio.Task[None]"]:
    """Join, and return a task that stays in the swarm until it is cancelled."""
    joined: asyncio.Future[Membership] = asyncio.get_running_loop().create_future()

    async def stay() -> None:
        async with joining as membership:
            joined.set_result(membership)
            await asyncio.get_running_loop().create_future()

    life = asyncio.create_task(stay())
    first: set[asyncio.Future[Any]] = {life, joined}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        life.result()
    return joined.result(), life


class WaitingSession:
    """A session for a thread that waits: the `RemoteSession` of a cache. It opens with its first step.

    So its owner can close it wherever an interrupt hits: an open session is never on its way to its owner.
    """

    def __init__(self, loop: LoopThread, opening: Callable[[First], Awaitable[Session]]) -> None:
        """opening: opens the session for its first step. Raises as `Membership.open` does."""
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
        """As `Session.step`, from and to any device; the first one raises the errors of opening, too."""
        if (n_rows := activations.hidden.shape[0]) > ROWS_MAX:
            raise UsageError(f"a batch of {n_rows} is more than a session can have ({ROWS_MAX}); split it")
        device = activations.hidden.device
        ours = activations.copied()  # a journal keeps them, and the caller may write to its own again

        async def step() -> Tensor:
            session = self._session or await self._open(First(ours, want))
            return await session.step(ours, keep=keep, rows=rows, want=want)

        return self._loop.run(step()).to(device)

    def put(self, activations: Activations, *, keep: int) -> Begun[Tensor]:
        """As `Session.put`; all outputs are wanted, on the device of the loop. Only after the first step."""
        ours = activations.copied()

        def put() -> "asyncio.Future[Tensor]":
            self._refuse_if_closed()
            assert self._session is not None
            return self._session.put(ours, keep=keep)

        return self._loop.begin(put)

    @property
    def load(self) -> float:
        """Steps of others that the busiest hop announced when the route was planned."""
        return 0.0 if self._session is None else load_of(self._session.route)

    @property
    def step_s(self) -> float:
        """Seconds that the slowest hop takes for a step, by what it announced; 0 where it is unknown."""
        return 0.0 if self._session is None else step_s_of(self._session.route)

    def close(self) -> None:
        """Free the leases. Does not wait: it may be called wherever a cache is collected."""
        self._loop.start(self._close())

    # In the loop

    async def _open(self, first: First) -> Session:
        self._refuse_if_closed()
        self._session = await self._opening(first)
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
