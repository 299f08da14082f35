"""A server takes each message here.

Requests are carried out or refused at once. Activations, in a step or in a piece of a past, climb one ladder:

    on_message -> gates -> HostedSession.accept -> Executor.submit ... _on_computed -> outcomes

Everything here runs in the event loop and never blocks: dialling is a task, computing is the executor's. Each message's
worth is returned as a toll, and the channel that brought it charges it.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from torch import Tensor

from swarm.activations import Activations
from swarm.compute.task import Executor, Forward, Probe, Void
from swarm.errors import InvalidMessage
from swarm.model.allocator import return_kept_memory
from swarm.net.channel import Channel, OnMessage
from swarm.net.dialer import Dialer
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.protocol.attest import Attest
from swarm.protocol.inbox import Again, Forgotten
from swarm.protocol.messages import (
    AnyMessage,
    Close,
    Failed,
    Inquiry,
    Open,
    Opened,
    Rebuild,
    Rebuilt,
    Refused,
    Replay,
    Reroute,
    Rerouted,
    Step,
)
from swarm.server.accounts import Accounts
from swarm.server.admission import Admission
from swarm.server.gates import Facts, Gates, Stop, Stray
from swarm.server.holdings import Memory
from swarm.server.hosting import Hosting
from swarm.server.limits import HandlerLimits
from swarm.server.links import Links, complain
from swarm.server.outcomes import Outcomes, pass_on
from swarm.server.refusals import Declined, send
from swarm.server.registry import Registry
from swarm.server.replays import Replays
from swarm.server.session import HostedSession


class Handler:
    """Takes the messages of one server."""

    def __init__(
        self,
        hosting: Hosting,
        executor: Executor,
        memory: Memory,
        dialer: Callable[[OnMessage], Dialer],
        wall_clock: Callable[[], float],
        *,
        limits: HandlerLimits | None = None,
        gates: Gates | None = None,
    ) -> None:
        """dialer: is given `on_message`, and makes the dialer of next hops. wall_clock: seconds since 1970."""
        self.steps_under_way = 0
        self.jobs_done = 0  # since the start, for all sessions
        self.gates = gates or Gates()
        self.limits = limits or HandlerLimits()
        self.accounts = Accounts(self.limits.accounts, self.limits.gateways)
        self.links = Links(dialer(self.on_message))
        self.registry = Registry(self.links)
        self.admission = Admission(hosting, memory, self.accounts, self.registry, self.limits, wall_clock)
        self._loop = asyncio.get_running_loop()
        self._replays = Replays(self._loop, self.accounts, self.limits.session)
        self._outcomes = Outcomes(self._loop, self.registry, self._replays, lambda: self.steps_under_way > 0)
        self.links.on_connected.append(self._outcomes.catch_up)
        self._executor = executor

    @property
    def sessions(self) -> dict[str, HostedSession]:
        """By name."""
        return self.registry.sessions

    def on_message(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        """Take one message from any channel. Raises InvalidMessage for one that no peer sends to a server."""
        match message:
            case Step() | Rebuild():
                return self._on_activations(channel, message, activations)
            case Rebuilt() | Refused() | Failed():
                return self._on_word_from_next(channel, message)
            case Open():
                self._on_open(channel, message)
            case Reroute():
                self._on_reroute(channel, message)
            case Replay():
                self._on_replay(channel, message)
            case Inquiry():
                self._on_inquiry(channel, message)
            case Attest():
                self._on_attest(channel, message)
            case Close():
                if (session := self.registry.owned(channel, message.session)) is not None:
                    self.registry.end(session)
            case _:
                raise InvalidMessage(message.kind, "servers do not take it")
        return IDLE

    # Upkeep

    async def sweep(self) -> None:
        """End idle sessions, and give memory back to the system, for ever."""
        idle_s = self.limits.session.idle_s
        while True:
            await asyncio.sleep(self.limits.sweep_s)
            now = self._loop.time()
            for session in list(self.sessions.values()):
                session.holdings.review_window()
                if now - session.peers.used_at > idle_s:
                    self.registry.fail(session, None, f"nothing happened for {idle_s:.0f} s")
            self.accounts.sweep(now)
            self.admission.prefixes.sweep(now)
            if self.registry.take_freed() or self.sessions:
                chore = Probe(return_kept_memory, is_chore=True)  # the allocator keeps much for itself
                self._executor.submit(chore, lambda _: None)

    def peers_in_use(self) -> set[str]:
        """Return the peers that take part in sessions: they may be silent for long."""
        return {peer for session in self.sessions.values() for peer in (session.owner.peer, session.seat.previous)}

    async def drain(self, within_s: float) -> None:
        """Take no new sessions, ask the owners of the others to move them, and serve those until they have.

        Returns when no session is left, or after `within_s`.
        """
        self.admission.draining = True
        await self.registry.drain(within_s)

    async def close(self) -> None:
        """End every session."""
        self.links.cancel()
        self.registry.parked.close()
        self.registry.fail_all("the server is leaving")

    # Requests of a session's owner

    def _on_open(self, channel: Channel, request: Open) -> None:
        session = self.admission.admit(channel, request, self._loop.time())
        if isinstance(session, Declined):
            send(channel, session.answer(request))
            return
        following = self.admission.following(request, session)
        if isinstance(following, Declined):
            send(channel, following.answer(request))
            return
        self.registry.add(session)
        held = self.admission.prefixes.begin(session, request, self._loop.time())
        window = self.limits.session.inbox.window_steps
        opened = Opened(session=session.id, epoch=session.seat.epoch, window=window, held=held or None)
        self.links.connect(session, following, opened)
        if (early := self.registry.parked.take(session.id)) is not None:
            self._on_activations(early.channel, early.message, early.activations)

    def _on_reroute(self, channel: Channel, request: Reroute) -> None:
        session = self._owned(channel, request)
        if session is None:
            return
        declined, epoch = None, session.seat.epoch
        if request.epoch <= epoch:
            declined = Declined("not_yours", f"epoch {request.epoch} is not after {epoch}")
        declined = declined or self.accounts.charge_opening(channel.peer, self._loop.time())
        following = declined or self.admission.following(request, session)
        if isinstance(following, Declined):
            send(channel, following.answer(request))
            return
        session.reroute(request, self._loop.time())
        journal = session.history.journal is not None and not request.reset
        self.links.connect(session, following, Rerouted(session=session.id, epoch=request.epoch, journal=journal))

    def _on_replay(self, channel: Channel, request: Replay) -> None:
        session = self._owned(channel, request)
        if session is not None and (declined := self._replays.begin(session, request)) is not None:
            send(channel, declined.answer(request))

    def _on_inquiry(self, channel: Channel, request: Inquiry) -> None:
        session = self._owned(channel, request)
        if session is not None:
            send(channel, session.progress(self.jobs_done, self._loop.time()))

    def _on_attest(self, channel: Channel, request: Attest) -> None:
        session = self._owned(channel, request)
        if session is not None:
            send(channel, self.admission.attested(session, request))

    def _owned(self, channel: Channel, request: Reroute | Replay | Inquiry | Attest) -> HostedSession | None:
        """Return the session if the channel controls it; else say that it does not."""
        session = self.registry.owned(channel, request.session)
        if session is None:
            send(channel, Declined("not_yours", "no session of yours has this name").answer(request))
        return session

    # Activations

    def _on_activations(self, channel: Channel, message: Step | Rebuild, activations: Activations | None) -> Toll:
        session = self.registry.sessions.get(message.session)
        if session is None:
            if isinstance(message, Step):
                self.registry.parked.park(channel, message, activations)
            return IDLE
        now = self._loop.time()
        is_void, gates = False, self.gates.rebuild
        if isinstance(message, Step):
            is_void = session.is_void(message)
            gates = self.gates.void if is_void else self.gates.step
        width, computed = session.tenure.span.hidden_size, None if is_void else activations
        facts = Facts(channel, message, computed, now, self.accounts, self.limits.session, width)
        for gate in gates:
            if (stop := gate.check(session, facts)) is not None:
                return self._stopped(session, facts, stop)
        session.peers.used_at, session.peers.source = now, channel
        task: Forward | Void
        if facts.activations is None:
            assert isinstance(message, Step)
            task = session.accept_void(message)
        else:
            task = session.accept(message, facts.activations)
            if session.tenure.marked is not None:
                self.admission.prefixes.mark(session, message, task)
        self.steps_under_way += isinstance(message, Step)
        self._executor.submit(task, partial(self._on_computed, session, task, facts))
        is_decode = isinstance(message, Step) and self.limits.batch.decodes(
            task.rows, task.tokens, has_past=task.has_past
        )
        return Toll(free_bytes=facts.hidden_bytes) if is_decode else PROGRESS

    def _stopped(self, session: HostedSession, facts: Facts, stop: Stop) -> Toll:
        """Answer a message that did not pass a gate, and return the toll with its payer."""
        message = facts.message
        step = message.step if isinstance(message, Step) else None
        if isinstance(stop, Stray):
            if step is not None:
                send(facts.channel, Declined("not_yours", stop.why).answer(message))
            return IDLE
        session.peers.used_at, session.peers.source = facts.now, facts.channel
        if isinstance(stop, Again):
            pass_on(session, session.kept(stop))
        elif isinstance(stop, Forgotten):
            self.registry.fail(session, step, stop.why)
        elif isinstance(stop, Declined):
            send(session.owner, stop.answer(message))
            due = session.inbox.accepted + 1
            if step is not None and session.excuses.excuse(step, due, stop.retry_after_s, facts.now):
                return PROGRESS
        return Toll(idle=True, payer=session.payer(facts.channel))

    def _on_computed(
        self, session: HostedSession, task: Forward | Void, facts: Facts, result: Tensor | Exception | None
    ) -> None:
        """Take back a task. Only the tenure says whether its result still counts: then None for a skipped one."""
        self.jobs_done += 1
        if isinstance(facts.message, Step):
            self.steps_under_way -= 1
            first = task.tenure.waiting.popleft()
            assert first is task
        if facts.activations is not None:
            session.holdings.came_back(facts.n_bytes, settled=session.receiver.next is None or session.tenure.over)
        if task.tenure.over:
            if not session.holdings.is_computing:
                task.tenure.release()
            return
        if result is None:
            self._outcomes.skipped(session, facts)
        elif isinstance(task, Forward):
            self._outcomes.follow(session, facts, result, finite=task.finite)
            if task.cutting is not None and not task.tenure.over:  # it would be over if the output were no numbers
                self.admission.prefixes.keep(session, task.cutting, self._loop.time())

    def _on_word_from_next(self, channel: Channel, message: Rebuilt | Refused | Failed) -> Toll:
        """Take the progress of a past at the next hops, or a refusal that the next hop could not send to the client."""
        session = self.sessions.get(message.session)
        if session is None or session.peers.next is not channel or message.epoch != session.seat.epoch:
            return IDLE
        if isinstance(message, Rebuilt):
            return PROGRESS if self._replays.confirmed(session, message) else IDLE
        complain(session, message.step, "next", message.why)
        if isinstance(message, Failed):
            self.links.release_next(session)  # it does not know the session
        return IDLE
