"""A session: one stateful run along a route, as the client sees it. Everything here runs in the client's event loop."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog
from torch import Tensor, cat

from swarm.client.live import Leg, LiveRoute, Plan, SessionPlan, fail
from swarm.client.route import Hop
from swarm.errors import (
    ChannelClosed,
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
from swarm.net.channel import Channel, Tensors
from swarm.net.dialer import Dialer
from swarm.wire import messages as wire
from swarm.wire.journal import Entry, Journal, Past
from swarm.wire.tensors import CHUNK_BYTES, meta_of

OPEN_TIMEOUT_S = 30.0
HEARTBEAT_S = 2.0  # a step that takes longer makes us ask every hop whether it lives, so often
HEARTBEAT_TIMEOUT_S = 3.0
REPAIR_TRIES = 8  # in a row
WAIT_POLL_S = 1.0  # how often the directory is looked at while nobody serves some block

FromHop = wire.Opened | wire.Rerouted | wire.Rebuilt | wire.Output | wire.Refused | wire.Failed

_log = structlog.get_logger("swarm.session")


@dataclass(slots=True)
class _InFlight:
    """A step that was sent and not answered. Kept whole, so that it can be sent again."""

    message: wire.Step
    tensors: Sequence[Tensor]
    answer: asyncio.Future[Tensor | None]


class Sessions:
    """The client's open sessions, by their id: where messages from hops go."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._watched: set[Channel] = set()
        self.dialer: Dialer  # set by whoever builds both: each needs the other

    def on_message(self, channel: Channel, message: wire.AnyMessage, tensors: Tensors) -> None:
        """Hand a message to its session; what belongs to none (any more) is dropped."""
        if isinstance(message, FromHop):
            session = self._by_id.get(message.session)
            if session is not None and message.epoch == session.live.epoch:
                session.on_message(channel, message, tensors)

    async def open(self, plan: SessionPlan, route: Sequence[Hop], replan: Plan) -> "Session":
        """Open a session on every hop of the route. Raises HopFailed or Refused, and then nothing is left open.

        replan: finds hops to take over from those that fail later on.
        """
        session = Session(self, plan, route, replan)
        self._by_id[session.id] = session
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await session.live.open(self.watch)
        except TimeoutError:
            late = session.live.late()
            await session.close()
            raise late from None
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End all sessions and all channels."""
        for session in list(self._by_id.values()):
            await session.close()
        await self.dialer.close()

    def watch(self, channel: Channel) -> None:
        """Tell sessions of a channel's end, by one callback for all that use it."""

        def ended(reason: asyncio.Future[str]) -> None:
            self._watched.discard(channel)
            for session in list(self._by_id.values()):
                session.on_ended(channel, reason.result())

        if channel not in self._watched:
            self._watched.add(channel)
            channel.ended.add_done_callback(ended)

    def forget(self, session: "Session") -> None:
        """The session has ended."""
        self._by_id.pop(session.id, None)


class Session:
    """Made by `Sessions.open`. One step at a time; a long one is cut into chunks that are under way together.

    A hop that fails is replaced, and nobody notices but by the time that it takes: see `LiveRoute.repair`. What was not
    answered is then sent again; hops that have applied it already answer from what they remember.
    """

    def __init__(self, sessions: Sessions, plan: SessionPlan, route: Sequence[Hop], replan: Plan) -> None:
        self.id = secrets.token_hex(16)
        self.length = 0  # positions that every hop has
        self.repairs = 0
        self.live = LiveRoute(self.id, plan, route, sessions.dialer)
        self._plan = plan
        self._replan = replan
        self._sessions = sessions
        self._loop = asyncio.get_running_loop()
        self._journal = Journal()  # of the embeddings: the client is hop 0
        self._step = 0
        self._answered = 0  # the last step that the last hop has answered
        self._in_flight: dict[int, _InFlight] = {}
        self._failed: set[str] = set()  # processes that this session does without
        self._broken: HopFailed | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._ended: SwarmError | None = None

    @property
    def route(self) -> tuple[Hop, ...]:
        """The hops, in order."""
        return self.live.hops

    # Steps

    async def step(
        self,
        hidden: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        keep: int | None = None,
        rows: Sequence[int] | None = None,
        want: int | None = None,
    ) -> Tensor:
        """Send activations once around the route.

        hidden: [batch, tokens, hidden_size]. Returns the last `want` positions of the same shape; all if None.
        positions: int64 [batch or 1, tokens]; None counts on from `keep`.
        mask: uint8 [batch, tokens], the new columns of the attention mask; None for no padding among them.
        keep: positions that stay, at most `length`; None for all. rows: the batch is gathered by them first.
        Raises PromptTooLong, and nothing has changed; or StepTimeout, HopFailed, NoRoute, Refused or SessionClosed, and
        the session has ended.
        """
        if self._ended is not None:
            raise self._ended
        keep = self.length if keep is None else keep
        tokens = hidden.shape[1]
        want = tokens if want is None else min(want, tokens)
        if keep + tokens > self._plan.positions_max:
            raise PromptTooLong(keep + tokens, self._plan.positions_max, "the session")
        chunks = _chunks(hidden, positions=positions, mask=mask, keep=keep, rows=rows, want=want)
        deadline = self._loop.time() + self._plan.step_timeout_s
        patience = self._loop.call_later(HEARTBEAT_S, self._lose_patience)
        try:
            async with asyncio.timeout_at(deadline):
                outputs = await self._run(chunks, deadline)
        except TimeoutError:
            late = self.route[-1]
            error = StepTimeout(late.peer_id, str(late.blocks), self._plan.step_timeout_s)
            self._end(error)
            raise error from None
        except (SessionError, RouteError) as failed:
            self._end(failed)
            raise
        except asyncio.CancelledError:
            self._end(SessionClosed("it was interrupted"))
            raise
        finally:
            patience.cancel()
            if self._heartbeat is not None:
                self._heartbeat.cancel()
                self._heartbeat = None
        self.length = keep + tokens
        return outputs[0] if len(outputs) == 1 else cat(outputs, dim=1)

    async def _run(self, chunks: Iterator["_Chunk"], deadline: float) -> list[Tensor]:
        """Send chunks, at most a window of them under way, and collect what is wanted of each."""
        outputs: list[Tensor] = []
        waiting: list[_InFlight] = []
        try:
            if self._broken is not None:
                await self._repair()
            for chunk in chunks:
                if len(waiting) >= self.live.window:
                    await self._collect(waiting.pop(0), outputs, deadline)
                waiting.append(self._send(chunk, deadline))
            while waiting:
                await self._collect(waiting.pop(0), outputs, deadline)
        finally:
            self._in_flight.clear()
        return outputs

    async def _collect(self, flight: _InFlight, outputs: list[Tensor], deadline: float) -> None:
        """Wait for one answer, whatever it takes: a hop without room is asked again, one that fails is replaced."""
        while True:
            try:
                output = await flight.answer
                break
            except Refused as refused:
                if refused.code != "no_room" or refused.retry_after_s is None:
                    raise
                if self._loop.time() + refused.retry_after_s >= deadline:
                    raise  # who is full says more than that time is over
                await asyncio.sleep(refused.retry_after_s)
            except HopFailed:
                await self._repair()
            for number in sorted(self._in_flight):
                self._resend(self._in_flight[number])
        self._in_flight.pop(flight.message.step, None)
        if output is not None:
            outputs.append(output)

    def _send(self, chunk: "_Chunk", deadline: float) -> _InFlight:
        self._step += 1
        message = wire.Step(
            session=self.id,
            epoch=self.live.epoch,
            step=self._step,
            keep=chunk.keep,
            rows=chunk.rows,
            budget_ms=max(1, int(1000 * (deadline - self._loop.time()))),
            want=chunk.want,
            hidden=meta_of(chunk.hidden),
            positions=meta_of(chunk.positions) if chunk.positions is not None else None,
            mask=meta_of(chunk.mask) if chunk.mask is not None else None,
        )
        past = Past(chunk.keep, chunk.hidden, chunk.positions, chunk.mask)
        self._journal.add(Entry(self._step, chunk.rows, past))
        tensors = [tensor for tensor in (chunk.hidden, chunk.positions, chunk.mask) if tensor is not None]
        flight = _InFlight(message, tensors, self._loop.create_future())
        self._in_flight[self._step] = flight
        self._transmit(flight)
        return flight

    def _resend(self, flight: _InFlight) -> None:
        """Send a step again unless it has been answered."""
        if flight.answer.done():
            if flight.answer.exception() is None:
                return
            flight.answer = self._loop.create_future()
        if flight.message.epoch != self.live.epoch:
            flight.message = flight.message.model_copy(update={"epoch": self.live.epoch})
        self._transmit(flight)

    def _transmit(self, flight: _InFlight) -> None:
        try:
            self.live.send(0, flight.message, flight.tensors)
        except HopFailed as failed:
            self._break(failed)

    # When a hop fails

    async def _repair(self) -> None:
        """Replace what failed, until the route stands. Raises NoRoute, or the last failure after REPAIR_TRIES."""
        began = self._loop.time()
        forgiven: set[str] = set()
        forgiving = False
        tries = 0
        while (broken := self._broken) is not None:
            tries += 1
            if tries > REPAIR_TRIES:
                raise broken
            _log.info("repairing", session=self.id[:8], peer=broken.peer, span=broken.span, why=broken.why)
            if not forgiving:
                self._failed.add(self.live.process_of(broken.peer))
            forgiving, self._broken = False, None
            try:
                await self.live.repair(self._failed, self._replan, self._journal, self._answered, self._sessions.watch)
            except HopFailed as failed:
                self._broken = failed
            except Refused as refused:
                self._broken = HopFailed(refused.peer, refused.span, str(refused))
            except NoRoute as nobody:
                self._broken = broken
                if self._failed - forgiven:  # perhaps it was but the connection: ask everybody again, once
                    forgiven |= self._failed
                    self._failed.clear()
                    forgiving = True
                elif self._loop.time() - began < self._plan.wait_for_blocks_s:
                    await asyncio.sleep(WAIT_POLL_S)
                    tries = 0
                else:
                    why = f"nobody can take over from {broken.peer} ({broken.why})"
                    raise NoRoute(nobody.model, nobody.missing, why) from None
        self.repairs += 1
        route = [f"{hop.peer_id} {hop.blocks}" for hop in self.route]
        _log.info("repaired", session=self.id[:8], seconds=round(self._loop.time() - began, 3), route=route)

    def _break(self, error: HopFailed) -> None:
        """A hop has failed: whoever waits for it, or for a step that passes it, learns of it."""
        if self._broken is None:
            self._broken = error
        for leg in self.live.legs:
            leg.fail(error)
        for flight in self._in_flight.values():
            fail(flight.answer, error)

    def _lose_patience(self) -> None:
        """A step takes long: from now on, ask the hops whether they live."""
        self._heartbeat = self._loop.create_task(self._ask_hops())

    async def _ask_hops(self) -> None:
        """Ping every hop again and again; one that does not answer has failed, however open its connection is."""
        while True:
            await asyncio.gather(*(self._ask(leg) for leg in self.live.legs))
            await asyncio.sleep(HEARTBEAT_S)

    async def _ask(self, leg: Leg) -> None:
        if leg.channel is None:
            return
        try:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                await leg.channel.ping()
        except TimeoutError:
            self._break(leg.broken(f"no sign of life for {HEARTBEAT_TIMEOUT_S:.0f} s"))
        except ChannelClosed:
            return  # its end is told by `on_ended`

    # What hops say

    def on_message(self, channel: Channel, message: FromHop, tensors: Tensors) -> None:
        """Take one message of this session. Only the hops of the route are listened to, each for its own part."""
        index = self.live.leg_of(channel)
        if index is None:
            return
        match message:
            case wire.Output():
                if index == len(self.live.legs) - 1:
                    self._on_output(message, tensors[0])
            case wire.Refused():
                self._on_refused(self.live.legs[index], message)
            case wire.Failed():
                blamed = min(max(index + {"self": 0, "next": 1, "previous": -1}[message.blame], 0), len(self.route) - 1)
                self._break(self.live.legs[blamed].broken(f"{message.why} (says {channel.peer})"))
            case _:
                self.live.legs[index].hear(message)

    def _on_output(self, message: wire.Output, hidden: Tensor | None) -> None:
        flight = self._in_flight.get(message.step)
        if flight is None or flight.answer.done():
            return
        sent = flight.message
        shape = (sent.hidden.shape[0], sent.want, sent.hidden.shape[2])
        got = None if hidden is None else tuple(hidden.shape)
        if got == (shape if sent.want else None) and (hidden is None or hidden.dtype.is_floating_point):
            self._answered = message.step
            flight.answer.set_result(hidden)
            return
        self._break(self.live.legs[-1].broken(f"it answered {got} where {shape} is due"))

    def _on_refused(self, leg: Leg, message: wire.Refused) -> None:
        retry_after_s = None if message.retry_after_ms is None else message.retry_after_ms / 1000
        error = Refused(leg.hop.peer_id, str(leg.hop.blocks), message.code, message.why, retry_after_s)
        if message.step is None:
            leg.fail(error)
            return
        flight = self._in_flight.get(message.step)
        if message.code == "out_of_order" or flight is None or flight.answer.done():
            return  # follows from an earlier refusal, whose step is sent again with all that came after it
        fail(flight.answer, error)

    def on_ended(self, channel: Channel, why: str) -> None:
        """A channel has ended; if it was to one of our hops, that hop has failed."""
        index = self.live.leg_of(channel)
        if index is not None:
            self._break(self.live.legs[index].broken(f"the connection ended: {why}"))

    # The end

    async def close(self) -> None:
        """End the session and free its leases. Closing twice is fine."""
        self._end(SessionClosed("it was closed"))
        self.live.close()
        self._sessions.forget(self)

    def _end(self, error: SwarmError) -> None:
        if self._ended is None:
            self._ended = error
        for flight in self._in_flight.values():
            fail(flight.answer, error)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The part of a step that travels as one message."""

    hidden: Tensor
    positions: Tensor | None
    mask: Tensor | None
    keep: int
    rows: tuple[int, ...] | None
    want: int


def _chunks(
    hidden: Tensor, *, positions: Tensor | None, mask: Tensor | None, keep: int, rows: Sequence[int] | None, want: int
) -> Iterator[_Chunk]:
    """Cut a step so that each part has about CHUNK_BYTES. Rollback and gather go with the first."""
    batch, tokens, width = hidden.shape
    size = max(1, CHUNK_BYTES // (batch * width * hidden.element_size()))
    if tokens <= size:
        yield _Chunk(hidden, positions, mask, keep, None if rows is None else tuple(rows), want)
        return
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield _Chunk(
            hidden=hidden[:, start:stop],
            positions=None if positions is None else positions[:, start:stop],
            mask=None if mask is None else mask[:, start:stop],
            keep=keep + start,
            rows=tuple(rows) if rows is not None and start == 0 else None,
            want=max(0, min(stop - start, stop - (tokens - want))),
        )
