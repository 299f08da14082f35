"""A session: one stateful run along a route, as the client sees it. Everything here runs in the client's event loop."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import structlog
from torch import Tensor, cat

from swarm.activations import Activations
from swarm.client.planning.route import Hop
from swarm.client.session.avoidance import Avoidance, Edge
from swarm.client.session.chunks import Chunk, cut
from swarm.client.session.flights import Flight, Flights
from swarm.client.session.leg import EdgeDown, Reply, fail
from swarm.client.session.live import LiveRoute, Plan, SessionPlan
from swarm.client.session.watch import Watcher
from swarm.errors import (
    HopFailed,
    NoRoute,
    PromptTooLong,
    Refused,
    RouteError,
    SessionClosed,
    SessionError,
    StepTimeout,
    SwarmError,
)
from swarm.net.channel import Channel
from swarm.protocol import messages as wire
from swarm.protocol.journal import Entry, Journal, Past
from swarm.protocol.tensors import is_finite, metas_of

OPEN_TIMEOUT_S = 30.0
HOLDERS_S = 15.0  # how long those who announce missing blocks, but failed, are asked again
DECLINED_S = 10.0  # who refuses without saying for how long, or is leaving, is not asked again before
IDLE_S = 600.0  # without a step: then hops may end a session, and none is to blame for it
ROOM_S = 1.0  # who has no room is asked once more after so long, or sooner, and then left
ROOM_HELD_S = 5.0  # who waits for room holds its own for so long, or up to twice as long: others may wait for that
LATE_S = 1.0  # before a step's deadline: a hop that says earlier that it is too late is not believed
HELD_SHARE = 0.5  # of a step's time: whoever has kept it for so long when it is over has failed
POSITIONS_TO_COME = 128  # of each row, beyond a step: what hops are to have room for
ASK_S = 0.5  # who is full is not asked again sooner: those whose turn it is do not open more than servers let them
WAIT_FIRST_S = 0.05  # before they, or the directory, are asked again; then twice as long, up to:
WAIT_POLL_S = 1.0
WAITS_COUNTED = 16  # by then it is the longest pause, and 2 ** waits stays a number

FromHop = (
    wire.Opened
    | wire.Rerouted
    | wire.Rebuilt
    | wire.Progress
    | wire.Leaving
    | wire.Step
    | wire.Rebuild
    | wire.Output
    | wire.Refused
    | wire.Failed
)
AnyEpoch = wire.Progress | wire.Leaving  # true of the hop, whatever the route

Trouble = HopFailed | Refused | EdgeDown

_log = structlog.get_logger("swarm.session")


class Session:
    """Made by `Sessions.open`. One step at a time; a long one is cut into chunks that are under way together.

    What goes wrong is a *trouble*: a hop that fails or refuses, or an edge between two of them. With the first one the
    route stops; `_restore` mends it until nothing is in its way. What was not answered is then sent again; hops that
    have applied it already answer from what they remember. Nobody notices but by the time that it takes.
    """

    def __init__(
        self,
        session_id: str,
        plan: SessionPlan,
        planner: Plan,
        live: LiveRoute,
        avoidance: Avoidance,
        turns: asyncio.Semaphore,
    ) -> None:
        """planner: finds hops. live: a route on which nothing is connected yet. turns: to ask those who are full."""
        self.id = session_id
        self.live = live
        self.length = 0  # positions that every hop has
        self.repairs = 0
        self._plan = plan
        self._planner = planner
        self._avoidance = avoidance
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # done when it is closed
        self._lock = asyncio.Lock()  # one step, or one move, at a time
        self._journal = Journal()  # of the embeddings: the client is hop 0
        self._step = 0
        self._answered = 0  # the last step that the last hop has answered
        self._in_flight = Flights(self._transmit)
        self._troubles: list[Trouble] = []
        self._reconnected: set[Edge] = set()  # that broke, with no answer since
        self._leaving: set[str] = set()  # processes that asked to be left
        self._mover: asyncio.Task[None] | None = None
        self._ended: SwarmError | None = None
        self._used_at = self._loop.time()  # when the last step was over
        self._deadline = self._used_at  # of the step, or of opening
        self._watcher = Watcher(live, self._in_flight.unanswered, self._stop_for, self._resend_all)

    @property
    def route(self) -> tuple[Hop, ...]:
        """The hops, in order."""
        return self.live.hops

    async def open(self) -> None:
        """Find a route and open the session on it. Called once, by `Sessions.open`."""
        limit_s = max(OPEN_TIMEOUT_S, self._plan.step_timeout_s) + self._plan.wait_for_blocks_s
        self._deadline = self._loop.time() + self._plan.step_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._lock:
                with self._watcher.watching():
                    await self._restore()
        except TimeoutError:
            raise self.live.late() from None
        self.repairs = 0

    # Steps

    async def step(
        self,
        activations: Activations,
        *,
        keep: int | None = None,
        rows: Sequence[int] | None = None,
        want: int | None = None,
    ) -> Tensor:
        """Send activations once around the route.

        Returns hidden states of the last `want` positions, [rows, want, hidden_size]; of all if None.
        keep: positions that stay, at most `length`; None for all. rows: the batch is gathered by them first.
        Raises PromptTooLong, and nothing has changed; or StepTimeout, HopFailed, NoRoute, Refused or SessionClosed, and
        the session has ended.
        """
        deadline = self._loop.time() + self._plan.step_timeout_s
        try:
            async with asyncio.timeout_at(deadline), self._lock:
                self._raise_if_ended()
                keep = self.length if keep is None else keep
                tokens = activations.tokens
                want = tokens if want is None else min(want, tokens)
                if keep + tokens > self._plan.positions_max:
                    raise PromptTooLong(keep + tokens, self._plan.positions_max, "the session")
                self._deadline = deadline
                self.live.batch = activations.rows
                self.live.positions_soon = min(keep + tokens + POSITIONS_TO_COME, self._plan.positions_max)
                rate = self.live.prefill_tps
                chunks = cut(activations, keep=keep, rows=rows, want=want, tokens_per_s=rate)
                outputs = await self._run(chunks, tokens)
        except TimeoutError:
            error = StepTimeout(*self.live.awaited(self._answered + 1), self._plan.step_timeout_s)
            if self._deadline == deadline:  # else it has waited for another one to end
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
        self._used_at = self._loop.time()
        self._move_if_asked()
        return outputs[0] if len(outputs) == 1 else cat(outputs, dim=1)

    async def _run(self, chunks: Iterator[Chunk], tokens: int) -> list[Tensor]:
        """Send chunks, at most a window of them under way, and collect what is wanted of each."""
        began, repairs = self._loop.time(), self.repairs
        outputs: list[Tensor] = []
        waiting: list[Flight] = []
        with self._watcher.watching():
            try:
                await self._restore()
                for chunk in chunks:
                    if len(waiting) >= self.live.window:
                        await self._collect(waiting.pop(0), outputs)
                    waiting.append(self._send(chunk))
                while waiting:
                    await self._collect(waiting.pop(0), outputs)
            finally:
                self._in_flight.clear()
        if self.repairs == repairs and tokens == 1:
            self._watcher.steps.observe(self._loop.time() - began)
        return outputs

    async def _collect(self, flight: Flight, outputs: list[Tensor]) -> None:
        """Wait for one answer, whatever it takes: who has no room is asked once more and then left, who fails too.

        What a hop calls impossible another one is asked, too, before it is believed; and all of them, whether it fits.
        How late it is the client knows itself.
        """
        began = self._loop.time()
        asked_again = renewed = False
        unable: set[str] = set()  # processes
        while True:
            try:
                output = await flight.answer
                break
            except Refused as refused:
                if refused.code == "grant_over" and not renewed:
                    renewed = True
                    self.live.stands = False  # the same route once more: that grants anew
                elif refused.retry_after_s is None:
                    unable.add(self.live.process_of(refused.peer))
                    late = refused.code == "too_late" and self._loop.time() > self._deadline - LATE_S
                    believed = late or (refused.code != "no_room" and len(unable) > 1)
                    if believed or not await self._move_away(unable):
                        raise
                elif not asked_again or not await self._move_away({self.live.process_of(refused.peer)}):
                    wait_s = refused.retry_after_s if asked_again else min(ROOM_S, refused.retry_after_s)
                    await self._wait_for_room(refused, wait_s, began)
                    asked_again = True
            except (HopFailed, EdgeDown):
                pass
            await self._restore()  # what broke while we slept has failed no step, since there was none under way
            self._resend_all()
        self._in_flight.take_off(flight)
        if output is not None:
            outputs.append(output)

    def _send(self, chunk: Chunk) -> Flight:
        self._step += 1
        metas = metas_of(chunk.activations)
        message = wire.Step(
            session=self.id,
            epoch=self.live.epoch,
            step=self._step,
            keep=chunk.keep,
            rows=chunk.rows,
            budget_ms=max(1, int(1000 * (self._deadline - self._loop.time()))),
            want=chunk.want,
            hidden=metas.hidden,
            positions=metas.positions,
            mask=metas.mask,
        )
        self._journal.add(Entry(self._step, chunk.rows, Past(chunk.keep, chunk.activations)))
        return self._in_flight.begin(message, chunk.activations)

    def _resend_all(self) -> None:
        """Send again what has not been answered, in order."""
        self._in_flight.send_again(self.live.epoch)

    def _transmit(self, flight: Flight) -> None:
        try:
            self.live.send(0, flight.message, flight.activations)
        except HopFailed as failed:
            self._stop_for(failed)
            fail(flight.answer, failed)  # also when that is known already

    # When something goes wrong

    def _stop_for(self, trouble: Trouble) -> None:
        """The route does not stand any more: whoever waits for a hop, or for a step, learns of it."""
        if isinstance(trouble, HopFailed) and not self.live.give_up(trouble.peer):
            return  # known
        self._troubles.append(trouble)
        self.live.stands = False
        for leg in self.live.legs:
            leg.fail(trouble)
        self._in_flight.fail(trouble)

    async def _restore(self) -> None:
        """Mend the route until it stands. Raises NoRoute; in a new session also what is wrong with the only holder."""
        if self.live.stands:
            return
        mending = _Mending(self._loop.time())
        self.live.spent.clear()
        try:
            if not self._answered and self._turns.locked():
                await self._take_turn(mending)
            await self._mend(mending)
        finally:
            if mending.has_turn:
                self._turns.release()
        self.repairs += 1
        route = [f"{hop.peer_id} {hop.blocks}" for hop in self.route]
        took = {"seconds": self._loop.time() - mending.began, **self.live.spent}
        _log.info("route stands", session=self.id[:8], route=route, **{phase: round(s, 3) for phase, s in took.items()})

    async def _mend(self, mending: "_Mending") -> None:
        while not self.live.stands:
            self._raise_if_ended()
            busy = None
            for mending.last in self._troubles:
                if self._has_past_but_is_busy(mending.last):
                    busy = mending.last
                else:
                    mending.without |= self._learn(mending.last)
            self._troubles.clear()
            if busy is not None:
                await self._wait_for_room(busy, min(WAIT_POLL_S, max(ASK_S, busy.retry_after_s or 0.0)), mending.began)
            if cut_off := self._avoidance.cut_off:
                mending.cut_off_at = self._loop.time()
            try:
                await self._repair(mending.without)
            except NoRoute as nobody:
                await self._wait_for_somebody(mending, nobody)
            if cut_off and not self._avoidance.cut_off:  # then what failed says nothing about anybody
                self._troubles.clear()
                mending.without.clear()
                self.live.regained += 1

    async def _wait_for_somebody(self, mending: "_Mending", nobody: NoRoute) -> None:
        """Nobody can take over now. Returns when it is worth another try; else raises."""
        last = mending.last
        # Those who failed us may have lost but a connection, or be about to be started again.
        asked = mending.without or mending.cut_off_at
        patience_s = max(self._plan.wait_for_blocks_s, HOLDERS_S if asked else 0.0)
        if isinstance(last, Refused) and last.retry_after_s is not None:
            if not self._answered:
                self.live.leave()
                await self._take_turn(mending, last)
            await self._wait_for_room(last, min(WAIT_POLL_S, max(ASK_S, last.retry_after_s)), mending.began)
            mending.without.clear()
        elif self._loop.time() - max(mending.began, mending.cut_off_at) < patience_s:
            await asyncio.sleep(min(WAIT_POLL_S, WAIT_FIRST_S * 2**mending.waits))
            mending.waits = min(mending.waits + 1, WAITS_COUNTED)
            mending.without.clear()
        elif last is None:
            raise nobody
        elif self._answered:
            raise NoRoute(nobody.model, nobody.missing, f"nobody can take over: {nobody.why} ({last})") from None
        else:
            raise last if not isinstance(last, EdgeDown) else nobody from None

    async def _wait_for_room(self, full: Refused, for_s: float, since: float) -> None:
        """Wait before who is full is asked again. Raises `full` if that is too late: it says more than a timeout does.

        After a while without room of its own: those who wait for more, and hold what they have, wait for each other.
        """
        if full.code == "no_room" and self._loop.time() - since > self._held_s:
            self.live.leave()
        if self._loop.time() + for_s >= self._deadline:
            raise full
        await asyncio.sleep(for_s)
        self._in_flight.slow_down()

    async def _take_turn(self, mending: "_Mending", full: Refused | None = None) -> None:
        """Wait in line with other new sessions for those who are full. Raises `full` when that takes too long."""
        if mending.has_turn:
            return
        try:
            async with asyncio.timeout_at(self._deadline - WAIT_FIRST_S if full is not None else None):
                await self._turns.acquire()
        except TimeoutError:
            assert full is not None
            raise full from None
        mending.has_turn = True

    async def _repair(self, without: set[str]) -> None:
        """Mend the route once; what gives way meanwhile is the next trouble. Raises NoRoute."""
        try:
            await self.live.repair(without, self._planner, self._journal, self._answered)
        except* (HopFailed, Refused, EdgeDown) as troubles:
            for trouble in troubles.exceptions:
                assert not isinstance(trouble, ExceptionGroup)
                if trouble not in self._troubles:
                    self._stop_for(trouble)
        if self._troubles:
            self.live.stands = False

    def _has_past_but_is_busy(self, trouble: Trouble) -> TypeGuard[Refused]:
        """Whether a hop is told too often of new neighbours: for a while, it is worth waiting for what others lack."""
        if not isinstance(trouble, Refused) or trouble.code != "busy":
            return False
        return (trouble.retry_after_s or 0.0) <= ROOM_HELD_S and self.live.is_whole(trouble.peer)

    def _learn(self, trouble: Trouble) -> set[str]:
        """Remember who or what is at fault, for all sessions. Returns the processes to do without."""
        _log.info("route broken", session=self.id[:8], why=str(trouble))
        if isinstance(trouble, EdgeDown):
            if trouble.blocked or trouble.edge in self._reconnected:
                self._avoidance.block(trouble.edge)
            self._reconnected.add(trouble.edge)
            return set()
        process = self.live.process_of(trouble.peer)
        if isinstance(trouble, Refused):
            self._avoidance.declined(process, trouble.retry_after_s or DECLINED_S)
        else:
            self._avoidance.failed(process)
        return {process}

    def _blame_holder(self) -> None:
        """A step's time is over: the next route is to do without the hop that has had it, whatever that hop says."""
        holder = self._watcher.holder(HELD_SHARE * self._plan.step_timeout_s)
        if holder is not None:
            _log.info("step not computed in time", session=self.id[:8], hop=holder)
            self._avoidance.failed(holder)

    # Leaving hops that are in good order

    async def _move_away(self, processes: set[str]) -> bool:
        """Move to others. Returns False, and nothing has changed, where there are none."""
        for process in processes:
            self._avoidance.declined(process, DECLINED_S)
        try:
            await self._repair(processes)
        except NoRoute:
            return False
        await self._restore()
        return True

    def _move_if_asked(self) -> None:
        """A hop is about to leave: move between two steps, while it still serves."""
        if self._leaving and not self._lock.locked() and (self._mover is None or self._mover.done()):
            self._mover = self._loop.create_task(self._move())

    async def _move(self) -> None:
        async with self._lock:
            leaving, self._leaving = self._leaving & {hop.process for hop in self.route}, set()
            if self._ended is not None or not self.live.stands or not leaving:
                return
            try:
                self._deadline = self._loop.time() + self._plan.step_timeout_s
                async with asyncio.timeout_at(self._deadline):
                    with self._watcher.watching():
                        moved = await self._move_away(leaving)
            except (TimeoutError, SessionError, RouteError) as error:
                _log.info("could not move", session=self.id[:8], why=str(error))  # the next step will see to it
                return
        if not moved:
            _log.info("nobody can take over from hops that leave", session=self.id[:8], hops=sorted(leaving))

    # What hops say

    def on_message(self, channel: Channel, message: FromHop, activations: Activations | None) -> None:
        """Take one message of this session. Only the hops of the route are listened to, each for its own part."""
        index = self.live.leg_of(channel)
        if index is None:
            return
        leg = self.live.legs[index]
        match message:
            case wire.Output():
                if index == len(self.live.legs) - 1:
                    self._on_output(message, activations)
            case wire.Step() | wire.Rebuild():
                if self.live.is_relayed(index):
                    assert activations is not None
                    self._hand_on(index + 1, message, activations)
            case wire.Refused():
                self._on_refused(index, message)
            case wire.Progress():
                leg.tell(message)
            case wire.Leaving():
                self._leaving.add(leg.hop.process)
                self._move_if_asked()
            case wire.Failed():
                self._on_failed(index, message)
            case _:
                self._on_reply(index, message)

    def _hand_on(self, index: int, message: wire.Step | wire.Rebuild, activations: Activations) -> None:
        """Carry what a hop cannot send to the next one itself; what the next one would refuse is its own fault."""
        hidden, source, target = activations.hidden, self.live.legs[index - 1], self.live.legs[index]
        flight = self._in_flight.get(message.step) if isinstance(message, wire.Step) else None
        if isinstance(message, wire.Step) and flight is None:
            return  # it has been answered
        due = flight.message.hidden.shape if flight is not None else None
        formed = hidden.dim() == 3 and _is_sound(hidden)
        if not formed or due not in {None, tuple(hidden.shape)}:
            self._stop_for(source.broken("its activations are of the wrong shape or type, infinite or no numbers"))
            return
        try:
            if isinstance(message, wire.Rebuild):
                self.live.hand_past(index, message, activations)
            else:
                self.live.send(index, message, activations)
                target.carried = message.step
        except HopFailed as failed:
            self._stop_for(failed)

    def _on_reply(self, index: int, reply: Reply) -> None:
        try:
            self.live.hear(index, reply)
        except HopFailed as failed:
            self._stop_for(failed)

    def _on_output(self, message: wire.Output, activations: Activations | None) -> None:
        flight = self._in_flight.get(message.step)
        if flight is None or flight.answer.done() or message.step != self._answered + 1:
            return  # what comes before those it follows would be left out of a repair; it will be sent again
        sent = flight.message
        shape = (sent.hidden.shape[0], sent.want, sent.hidden.shape[2])
        hidden = None if activations is None else activations.hidden
        got = None if hidden is None else tuple(hidden.shape)
        if got == (shape if sent.want else None) and (hidden is None or _is_sound(hidden)):
            self._answered = message.step
            self._reconnected.clear()
            self.live.regained = 0
            self._in_flight.answer(flight, hidden)
            return
        wrong = f"{got} where {shape} is due" if got != shape else "what is of the wrong type, infinite or no numbers"
        self._stop_for(self.live.legs[-1].broken(f"it answered {wrong}"))

    def _on_failed(self, index: int, message: wire.Failed) -> None:
        leg = self.live.legs[index]
        if message.blame == "next" and index + 1 < len(self.live.legs) and not self.live.is_relayed(index):
            why = f"{message.why} (says {leg.hop.peer_id})"
            self._stop_for(EdgeDown(self.live.edge(index), why, blocked=bool(leg.waiting)))
        elif not self._lock.locked() and self._loop.time() - self._used_at > IDLE_S:
            self.live.let_go(leg)
        else:
            self._stop_for(leg.broken(message.why))

    def _on_refused(self, index: int, message: wire.Refused) -> None:
        leg = self.live.legs[index]
        retry_after_s = None if message.retry_after_ms is None else message.retry_after_ms / 1000
        error = Refused(leg.hop.peer_id, str(leg.hop.blocks), message.code, message.why, retry_after_s)
        if message.code == "bad_activations" and index > 0:
            if self.live.is_relayed(index - 1):  # we have seen what it refuses
                self._stop_for(leg.broken(f"it refuses what is in good order: {message.why}"))
            else:  # one of the two is at fault, and we cannot tell which
                self._stop_for(EdgeDown(self.live.edge(index - 1), message.why, blocked=False))
            return
        if message.step is None and leg.waiting:
            leg.fail(error)
            return
        if message.step is None:
            if self.live.stands or message.code == "not_yours":
                self._stop_for(leg.broken(f"it has lost the session: {message.why}"))
            elif message.code != "bad_request":  # that follows where a part of the past was refused before
                self._stop_for(error)  # late, as another hop's trouble came first
            return
        flight = self._in_flight.get(message.step)
        if message.code in {"out_of_order", "not_yours"} or flight is None or flight.answer.done():
            return  # it follows from what happened before, and the step will be sent again
        leg.refusals += 1
        fail(flight.answer, error)

    def on_ended(self, channel: Channel, why: str) -> None:
        """A channel has ended; if it was to one of our hops, that hop has failed."""
        index = self.live.leg_of(channel)
        if index is not None:
            self._stop_for(self.live.legs[index].broken(f"the connection ended: {why}"))

    # The end

    async def close(self) -> None:
        """End the session and free its leases. Closing twice is fine."""
        self._end(SessionClosed("it was closed"))
        if self._mover is not None:
            self._mover.cancel()
        self.live.close()
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def _held_s(self) -> float:
        """For how long it holds its room while it waits for more: two that wait for each other do not both give way."""
        return ROOM_HELD_S * (1 + int(self.id[:8], 16) / 2**32)

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _end(self, error: SwarmError) -> None:
        if self._ended is None:
            self._ended = error
        self._in_flight.fail(error)


@dataclass(slots=True)
class _Mending:
    """What has been tried to make a route stand. without: processes that failed or declined since we last waited."""

    began: float
    without: set[str] = field(default_factory=set)
    last: Trouble | None = None
    waits: int = 0
    has_turn: bool = False
    cut_off_at: float = 0.0  # the last time that the client was so: till then nobody could take over, whoever it was


def _is_sound(hidden: Tensor) -> bool:
    """Whether activations are numbers to go on with, whatever their shape."""
    return hidden.dtype.is_floating_point and is_finite(hidden)
