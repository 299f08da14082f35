"""What a server does with a message: who may, what is checked, where it goes next.

Everything here runs in the event loop and never blocks: dialling is a task, computing is the executor's.
"""

import asyncio
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from torch import Tensor

from swarm.blocks import Blocks
from swarm.dht.records import Announcement, open_announcement
from swarm.errors import BadBlocks, ChannelClosed, InvalidMessage, NetworkError, RecordError
from swarm.model.span import Span
from swarm.net.channel import Channel, Remote, Tensors
from swarm.net.dialer import Dialer
from swarm.server.executor import Executor
from swarm.server.pool import KvPool, NoRoom
from swarm.server.session import WINDOW_STEPS, Declined, HostedSession, Sent
from swarm.wire.messages import AnyMessage, Close, Failed, Message, Open, Opened, Output, Refused, Step
from swarm.wire.tensors import meta_of

SESSIONS_MAX = 1024
SESSIONS_PER_PEER_MAX = 64
SESSION_IDLE_S = 900.0  # a session that does nothing for so long gives its memory back
SWEEP_S = 15.0
RETRY_AFTER_S = 1.0  # for a step that found the pool full

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class Hosting:
    """What this server serves."""

    root: str
    network: str
    span: Span


class Handler:
    """The sessions of one server."""

    def __init__(self, hosting: Hosting, executor: Executor, pool: KvPool, wall_clock: Callable[[], float]) -> None:
        """wall_clock: seconds since 1970, for the records that clients pass on."""
        self.draining = False
        self.steps_under_way = 0
        self.dialer: Dialer  # set by whoever builds both: each needs the other
        self.sessions: dict[str, HostedSession] = {}
        self._hosting = hosting
        self._executor = executor
        self._pool = pool
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._watched: set[Channel] = set()
        self._openings: set[asyncio.Task[None]] = set()

    def on_message(self, channel: Channel, message: AnyMessage, tensors: Tensors) -> None:
        """Take one message from any channel. Raises InvalidMessage for what no peer sends to a server."""
        match message:
            case Step():
                self._on_step(channel, message, tensors)
            case Open():
                self._on_open(channel, message)
            case Close():
                self._on_close(channel, message)
            case Refused() | Failed():
                self._on_trouble_ahead(channel, message)
            case _:
                raise InvalidMessage(message.kind, "servers do not take it")

    async def sweep(self) -> None:
        """End the sessions that do nothing, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for session in list(self.sessions.values()):
                if self._loop.time() - session.used_at > SESSION_IDLE_S:
                    self._fail(session, None, "self", f"nothing happened for {SESSION_IDLE_S:.0f} s")

    async def close(self) -> None:
        """End every session."""
        for task in self._openings:
            task.cancel()
        for session in list(self.sessions.values()):
            self._fail(session, None, "self", "the server is leaving")

    # Opening

    def _on_open(self, channel: Channel, request: Open) -> None:
        try:
            session = self._admit(channel, request)
            following = self._following(request)
        except Declined as declined:
            self._refuse(channel, request, None, declined)
            return
        self.sessions[session.id] = session
        self._watch(channel)
        _log.info("session opened", session=session.id[:8], owner=channel.peer, sessions=len(self.sessions))
        if following is None:
            self._opened(session)
        else:
            task = asyncio.create_task(self._connect_next(session, following))
            self._openings.add(task)
            task.add_done_callback(self._openings.discard)

    def _admit(self, channel: Channel, request: Open) -> HostedSession:
        """Check a request and make its session. Raises Declined."""
        if self.draining:
            raise Declined("draining", "this server is leaving")
        if request.session in self.sessions:
            raise Declined("not_yours", "there is a session of this name")
        if sum(session.owner.peer == channel.peer for session in self.sessions.values()) >= SESSIONS_PER_PEER_MAX:
            raise Declined("no_room", f"at most {SESSIONS_PER_PEER_MAX} sessions a peer", RETRY_AFTER_S)
        if len(self.sessions) >= SESSIONS_MAX:
            raise Declined("no_room", f"there are {SESSIONS_MAX} sessions", RETRY_AFTER_S)
        hosting = self._hosting
        if request.root != hosting.root:
            raise Declined("not_served", f"this server has the model {hosting.root[:16]}...")
        if request.numeric_class != hosting.span.numeric_class:
            raise Declined("not_served", f"this server computes in {hosting.span.numeric_class}")
        try:
            part = hosting.span.part(Blocks(request.start, request.stop))
        except BadBlocks as error:
            raise Declined("not_served", str(error)) from None
        return HostedSession(request, channel, part, self._pool.lease(), self._loop.time())

    def _following(self, request: Open) -> Announcement | None:
        """Read the record of the next hop. Raises Declined."""
        if request.next_record is None:
            return None
        try:
            data = b64decode(request.next_record, validate=True)
            record = open_announcement(data, now=self._wall_clock(), network=self._hosting.network)
        except (RecordError, ValueError) as error:
            raise Declined("bad_request", f"the next hop's record: {error}") from None
        if record.root != self._hosting.root or request.stop not in record.span:
            raise Declined("bad_request", f"the next hop does not serve block {request.stop}")
        return record

    async def _connect_next(self, session: HostedSession, record: Announcement) -> None:
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            channel = await self.dialer.connect(remote, record.addresses)
        except NetworkError as error:
            self._fail(session, None, "next", str(error))
            return
        if session.closed:
            self.dialer.release(channel)
            return
        session.next = channel
        self._watch(channel)
        self._opened(session)

    def _opened(self, session: HostedSession) -> None:
        self._tell(session.owner, Opened(session=session.id, epoch=session.epoch, window=WINDOW_STEPS))

    # Steps

    def _on_step(self, channel: Channel, step: Step, tensors: Tensors) -> None:
        session = self.sessions.get(step.session)
        if session is None:
            self._tell(
                channel,
                Failed(session=step.session, epoch=step.epoch, step=step.step, blame="self", why="no such session"),
            )
            return
        if channel.peer != session.previous or step.epoch != session.epoch:
            why = "its activations come from another peer" if step.epoch == session.epoch else "of another epoch"
            self._refuse(channel, step, step.step, Declined("not_yours", why))
            return
        arrived_at = session.used_at = self._loop.time()
        hidden, positions, mask = tensors
        assert hidden is not None
        try:
            if sent := session.repeated(step.step):
                self._tell(session.next or session.owner, sent.message, sent.tensors)
                return
            if step.budget_ms == 0:
                raise Declined("too_late", "the step's time is over")
            session.accept(step, hidden, positions, mask)
        except Declined as declined:
            self._refuse(session.owner, step, step.step, declined)
            return
        except NoRoom as full:
            self._refuse(session.owner, step, step.step, Declined("no_room", str(full), RETRY_AFTER_S))
            return
        self.steps_under_way += 1
        self._executor.submit(
            lambda: session.compute(step, hidden, positions, mask),
            partial(self._on_computed, session, step, (positions, mask), arrived_at),
        )

    def _on_computed(
        self,
        session: HostedSession,
        step: Step,
        beside: tuple[Tensor | None, Tensor | None],
        arrived_at: float,
        result: Tensor | Exception | None,
    ) -> None:
        session.computed()
        self.steps_under_way -= 1
        if session.closed or result is None:
            return
        if isinstance(result, Exception):
            _log.error(
                "step failed", session=session.id[:8], step=step.step, error=type(result).__name__, exc_info=result
            )
            self._fail(session, step.step, "self", f"{type(result).__name__} while computing")
            return
        sent = self._forwarded(session, step, beside, result, self._loop.time() - arrived_at)
        session.sent.append(sent)
        self._tell(session.next or session.owner, sent.message, sent.tensors)

    @staticmethod
    def _forwarded(
        session: HostedSession, step: Step, beside: tuple[Tensor | None, Tensor | None], output: Tensor, took_s: float
    ) -> Sent:
        """What goes on: the same step with new activations, or at the route's end what the client wants of them."""
        if session.next is None:
            meta = meta_of(output) if step.want else None
            message: Message = Output(session=step.session, epoch=step.epoch, step=step.step, hidden=meta)
            return Sent(step.step, message, [output] if step.want else [])
        left_ms = max(0, step.budget_ms - int(took_s * 1000))
        message = step.model_copy(update={"budget_ms": left_ms, "hidden": meta_of(output)})
        return Sent(step.step, message, [output, *(tensor for tensor in beside if tensor is not None)])

    # Ends

    def _on_close(self, channel: Channel, message: Close) -> None:
        session = self.sessions.get(message.session)
        if session is not None and session.owner is channel:
            self._end(session)

    def _on_trouble_ahead(self, channel: Channel, message: Refused | Failed) -> None:
        """The next hop could not tell the client itself, since it does not know the session."""
        session = self.sessions.get(message.session)
        if session is not None and session.next is channel and message.epoch == session.epoch:
            self._tell(
                session.owner,
                Failed(session=session.id, epoch=session.epoch, step=message.step, blame="next", why=message.why),
            )

    def _watch(self, channel: Channel) -> None:
        """Learn of a channel's end, once for all sessions that use it."""
        if channel not in self._watched:
            self._watched.add(channel)
            channel.ended.add_done_callback(lambda ended: self._on_ended(channel, ended.result()))

    def _on_ended(self, channel: Channel, why: str) -> None:
        self._watched.discard(channel)
        for session in list(self.sessions.values()):
            if session.owner is channel:
                self._end(session)
            elif session.next is channel:
                self._fail(session, None, "next", f"the connection to the next hop ended: {why}")

    def _fail(self, session: HostedSession, step: int | None, blame: str, why: str) -> None:
        """End a session that cannot go on, and tell its owner."""
        self._tell(
            session.owner,
            Failed.model_validate(
                {"session": session.id, "epoch": session.epoch, "step": step, "blame": blame, "why": why[:300]}
            ),
        )
        self._end(session)

    def _end(self, session: HostedSession) -> None:
        session.closed = True
        session.lease.release()
        del self.sessions[session.id]
        if session.next is not None:
            self.dialer.release(session.next)
        _log.info("session ended", session=session.id[:8], sessions=len(self.sessions))

    def _refuse(self, channel: Channel, request: Open | Step, step: int | None, declined: Declined) -> None:
        retry_ms = None if declined.retry_after_s is None else int(declined.retry_after_s * 1000)
        self._tell(
            channel,
            Refused(
                session=request.session,
                epoch=request.epoch,
                step=step,
                code=declined.code,
                why=declined.why[:300],
                retry_after_ms=retry_ms,
            ),
        )

    @staticmethod
    def _tell(channel: Channel, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send, unless the channel has just ended: then its own callback does what is to be done."""
        try:
            channel.send(message, tensors)
        except ChannelClosed as error:
            _log.debug("not sent", kind=message.__class__.__name__, why=error.why)
