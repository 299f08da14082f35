"""A session: one stateful run along a route, as the client sees it. Everything here runs in the client's event loop."""

import asyncio
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, cat

from swarm.client.route import Hop
from swarm.errors import (
    ChannelClosed,
    HopFailed,
    NetworkError,
    PromptTooLong,
    Refused,
    SessionClosed,
    SessionError,
    StepTimeout,
)
from swarm.net.channel import Channel, Remote, Tensors
from swarm.net.dialer import Dialer
from swarm.wire import messages as wire
from swarm.wire.tensors import meta_of

CHUNK_BYTES = 1 << 20  # a long prefill goes out in steps of about so much, which overlap along the route
OPEN_TIMEOUT_S = 15.0
PING_TIMEOUT_S = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session is opened for."""

    root: str
    positions_max: int
    rollback_max: int
    step_timeout_s: float


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
        if isinstance(message, (wire.Opened, wire.Output, wire.Refused, wire.Failed)):
            session = self._by_id.get(message.session)
            if session is not None and message.epoch == session.epoch:
                session.on_message(channel, message, tensors)

    async def open(self, plan: SessionPlan, route: Sequence[Hop]) -> "Session":
        """Open a session on every hop of the route. Raises HopFailed or Refused, and then nothing is left open."""
        session = Session(self, plan, route)
        self._by_id[session.id] = session
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await session.connect()
        except TimeoutError:
            await session.close()
            raise StepTimeout("the route", str(route[0].blocks.start), OPEN_TIMEOUT_S) from None
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
    """Made by `Sessions.open`. One step at a time; a long one is cut into chunks that are under way together."""

    def __init__(self, sessions: Sessions, plan: SessionPlan, route: Sequence[Hop]) -> None:
        self.id = secrets.token_hex(16)
        self.epoch = 0
        self.route = tuple(route)
        self.length = 0  # positions that every hop has
        self._plan = plan
        self._sessions = sessions
        self._loop = asyncio.get_running_loop()
        self._channels: dict[int, Channel] = {}
        self._opened: list[asyncio.Future[int]] = []
        self._window = 1
        self._step = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._ended: SessionError | None = None

    # Opening

    async def connect(self) -> None:
        """Connect to all hops and open the session on each."""
        await _all(map(self._dial, range(len(self.route))))
        self._opened = [self._loop.create_future() for _ in self.route]
        for index, channel in self._channels.items():
            channel.send(self._open_message(index))
        latencies, windows = await asyncio.gather(_all(map(self._ping, range(len(self.route)))), _all(self._opened))
        self.route = tuple(
            replace(hop, latency_ms=1000 * latency) for hop, latency in zip(self.route, latencies, strict=True)
        )
        self._window = min(windows)

    async def _dial(self, index: int) -> None:
        hop = self.route[index]
        record = hop.announcement
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            channel = await self._sessions.dialer.connect(remote, record.addresses)
        except NetworkError as error:
            raise HopFailed(hop.peer_id, str(hop.blocks), str(error)) from None
        self._channels[index] = channel
        self._sessions.watch(channel)

    async def _ping(self, index: int) -> float:
        hop = self.route[index]
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                return await self._channels[index].ping()
        except (TimeoutError, ChannelClosed) as error:
            raise HopFailed(hop.peer_id, str(hop.blocks), str(error) or "no answer to a ping") from None

    def _open_message(self, index: int) -> wire.Open:
        hop = self.route[index]
        following = self.route[index + 1].signed.data if index + 1 < len(self.route) else None
        return wire.Open(
            session=self.id,
            epoch=self.epoch,
            root=self._plan.root,
            numeric_class=hop.announcement.numeric_class,
            start=hop.blocks.start,
            stop=hop.blocks.stop,
            positions_max=self._plan.positions_max,
            rollback_max=self._plan.rollback_max,
            previous=self.route[index - 1].peer_id if index else None,
            next_record=b64encode(following).decode() if following is not None else None,
        )

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
        Raises StepTimeout, HopFailed, Refused, SessionClosed or PromptTooLong; the session has ended then.
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
        try:
            async with asyncio.timeout_at(deadline):
                outputs = await self._run(chunks, deadline)
        except TimeoutError:
            late = self.route[-1]
            error = StepTimeout(late.peer_id, str(late.blocks), self._plan.step_timeout_s)
            self._end(error)
            raise error from None
        except SessionError as failed:
            self._end(failed)
            raise
        except asyncio.CancelledError:
            self._end(SessionClosed("it was interrupted"))
            raise
        self.length = keep + tokens
        return outputs[0] if len(outputs) == 1 else cat(outputs, dim=1)

    async def _run(self, chunks: Iterator["_Chunk"], deadline: float) -> list[Tensor]:
        """Send chunks, at most a window of them under way, and collect what is wanted of each."""
        outputs: list[Tensor] = []
        waiting: list[_InFlight] = []
        try:
            for chunk in chunks:
                if len(waiting) >= self._window:
                    await self._collect(waiting.pop(0), outputs, deadline)
                waiting.append(self._send(chunk, deadline))
            while waiting:
                await self._collect(waiting.pop(0), outputs, deadline)
        finally:
            self._in_flight.clear()
        return outputs

    async def _collect(self, flight: _InFlight, outputs: list[Tensor], deadline: float) -> None:
        """Wait for one answer; a hop that has no room just now is asked again until the deadline."""
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
            for number in sorted(self._in_flight):
                self._resend(self._in_flight[number])
        self._in_flight.pop(flight.message.step, None)
        if output is not None:
            outputs.append(output)

    def _send(self, chunk: "_Chunk", deadline: float) -> _InFlight:
        self._step += 1
        message = wire.Step(
            session=self.id,
            epoch=self.epoch,
            step=self._step,
            keep=chunk.keep,
            rows=chunk.rows,
            budget_ms=max(1, int(1000 * (deadline - self._loop.time()))),
            want=chunk.want,
            hidden=meta_of(chunk.hidden),
            positions=meta_of(chunk.positions) if chunk.positions is not None else None,
            mask=meta_of(chunk.mask) if chunk.mask is not None else None,
        )
        tensors = [tensor for tensor in (chunk.hidden, chunk.positions, chunk.mask) if tensor is not None]
        flight = _InFlight(message, tensors, self._loop.create_future())
        self._in_flight[self._step] = flight
        self._transmit(flight)
        return flight

    def _resend(self, flight: _InFlight) -> None:
        if flight.answer.done():
            flight.answer = self._loop.create_future()
        self._transmit(flight)

    def _transmit(self, flight: _InFlight) -> None:
        try:
            self._channels[0].send(flight.message, flight.tensors)
        except ChannelClosed as closed:
            hop = self.route[0]
            raise HopFailed(hop.peer_id, str(hop.blocks), closed.why) from None

    # What hops say

    def on_message(
        self, channel: Channel, message: wire.Opened | wire.Output | wire.Refused | wire.Failed, tensors: Tensors
    ) -> None:
        """Take one message of this session. Only the hops of the route are listened to, each for its own part."""
        index = next((i for i, known in self._channels.items() if known is channel), None)
        if index is None:
            return
        match message:
            case wire.Opened():
                if not self._opened[index].done():
                    self._opened[index].set_result(message.window)
            case wire.Output():
                if index == len(self.route) - 1:
                    self._on_output(message, tensors[0])
            case wire.Refused():
                self._on_refused(index, message)
            case wire.Failed():
                blamed = min(max(index + {"self": 0, "next": 1, "previous": -1}[message.blame], 0), len(self.route) - 1)
                hop = self.route[blamed]
                self._end(HopFailed(hop.peer_id, str(hop.blocks), f"{message.why} (says {channel.peer})"))

    def _on_output(self, message: wire.Output, hidden: Tensor | None) -> None:
        flight = self._in_flight.get(message.step)
        if flight is None or flight.answer.done():
            return
        sent = flight.message
        shape = (sent.hidden.shape[0], sent.want, sent.hidden.shape[2])
        got = None if hidden is None else tuple(hidden.shape)
        if got == (shape if sent.want else None) and (hidden is None or hidden.dtype.is_floating_point):
            flight.answer.set_result(hidden)
            return
        last = self.route[-1]
        self._end(HopFailed(last.peer_id, str(last.blocks), f"it answered {got} where {shape} is due"))

    def _on_refused(self, index: int, message: wire.Refused) -> None:
        hop = self.route[index]
        retry_after_s = None if message.retry_after_ms is None else message.retry_after_ms / 1000
        error = Refused(hop.peer_id, str(hop.blocks), message.code, message.why, retry_after_s)
        if message.step is None:
            _fail(self._opened[index], error)
            return
        flight = self._in_flight.get(message.step)
        if message.code == "out_of_order" or flight is None or flight.answer.done():
            return  # follows from an earlier refusal, whose step is sent again with all that came after it
        _fail(flight.answer, error)

    def on_ended(self, channel: Channel, why: str) -> None:
        """A channel has ended; if it was to one of our hops, the session cannot go on."""
        for index, known in self._channels.items():
            if known is channel:
                hop = self.route[index]
                self._end(HopFailed(hop.peer_id, str(hop.blocks), f"the connection ended: {why}"))

    # The end

    async def close(self) -> None:
        """End the session and free its leases. Closing twice is fine."""
        for channel in self._channels.values():
            if not channel.closed:
                channel.send(wire.Close(session=self.id))
            self._sessions.dialer.release(channel)
        self._channels = {}
        self._end(SessionClosed("it was closed"))
        self._sessions.forget(self)

    def _end(self, error: SessionError) -> None:
        if self._ended is None:
            self._ended = error
        for opened in self._opened:
            _fail(opened, error)
        for flight in self._in_flight.values():
            _fail(flight.answer, error)


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


async def _all(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all at once; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _fail(future: "asyncio.Future[Result]", error: Exception) -> None:
    """Fail a future that perhaps nobody waits for."""
    if not future.done():
        future.set_exception(error)
        future.exception()
