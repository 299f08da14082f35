"""A session: one stateful run along a route. asyncio all through: `step` is the only thing that a user awaits.

    Session.step -> Restorer.restore   the route stands
                 -> Steps.put          a chunk goes to the first hop; at most a window of them is in flight
                 -> Steps.outcome      its answer, or the fault that stopped the route
    Inlet        <- messages of the hops: answers settle steps, faults go to the circuit
    Watcher      <- time: asks the hops when a step takes long, and reports faults

With the first fault the route stops. The step that waits restores it, and all that was not answered is sent again. Hops
that have applied a step already answer from what they keep. The user notices only the time.
"""

import asyncio
from collections.abc import Iterator, Sequence

import structlog
from torch import Tensor, cat

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.planning.route import Hop
from swarm.client.session.attempt import Finder
from swarm.client.session.chunks import Chunk, cut
from swarm.client.session.circuit import Circuit, Shared
from swarm.client.session.inlet import Inlet
from swarm.client.session.moving import Mover
from swarm.client.session.plan import Planner, SessionPlan
from swarm.client.session.recovery import Fail, MoveAway, RefusedStep, Renew, Wait, after_refusal
from swarm.client.session.restore import Restorer
from swarm.client.session.steps import Steps
from swarm.client.session.watch import Watcher
from swarm.errors import (
    EdgeDown,
    HopFailed,
    NoRoute,
    PromptTooLong,
    Refused,
    SessionClosed,
    StepTimeout,
    SwarmError,
)
from swarm.protocol.outbox import Ticket

_log = structlog.get_logger("swarm.session")


class Session:
    """Made by `Sessions.open`. One step at a time; a long one is cut into chunks that are in flight together."""

    def __init__(self, session_id: str, plan: SessionPlan, blocks: Blocks, planner: Planner, shared: Shared) -> None:
        """blocks: what the route is to cover. planner: finds the hops, and later those that take over from others."""
        self.length = 0  # positions that every hop has
        self._plan = plan
        self._shared = shared
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when it is closed
        self._error: SwarmError | None = None  # the reason for the session's end
        self._lock = asyncio.Lock()  # one step, or one move, at a time
        self._circuit = Circuit(session_id, shared)
        self._steps = Steps(self._circuit, shared.limits, shared.others)
        self._restorer = Restorer(self._circuit, shared, Finder(blocks, planner), plan, self._steps)
        self._watcher = Watcher(self._circuit, self._steps, shared.limits.watch)
        self._mover = Mover(self._circuit, self._restorer, self._watcher, self._lock, plan.step_timeout_s)
        self.inlet = Inlet(self._circuit, self._steps, self._mover.ask, self._mover.idle_s, shared.limits.recovery)

    @property
    def id(self) -> str:
        """Its name on every hop."""
        return self._circuit.session

    @property
    def route(self) -> tuple[Hop, ...]:
        """The hops, in order."""
        return self._circuit.layout.hops

    @property
    def repairs(self) -> int:
        """How often the route was made to stand again."""
        return max(0, self._restorer.repairs - 1)

    async def open(self) -> None:
        """Find a route and open the session on it. Called once, by `Sessions.open`.

        Then `length` is how much of the plan's prefix all hops have already.
        """
        limit_s = max(self._shared.limits.connect.open_s, self._plan.step_timeout_s) + self._plan.wait_for_blocks_s
        deadline = _now() + self._plan.step_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._lock:
                with self._watcher.watching():
                    await self._restorer.restore(deadline)
                self.length = self._steps.held
        except TimeoutError:
            raise self._late() from None

    async def step(
        self,
        activations: Activations,
        *,
        keep: int | None = None,
        rows: Sequence[int] | None = None,
        want: int | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Send activations once around the route.

        Returns hidden states of the last `want` positions, [rows, want, hidden_size]; of all if None.
        keep: positions that stay, at most `length`; None for all. rows: the batch is gathered by them first.
        ids: the token ids that the activations embed, int [rows, tokens], where the plan has an expansion.
        Raises PromptTooLong, and nothing has changed; or StepTimeout, HopFailed, NoRoute, Refused or SessionClosed, and
        the session has ended.
        """
        assert (ids is None) == (self._plan.expansion is None), "the journal keeps ids, or embeddings"
        deadline = _now() + self._plan.step_timeout_s
        has_begun = False
        try:
            async with asyncio.timeout_at(deadline), self._lock:
                has_begun = True
                self._raise_if_ended()
                keep = self.length if keep is None else keep
                tokens = activations.tokens
                want = tokens if want is None else min(want, tokens)
                if keep + tokens > self._plan.positions_max:
                    raise PromptTooLong(keep + tokens, self._plan.positions_max, "the session")
                outputs = await self._run(self._cut(activations, keep, rows, want, ids), tokens, deadline)
        except TimeoutError:
            error = StepTimeout(*self._awaited(), self._plan.step_timeout_s)
            if has_begun:  # else it has waited for another step to end
                self._blame_holder()
            self._end(error)
            raise error from None
        except SwarmError as failed:
            if not isinstance(failed, PromptTooLong):
                self._end(failed)
            raise
        except asyncio.CancelledError:
            self._end(SessionClosed("it was interrupted"))
            raise
        self.length = keep + tokens
        self._mover.rest()
        if not outputs:
            return activations.hidden[:, :0]
        return outputs[0] if len(outputs) == 1 else cat(outputs, dim=1)

    async def close(self) -> None:
        """End the session and free its leases. Closing twice is fine."""
        self._end(SessionClosed("it was closed"))
        self._mover.stop()
        self._circuit.close()
        if not self.ended.done():
            self.ended.set_result(None)

    # A step

    def _cut(
        self, activations: Activations, keep: int, rows: Sequence[int] | None, want: int, ids: Tensor | None
    ) -> Iterator[Chunk]:
        limits = self._shared.limits.chunks
        soon = keep + activations.tokens + limits.positions_to_come
        self._restorer.batch = activations.rows
        self._restorer.positions_soon = min(soon, self._plan.positions_max)
        rate = self._circuit.layout.prefill_tps if activations.tokens > 1 else None
        return cut(activations, keep=keep, rows=rows, want=want, tokens_per_s=rate, limits=limits, ids=ids)

    async def _run(self, chunks: Iterator[Chunk], tokens: int, deadline: float) -> list[Tensor]:
        """Send chunks, at most a window of them in flight, and collect the wanted positions of each."""
        began, repairs = _now(), self._restorer.repairs
        outputs: list[Tensor] = []
        waiting: list[Ticket] = []
        with self._watcher.watching():
            try:
                await self._restorer.restore(deadline)
                self._steps.resend()
                for chunk in chunks:
                    if len(waiting) >= self._steps.window:
                        outputs += await self._collect(waiting.pop(0), deadline)
                    waiting.append(self._steps.put(chunk, deadline))
                while waiting:
                    outputs += await self._collect(waiting.pop(0), deadline)
            finally:
                self._steps.clear()
        if self._restorer.repairs == repairs and tokens == 1:
            self._watcher.patience.observe(_now() - began)
        return outputs

    async def _collect(self, ticket: Ticket, deadline: float) -> list[Tensor]:
        """Return one step's output, if any is wanted, and repair the route as needed until it is there."""
        began = _now()
        refused_step: RefusedStep | None = None
        while True:
            if self._circuit.standing is None and ticket.outcome is None:
                await self._restorer.restore(deadline)  # a fault between two steps has failed neither
                self._steps.resend()
            try:
                output = await self._steps.outcome(ticket)
            except Refused as refused:
                refused_step = refused_step or RefusedStep(self._restorer.patience(began, deadline))
                refused_step = await self._after_refusal(refused_step, refused, deadline)
            except (HopFailed, EdgeDown):
                pass
            else:
                return [] if output is None else [output]
            await self._restorer.restore(deadline)
            self._steps.resend()

    async def _after_refusal(self, step: RefusedStep, refused: Refused, deadline: float) -> RefusedStep:
        """Act on a refused step until it may be sent again. Raises the refusal if it may not."""
        process = self._circuit.layout.process_of(refused.peer)
        while True:
            action = after_refusal(step, refused, process, _now(), self._shared.limits.recovery)
            match action:
                case Fail(error):
                    raise error
                case Renew():
                    self._circuit.renew()
                case Wait():
                    await self._restorer.wait(action)
                case MoveAway(processes):
                    if not await self._restorer.replace(processes, deadline):
                        step = step.stays_alone()
                        continue
            return step.done(action, refused)

    def _blame_holder(self) -> None:
        """A step's time has passed: the next route is to do without the hop that held it."""
        share = self._shared.limits.recovery.blame_share
        holder = self._watcher.holder(share * self._plan.step_timeout_s)
        if holder is not None:
            _log.info("step not computed in time", session=self.id[:8], hop=holder)
            self._shared.avoidance.failed(holder)

    # Ends

    def _awaited(self) -> tuple[str, str]:
        """Return the peer id and the blocks that the first unanswered step waits for."""
        layout = self._circuit.layout
        if not layout.legs:
            return "any server", str(self._restorer.blocks)
        front = layout.front(self._steps.answered + 1).hop
        return front.peer_id, str(front.blocks)

    def _late(self) -> HopFailed | NoRoute:
        """Return the reason why opening is late."""
        layout = self._circuit.layout
        if not layout.legs:
            return NoRoute(self._plan.root, tuple(self._restorer.blocks), "none was found in time")
        return layout.front(1).broken("it does not answer in time")

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, error: SwarmError) -> None:
        if self._error is None:
            self._error = error
        self._steps.fail(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
