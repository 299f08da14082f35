"""What a server does with a message: who may, what is checked, where it goes next.

Everything here runs in the event loop and never blocks: dialling is a task, computing is the executor's.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import structlog
from torch import Tensor

from swarm.activations import Activations
from swarm.compute.task import Executor, Forward, Probe
from swarm.dht.records import Announcement
from swarm.errors import ChannelClosed, InvalidMessage, NetworkError
from swarm.model.allocator import return_free_memory
from swarm.net.address import dialable
from swarm.net.channel import Channel
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.protocol.journal import Entry, Past
from swarm.protocol.messages import (
    TEXT_MAX,
    AnyMessage,
    Blame,
    Close,
    Failed,
    Inquiry,
    Leaving,
    Message,
    Open,
    Opened,
    Progress,
    Rebuild,
    Rebuilt,
    Refused,
    Replay,
    Reroute,
    Rerouted,
    Step,
)
from swarm.protocol.naming import is_name_of
from swarm.protocol.tensors import is_finite, meta_of
from swarm.server.accounts import Accounts
from swarm.server.hosting import Hosting
from swarm.server.pool import Pool
from swarm.server.session import (
    RETRY_AFTER_S,
    WINDOW_STEPS,
    Declined,
    Forgotten,
    HostedSession,
    Leases,
    Sent,
)

SESSIONS_MAX = 1024
SESSIONS_SHARE = 16  # a peer may have one for so many that are free: 60 where nobody else has any
SESSION_IDLE_S = 900.0  # a session that does nothing for so long gives its memory back
SWEEP_S = 15.0
REPLAY_POLL_S = 0.01
UNREAD_BYTES_MAX = 1 << 20  # of outputs; whoever reads none gets no more
REPLAY_UNSENT_MAX = 8 << 20
NEXT_UNSENT_MAX = 32 << 20  # of activations that the next hop has not read; then steps are refused
INPUT_BYTES_MAX = 96 << 20  # of activations that wait to be computed, of all sessions; one step may have 64
OUTPUT_BYTES_MAX = 64 << 20  # of outputs that are kept in case their steps come again

_log = structlog.get_logger("swarm.server")


class Handler:
    """The sessions of one server."""

    def __init__(self, hosting: Hosting, executor: Executor, pool: Pool, wall_clock: Callable[[], float]) -> None:
        """pool: of cache, in tokens. wall_clock: seconds since 1970, for the records that clients pass on."""
        self.draining = False
        self.steps_under_way = 0
        self.jobs_done = 0  # since the start, for all sessions
        self.accounts = Accounts(asyncio.get_running_loop().time)
        self.dialer: Dialer  # set by whoever builds both: each needs the other
        self.sessions: dict[str, HostedSession] = {}
        self._hosting = hosting
        self._executor = executor
        self._pool = pool
        self.windows = Pool(INPUT_BYTES_MAX)  # of pasts that are being rebuilt: as much as may wait to be computed
        self.inputs, self.outputs = Pool(INPUT_BYTES_MAX), Pool(OUTPUT_BYTES_MAX)
        self.journals = Pool(hosting.journal_bytes_max)
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._watched: set[Channel] = set()
        self._session_ended = asyncio.Event()
        self._session_ended_lately = False
        self._openings: set[asyncio.Task[None]] = set()

    def on_message(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        """Take one message from any channel, and return what it was worth.

        Raises InvalidMessage for a message that servers do not take.
        """
        match message:
            case Step():
                assert activations is not None
                return self._on_step(channel, message, activations)
            case Rebuild():
                assert activations is not None
                return self._on_rebuild(channel, message, activations)
            case Rebuilt():
                return self._on_confirmation(channel, message)
            case Open():
                self._on_open(channel, message)
            case Reroute():
                self._on_reroute(channel, message)
            case Replay():
                self._on_replay(channel, message)
            case Inquiry():
                self._on_inquiry(channel, message)
            case Close():
                self._on_close(channel, message)
            case Refused() | Failed():
                self._on_word_from_next(channel, message)
            case _:
                raise InvalidMessage(message.kind, "servers do not take it")
        return IDLE

    async def sweep(self) -> None:
        """End the sessions that do nothing, and give memory back to the system, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for session in list(self.sessions.values()):
                session.keep_window_if_used()
                if self._loop.time() - session.used_at > SESSION_IDLE_S:
                    self._fail(session, None, "self", f"nothing happened for {SESSION_IDLE_S:.0f} s")
            self.accounts.sweep()
            if self.sessions or self._session_ended_lately:
                self._session_ended_lately = False
                self._executor.submit(Probe(return_free_memory), lambda _: None)  # the allocator keeps much for itself

    def peers_in_use(self) -> set[str]:
        """Those who take part in sessions: they may be silent for long."""
        return {peer for session in self.sessions.values() for peer in (session.owner.peer, session.previous)}

    async def drain(self, within_s: float) -> None:
        """Take no new sessions, ask the owners of the others to move them, and serve those until they have.

        Returns when no session is left, or after `within_s`.
        """
        self.draining = True
        for session in list(self.sessions.values()):
            self._tell(session.owner, Leaving(session=session.id, epoch=session.epoch))
        try:
            async with asyncio.timeout(within_s):
                while self.sessions:
                    self._session_ended.clear()
                    await self._session_ended.wait()
        except TimeoutError:
            _log.warning("still has sessions, whose clients found nobody to take over", sessions=len(self.sessions))

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
            following = self._hosting.following(request, request.stop, self._wall_clock())
        except Declined as declined:
            self._refuse(channel, request, None, declined)
            return
        if session.id in self.sessions:
            self._end(self.sessions[session.id])
        self.sessions[session.id] = session
        self._watch(channel)
        _log.info("session opened", session=session.id[:8], owner=channel.peer, sessions=len(self.sessions))
        self._connect(session, following, Opened(session=session.id, epoch=session.epoch, window=WINDOW_STEPS))

    def _admit(self, channel: Channel, request: Open) -> HostedSession:
        """Check a request and make its session. Raises Declined."""
        if self.draining:
            raise Declined("draining", "this server is leaving")
        standing = self.sessions.get(request.session)
        if standing is not None and standing.owner.peer != channel.peer and is_name_of(channel.peer, request.session):
            self._fail(standing, None, "self", "its name is another peer's")  # who has heard of it on some route
            standing = None
        if standing is not None and not (standing.owner.peer == channel.peer and standing.epoch < request.epoch):
            raise Declined("not_yours", "there is a session of this name")  # and it is no later route of its owner's
        has = sum(session.owner.peer == channel.peer for session in self.sessions.values())
        if standing is None and has >= (most := (SESSIONS_MAX - len(self.sessions)) // SESSIONS_SHARE):
            raise Declined("no_room", f"at most {most} sessions a peer, as many as there are now", RETRY_AFTER_S)
        self.accounts.charge_opening(channel.peer)
        part = self._hosting.part(request)
        self._expect_room(channel.peer, request)
        pools = (self._pool, self.inputs, self.outputs, self.journals)
        leases = Leases(self._hosting.prices, *(pool.lease(channel.peer) for pool in pools))
        return HostedSession(request, channel, part, leases, self._loop.time())

    def _expect_room(self, peer: str, request: Open) -> None:
        """Refuse a session that will soon find no room, before it holds any: two that each lack some wait for ever.

        Nothing is set aside, since that would be free. But what a peer's own sessions are still to take is not there
        for its next one. Raises Declined.
        """
        mine = {session.id: session for session in self.sessions.values() if session.owner.peer == peer}
        replaced = mine.pop(request.session, None)
        free = self._pool.free(peer) - sum(session.still_promised for session in mine.values())
        if replaced is not None:
            free += replaced.leases.cache.amount
        needed = self._hosting.prices.tokens(request.batch, request.positions_soon, request.rollback_max)
        if needed > free and (mine or free < self._pool.most):  # who has it all to itself may try
            raise Declined("no_room", f"{needed} more tokens are likely not to fit, {max(0, free)} do", RETRY_AFTER_S)

    def _connect(self, session: HostedSession, following: Announcement | None, then: Message) -> None:
        """Connect to the next hop if there is one; then tell the owner."""
        self._leave_next(session)
        if following is None:
            session.next = session.owner if session.has_next else None
            self._tell(session.owner, then)
            return
        task = asyncio.create_task(self._connect_next(session, session.epoch, following, then))
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    async def _connect_next(self, session: HostedSession, epoch: int, record: Announcement, then: Message) -> None:
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            channel = await self.dialer.connect(remote, dialable(record.addresses))
        except NetworkError as error:
            if not session.closed and session.epoch == epoch:
                self._complain(session, None, "next", str(error))
            return
        if session.closed or session.epoch != epoch:
            self.dialer.release(channel)
            return
        session.next = channel
        self._watch(channel)
        self._tell(session.owner, then)

    def _leave_next(self, session: HostedSession) -> None:
        if session.next is not None and session.next is not session.owner:
            self.dialer.release(session.next)
        session.next = None

    # Repair

    def _on_reroute(self, channel: Channel, request: Reroute) -> None:
        session = self._owned(channel, request)
        if session is None:
            return
        try:
            if request.epoch <= session.epoch:
                raise Declined("not_yours", f"epoch {request.epoch} is not after {session.epoch}")
            self.accounts.charge_opening(channel.peer)
            following = self._hosting.following(request, session.span.blocks.stop, self._wall_clock())
        except Declined as declined:
            self._refuse(channel, request, None, declined)
            return
        session.reroute(request, self._loop.time())
        journal = session.journal is not None and not request.reset
        self._connect(session, following, Rerouted(session=session.id, epoch=session.epoch, journal=journal))

    def _on_replay(self, channel: Channel, request: Replay) -> None:
        """Send the next hops the past that they lack: once an epoch, and each epoch is charged."""
        session = self._owned(channel, request)
        if session is None or request.epoch != session.epoch or session.replay is not None:
            return
        try:
            pieces = session.start_replay(request)
        except Declined as declined:
            self._refuse(channel, request, None, declined)
            return
        self._replay_on(session, pieces)

    def _replay_on(self, session: HostedSession, pieces: Iterator[tuple[Rebuild, Activations]]) -> None:
        """Send as much of the past as the window has room for; the next confirmation brings the rest.

        Many sessions may replay to one hop: of them all together it gets as much as it reads soon.
        """
        while session.replay is pieces and session.next is not None:  # else there was a reroute, or the end
            if session.unconfirmed.is_full:
                return
            if session.next.unsent_bytes > REPLAY_UNSENT_MAX:
                self._loop.call_later(REPLAY_POLL_S, self._replay_on, session, pieces)
                return
            message, activations = next(pieces, (None, None))
            if message is None:
                session.end_replay()
                return
            session.unconfirmed.add(message)
            self._send_on(session, message, activations)

    def _on_confirmed(self, session: HostedSession, stop: int) -> None:
        """The hops behind this one have more of the past: send the rest, or tell whoever sends it here."""
        session.used_at = self._loop.time()
        if session.replay is not None:
            self._replay_on(session, session.replay)
        else:
            self._confirm(session, session.source, stop)

    def _confirm(self, session: HostedSession, channel: Channel | None, stop: int) -> None:
        """Say how much of the past is there; but no sooner than its owner's account has room for more."""
        if channel is None:
            return
        message = Rebuilt(session=session.id, epoch=session.epoch, stop=stop)
        if (wait_s := self.accounts.debt_s(session.owner.peer)) > 0:
            self._loop.call_later(wait_s, self._tell, channel, message)
        else:
            self._tell(channel, message)

    def _on_rebuild(self, channel: Channel, piece: Rebuild, activations: Activations) -> Toll:
        session = self.sessions.get(piece.session)
        if session is None or channel.peer != session.previous or piece.epoch != session.epoch:
            return IDLE
        session.used_at = self._loop.time()
        session.source = channel
        if session.has_rebuilt(piece):
            return Toll(idle=True, payer=session.payer(channel))
        try:
            session.grant.check(session.used_at)
            self.accounts.lend_activations(session.owner.peer, activations.hidden.nbytes)
            session.accept_rebuild(piece, activations, self.windows)
        except Declined as declined:
            self._refuse(session.owner, piece, None, declined)
            return Toll(idle=True, payer=session.payer(channel))
        task = session.hand_over(piece, activations)
        self._executor.submit(task, partial(self._on_rebuilt, session, task, piece, _beside(activations)))
        return PROGRESS

    def _on_rebuilt(
        self,
        session: HostedSession,
        task: Forward,
        piece: Rebuild,
        beside: tuple[Tensor | None, Tensor | None],
        result: Tensor | Exception | None,
    ) -> None:
        self.jobs_done += 1
        session.let_go(task.activations.n_bytes)
        if task.tenure.over or result is None:
            return
        session.computed_piece()
        if session.epoch != piece.epoch:
            return
        if isinstance(result, Exception):
            self._fail(session, None, "self", f"{type(result).__name__} while rebuilding")
            return
        output = Activations(result, *beside)
        self._note(session, Entry(session.step, None, Past(piece.start, output)))
        if piece.hops > 1:
            onward = piece.model_copy(update={"hops": piece.hops - 1, "hidden": meta_of(result)})
            session.unconfirmed.add(onward)
            self._send_on(session, onward, output)
        stop = piece.start + result.shape[1]
        if stop == piece.total:
            session.leave_window()
        if piece.hops == 1:
            self._confirm(session, session.source, stop)
        if stop == piece.total and (piece.hops > 1 or session.source is not session.owner):
            self._confirm(session, session.owner, stop)

    def _on_inquiry(self, channel: Channel, request: Inquiry) -> None:
        session = self._owned(channel, request)
        if session is None:
            return
        # The inquiry itself comes from the owner, behind everything that he has sent before.
        source = session.source or session.owner
        heard_at = session.used_at if source is session.owner else source.heard_at
        quiet_s = 0.0 if source.is_paused else self._loop.time() - heard_at  # else it is taken for lost
        progress = Progress(
            session=session.id,
            epoch=session.epoch,
            applied=session.applied,
            length=session.length,
            under_way=session.under_way,
            jobs_done=self.jobs_done,
            quiet_ms=max(0, int(1000 * quiet_s)),
        )
        self._tell(channel, progress)

    def _owned(self, channel: Channel, request: Reroute | Replay | Inquiry) -> HostedSession | None:
        """Return the session if it is this channel's; else say that it is not."""
        session = self.sessions.get(request.session)
        if session is not None and session.owner is channel:
            return session
        self._refuse(channel, request, None, Declined("not_yours", "no session of yours has this name"))
        return None

    # Steps

    def _on_step(self, channel: Channel, step: Step, activations: Activations) -> Toll:
        session = self.sessions.get(step.session)
        if session is None:
            self._tell(
                channel,
                Failed(session=step.session, epoch=step.epoch, step=step.step, blame="self", why="no such session"),
            )
            return IDLE
        if channel.peer != session.previous or step.epoch != session.epoch:
            why = "its activations come from another peer" if step.epoch == session.epoch else "of another epoch"
            self._refuse(channel, step, step.step, Declined("not_yours", why))
            return IDLE
        arrived_at = session.used_at = self._loop.time()
        session.source = channel
        try:
            sent = session.repeated(step.step)
            if session.owner.unsent_bytes > UNREAD_BYTES_MAX or (
                session.next is not None and session.next.unsent_bytes > NEXT_UNSENT_MAX
            ):
                raise Declined("busy", "what was sent before is not read", RETRY_AFTER_S)
            if sent is not None:
                self._pass_on(session, sent)
                return Toll(idle=True, payer=session.payer(channel))
            session.grant.check(arrived_at)
            if step.budget_ms == 0:
                raise Declined("too_late", "the step's time is over")
            self.accounts.charge_activations(session.owner.peer, activations.hidden.nbytes)
            session.accept(step, activations)
        except Forgotten as forgotten:
            self._fail(session, step.step, "self", str(forgotten))
            return Toll(idle=True, payer=session.payer(channel))
        except Declined as declined:
            self._refuse(session.owner, step, step.step, declined)
            excused = session.excuses(step.step, declined, arrived_at)
            return PROGRESS if excused else Toll(idle=True, payer=session.payer(channel))
        self.steps_under_way += 1
        task = session.hand_over(step, activations)
        self._executor.submit(task, partial(self._on_computed, session, task, step, _beside(activations), arrived_at))
        return Toll(free_bytes=activations.hidden.nbytes) if activations.tokens == 1 else PROGRESS

    def _on_computed(
        self,
        session: HostedSession,
        task: Forward,
        step: Step,
        beside: tuple[Tensor | None, Tensor | None],
        arrived_at: float,
        result: Tensor | Exception | None,
    ) -> None:
        self.jobs_done += 1
        self.steps_under_way -= 1
        session.let_go(task.activations.n_bytes)
        if task.tenure.over or result is None:
            return
        session.computed_step()
        if isinstance(result, Exception):
            _log.error(
                "step failed", session=session.id[:8], step=step.step, error=type(result).__name__, exc_info=result
            )
            self._fail(session, step.step, "self", f"{type(result).__name__} while computing")
            return
        if not is_finite(result):
            why = f"blocks {session.span.blocks} make activations of it that are infinite or no numbers"
            self._refuse(session.owner, step, step.step, Declined("bad_request", why))
            self._end(session)
            return
        output = Activations(result, *beside)
        sent = session.outcome(step, output, self._loop.time() - arrived_at)
        self._note(session, Entry(step.step, step.rows, Past(step.keep, output)))
        session.keep_sent(sent)
        self._pass_on(session, sent)

    @staticmethod
    def _note(session: HostedSession, entry: Entry) -> None:
        """Keep an output for replay. What is too much for all journals costs this session its own, and nothing else."""
        if not session.note(entry):
            _log.warning("journal dropped: --journal-memory is used up", session=session.id[:8])

    def _pass_on(self, session: HostedSession, sent: Sent) -> None:
        """Send a step's output to whom it goes now, which a repair may have changed since it was computed."""
        message = sent.message
        if message.epoch != session.epoch:
            message = message.model_copy(update={"epoch": session.epoch})
        if session.has_next:
            self._send_on(session, message, sent.activations)
        else:
            self._tell(session.owner, message, sent.activations)

    def _send_on(self, session: HostedSession, message: Message, activations: Activations | None) -> None:
        """Send to the next hop. What it does not get it will be sent again: the owner sees to that."""
        if session.next is not None:
            self._tell(session.next, message, activations)

    # Ends

    def _on_close(self, channel: Channel, message: Close) -> None:
        session = self.sessions.get(message.session)
        if session is not None and session.owner is channel:
            self._end(session)

    def _on_confirmation(self, channel: Channel, message: Rebuilt) -> Toll:
        """The next hops have more of the past."""
        session = self._from_next(channel, message)
        stop = None if session is None else session.unconfirmed.confirm(message.stop)
        if session is None or stop is None:
            return IDLE
        self._on_confirmed(session, stop)
        return PROGRESS

    def _on_word_from_next(self, channel: Channel, message: Refused | Failed) -> None:
        """The next hop says what it could not tell the client itself."""
        session = self._from_next(channel, message)
        if session is not None:
            self._complain(session, message.step, "next", message.why)
            if isinstance(message, Failed):
                self._leave_next(session)  # it does not know the session

    def _from_next(self, channel: Channel, message: Rebuilt | Refused | Failed) -> HostedSession | None:
        """Return the session that a message of its next hop is about."""
        session = self.sessions.get(message.session)
        current = session is not None and session.next is channel and message.epoch == session.epoch
        return session if current else None

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
                session.next = None
                self._complain(session, None, "next", f"the connection to the next hop ended: {why}")

    def _fail(self, session: HostedSession, step: int | None, blame: Blame, why: str) -> None:
        """End a session that cannot go on, and tell its owner."""
        self._complain(session, step, blame, why)
        self._end(session)

    def _complain(self, session: HostedSession, step: int | None, blame: Blame, why: str) -> None:
        """Tell the owner what does not work; what this hop has of the session stays."""
        message = Failed(session=session.id, epoch=session.epoch, step=step, blame=blame, why=why[:TEXT_MAX])
        self._tell(session.owner, message)

    def _end(self, session: HostedSession) -> None:
        session.close()
        del self.sessions[session.id]
        self._leave_next(session)
        self._session_ended.set()
        self._session_ended_lately = True
        _log.info("session ended", session=session.id[:8], sessions=len(self.sessions))

    def _refuse(
        self,
        channel: Channel,
        request: Open | Reroute | Replay | Inquiry | Rebuild | Step,
        step: int | None,
        declined: Declined,
    ) -> None:
        retry_ms = None if declined.retry_after_s is None else int(declined.retry_after_s * 1000)
        self._tell(
            channel,
            Refused(
                session=request.session,
                epoch=request.epoch,
                step=step,
                code=declined.code,
                why=declined.why[:TEXT_MAX],
                retry_after_ms=retry_ms,
            ),
        )

    @staticmethod
    def _tell(channel: Channel, message: Message, activations: Activations | None = None) -> None:
        """Send, unless the channel has just ended: then its own callback does what is to be done."""
        try:
            channel.send(message, activations)
        except ChannelClosed as error:
            _log.debug("not sent", kind=message.__class__.__name__, why=error.why)


def _beside(activations: Activations) -> tuple[Tensor | None, Tensor | None]:
    """Copy what is kept beside an output: it is small, and would keep the frame that it came in."""
    positions, mask = activations.positions, activations.mask
    return None if positions is None else positions.clone(), None if mask is None else mask.clone()
