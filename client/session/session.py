"""A session: one stateful run along a route. asyncio all through: `step` is the only thing that a user awaits.

    Session.step -> Travel.begin       the route stands
                 -> Steps.put          a chunk goes to the first hop; at most a window of them is in flight
                 -> Travel.collect     its answer; a fault that stops the route is repaired on the way
    Session.put  -> Flight             a step that leaves ahead of the answers before it
    Inlet        <- messages of the hops: answers settle steps, faults go to the circuit
    Watcher      <- time: asks the hops when a step takes long, and reports faults

With the first fault the route stops. The step that waits restores it, and all that was not answered is sent again. Hops
that have applied a step already answer from what they keep. The user notices only the time.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from torch import Tensor, cat

from swarm.activations import Activations
from swarm.client.planning.promise import Crossing
from swarm.client.planning.route import Hop
from swarm.client.session.attempt import Finder
from swarm.client.session.chunks import Chunk, cut
from swarm.client.session.circuit import Circuit, Shared
from swarm.client.session.flight import Flight
from swarm.client.session.inlet import Inlet
from swarm.client.session.moving import Mover
from swarm.client.session.plan import SessionPlan
from swarm.client.session.restore import Restorer
from swarm.client.session.ring import Use
from swarm.client.session.steps import Steps
from swarm.client.session.transcript import Testimony, Transcript
from swarm.client.session.travel import Travel
from swarm.client.session.watch import Watcher
from swarm.errors import HopFailed, NoRoute, PromptTooLong, SessionClosed, StepTimeout, SwarmError
from swarm.protocol.outbox import Ticket

_log = structlog.get_logger("swarm.session")


@dataclass(frozen=True, slots=True)
class First:
    """The first step of a session that is opened for it: the arguments of `Session.step`."""

    activations: Activations
    want: int
    ids: Tensor | None = None


class Session:
    """Made by `Sessions.open`. One step at a time; a long one is cut into chunks that are in flight together."""

    def __init__(self, session_id: str, plan: SessionPlan, finder: Finder, shared: Shared) -> None:
        """finder: of its hops, and later of those that take over from others."""
        self.length = 0  # positions that every hop has
        self._plan = plan
        self._shared = shared
        self.ended: asyncio.Future[Use | None] = asyncio.get_running_loop().create_future()  # when it is closed
        self.error: SwarmError | None = None  # a step has failed, or the session was closed: it takes no further step
        self._lock = asyncio.Lock()  # one step, or one move, at a time
        self._circuit = Circuit(session_id, shared)
        transcript = Transcript(shared.limits.transcript, plan.expansion) if plan.audited else None
        steps = Steps(self._circuit, shared.limits, shared.others, plan.coding, transcript)
        restorer = Restorer(self._circuit, shared, finder, plan, steps)
        self._travel = Travel(self._circuit, shared, steps, restorer)
        self._watcher = Watcher(self._circuit, steps, shared.limits.watch)
        pause_s = shared.limits.recovery.declined_s
        self._mover = Mover(
            self._circuit, restorer, self._watcher, self._lock, timeout_s=plan.step_timeout_s, pause_s=pause_s
        )
        self._flight = Flight(
            self._lock, self._travel, self._watcher, self._mover, failed=self._failed, timeout_s=plan.step_timeout_s
        )
        self.inlet = Inlet(self._circuit, steps, self._mover.ask, self._mover.idle_s, shared.limits.recovery)

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
        return max(0, self._travel.restorer.repairs - 1)

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """The repairs that brought blocks into another numeric class, in order."""
        return self._travel.restorer.crossings

    async def open(self, first: First | None = None) -> None:
        """Find a route and open the session on it. Called once, by `Sessions.open`.

        Then `length` is how much of the plan's prefix all hops have already. first: the step that is called next; its
        first chunk travels behind the Opens, unless the plan has a prefix.
        """
        limit_s = max(self._shared.limits.connect.open_s, self._plan.step_timeout_s) + self._plan.wait_for_blocks_s
        deadline = _now() + self._plan.step_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._lock:
                if first is not None and first.activations.tokens <= self._plan.positions_max:  # else `step` refuses it
                    self._circuit.behind_opens = partial(self._send_ahead, first)
                with self._watcher:
                    await self._travel.restorer.restore(deadline)
                self.length = self._travel.steps.held
        except TimeoutError:
            raise self._late() from None
        finally:
            self._circuit.behind_opens = None

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
            async with asyncio.timeout_at(deadline) as limit, self._lock:
                has_begun = True
                self._raise_if_ended()
                keep = self.length if keep is None else keep
                tokens = activations.tokens
                want = tokens if want is None else min(want, tokens)
                if keep + tokens > self._plan.positions_max:
                    raise PromptTooLong(keep + tokens, self._plan.positions_max, "the session")
                begun = self._travel.begun() or (self._cut(activations, keep, rows, want, ids), [])
                outputs = await self._run(*begun, tokens, deadline, limit)
        except (Exception, asyncio.CancelledError) as raised:
            error = self._failed(raised, has_begun=has_begun)
            if error is raised:
                raise
            raise error from None
        self.length = keep + tokens
        self._mover.rest()
        if not outputs:
            return activations.hidden[:, :0]
        return outputs[0] if len(outputs) == 1 else cat(outputs, dim=1)

    def put(
        self, activations: Activations, *, keep: int, want: int | None = None, ids: Tensor | None = None
    ) -> asyncio.Future[Tensor]:
        """Send activations of a few positions, which fit into one message, ahead of the answers before them.

        Returns a future of what `step` would return; answers come in order. keep: positions that stay, of those that
        were put. If it is less than all of them, the unanswered steps were guessed wrong: their answers are nobody's.
        The session ends with the first step that fails, as in `step`. Raises PromptTooLong, and nothing has changed; or
        the session's error.
        """
        self._raise_if_ended()
        assert self.length, "the session's first step opens its hops' caches"
        tokens = activations.tokens
        if keep + tokens > self._plan.positions_max:
            raise PromptTooLong(keep + tokens, self._plan.positions_max, "the session")
        (chunk,) = self._cut(activations, keep, None, tokens if want is None else want, ids)
        restart, self.length = keep < self.length, keep + tokens
        return self._flight.put(chunk, restart=restart)

    def testimony(self) -> Testimony | None:
        """Return the answers of the session's first hops until now, for an audit. None where none were kept."""
        steps = self._travel.steps
        return None if steps.transcript is None else steps.transcript.testimony(steps.past)

    def expel(self, process: str) -> None:
        """Have a process compute no more of the session, and no hop keep what followed from its outputs."""
        self._mover.expel(process)

    async def close(self) -> None:
        """End the session and free its leases. Closing twice is fine."""
        self._end(SessionClosed("it was closed"))
        self._mover.stop()
        self._circuit.close()
        if not self.ended.done():
            self.ended.set_result(self._watcher.ring.use)

    # A step

    def _cut(
        self, activations: Activations, keep: int, rows: Sequence[int] | None, want: int, ids: Tensor | None
    ) -> Iterator[Chunk]:
        limits = self._shared.limits.chunks
        batch, tokens, _ = activations.hidden.shape
        soon = keep + tokens + limits.positions_to_come
        self._travel.restorer.batch = batch
        self._travel.restorer.positions_soon = min(soon, self._plan.positions_max)
        rate = self._circuit.layout.prefill_tps if tokens > 1 else None
        return cut(activations, keep=keep, rows=rows, want=want, tokens_per_s=rate, limits=limits, ids=ids)

    def _send_ahead(self, first: First) -> None:
        """Send the first chunk of the step that is called next."""
        chunks = self._cut(first.activations, 0, None, min(first.want, first.activations.tokens), first.ids)
        self._travel.send_ahead(chunks, _now() + self._plan.step_timeout_s)

    async def _run(
        self, chunks: Iterator[Chunk], sent: list[Ticket], tokens: int, deadline: float, limit: asyncio.Timeout
    ) -> list[Tensor]:
        """Send chunks, as many at a time as keep all hops busy, and collect the wanted positions of each.

        sent: those that were sent already. deadline: of the first one. Each other has a step's time from the answer to
        the one before it. limit: moves with the deadlines.
        """
        began, repairs, timeout_s = _now(), self._travel.restorer.repairs, self._plan.step_timeout_s
        waiting, latest = deque(sent), deadline + len(sent) * timeout_s  # by which the next chunk may be answered
        outputs: list[Tensor] = []
        with self._watcher:
            try:
                await self._travel.begin(deadline)
                chunk = next(chunks, None)
                while chunk is not None or waiting:
                    busy = len(self._circuit.layout.legs) + self._shared.limits.chunks.chunks_ahead
                    if chunk is not None and len(waiting) < min(busy, self._travel.steps.window):
                        waiting.append(self._travel.steps.put(chunk, latest))
                        latest += timeout_s
                        chunk = next(chunks, None)
                        continue
                    outputs += await self._travel.collect(waiting.popleft(), deadline)
                    if waiting or chunk is not None:
                        deadline = _now() + timeout_s
                        limit.reschedule(deadline)
                        self._watcher.forget_holders()  # of the chunk before: the route goes on
            finally:
                self._travel.steps.clear()
        if self._travel.restorer.repairs == repairs and tokens == 1:
            self._watcher.observe(_now() - began)
        return outputs

    def _blame_holder(self) -> None:
        """A step's time has passed: the next route is to do without the hop that held it."""
        share = self._shared.limits.recovery.blame_share
        holder = self._watcher.holder(share * self._plan.step_timeout_s)
        if holder is not None:
            _log.info("step not computed in time", session=self.id[:8], hop=holder)
            self._shared.avoidance.failed(holder)

    # Ends

    def _failed(self, raised: BaseException, *, has_begun: bool = True) -> BaseException:
        """Return the error of a step that has failed; all but a prompt that is too long end the session.

        has_begun: else it has waited for another step to end.
        """
        if isinstance(raised, PromptTooLong):
            return raised
        error = raised
        if isinstance(raised, TimeoutError):
            error = StepTimeout(*self._awaited(), self._plan.step_timeout_s)
            if has_begun:
                self._blame_holder()
        self._end(error if isinstance(error, SwarmError) else SessionClosed("it was interrupted"))
        self._circuit.close()  # it takes no further step, and its leases are of use to others
        return error

    def _awaited(self) -> tuple[str, str]:
        """Return the peer id and the blocks that the first unanswered step waits for."""
        layout = self._circuit.layout
        if not layout.legs:
            return "any server", str(self._travel.restorer.blocks)
        front = layout.front(self._travel.steps.answered + 1).hop
        return front.peer_id, str(front.blocks)

    def _late(self) -> HopFailed | NoRoute:
        """Return the reason why opening is late."""
        layout = self._circuit.layout
        if not layout.legs:
            return NoRoute(self._plan.root, tuple(self._travel.restorer.blocks), "none was found in time")
        return layout.front(1).broken("it does not answer in time")

    def _raise_if_ended(self) -> None:
        if self.error is not None:
            raise self.error

    def _end(self, error: SwarmError) -> None:
        if self.error is None:
            self.error = error
        self._travel.steps.fail(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
