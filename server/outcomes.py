"""Outputs of steps and of pieces of a past: each is kept, and goes on."""

import asyncio
from collections.abc import Callable

import structlog
from torch import Tensor

from swarm.activations import Activations
from swarm.protocol.inbox import Again
from swarm.protocol.messages import Output, Rebuild, Step
from swarm.protocol.replay import follow_up
from swarm.protocol.seat import Client
from swarm.server.gates import Facts
from swarm.server.refusals import Declined, send
from swarm.server.registry import Registry
from swarm.server.replays import Replays
from swarm.server.session import Answer, HostedSession

_log = structlog.get_logger("swarm.server")


class Outcomes:
    """Takes the results of the compute thread. Lives in the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, registry: Registry, replays: Replays, others: Callable[[], bool]
    ) -> None:
        """others: whether other steps are under way, which this one's answer may travel with."""
        self._loop = loop
        self._others = others
        self._registry = registry
        self._replays = replays

    def follow(self, session: HostedSession, facts: Facts, result: Tensor | Exception, *, finite: bool) -> None:
        """Take a result that still counts. finite: whether all of its numbers are known to be finite."""
        message, given = facts.message, facts.given
        if isinstance(message, Rebuild):
            session.receiver.computed()
            if message.epoch != session.seat.epoch:
                return
        if isinstance(result, Exception):
            self._failed(session, message, result)
            return
        # Tensors that are kept beside an output are small, and copied: they would keep the frame that they came in.
        positions, mask = given.positions, given.mask
        output = Activations(
            result,
            None if positions is None else positions.clone(),
            None if mask is None else mask.clone(),
            finite,
        )
        if isinstance(message, Step):
            self._step(session, message, given, output, self._loop.time() - facts.now)
        else:
            self._piece(session, message, given, output)

    def skipped(self, session: HostedSession, facts: Facts) -> None:
        """Answer a step that a later one has taken back, and that was not computed. No journal has anything of it."""
        assert isinstance(facts.message, Step)
        facts.accounts.give_back(session.owner.peer, facts.n_tokens)
        pass_on(session, session.skip(facts.message), soon=self._others())

    def catch_up(self, session: HostedSession) -> None:
        """Pass on what was computed while the session had no connection to its next hop, and never had one."""
        early, session.peers.early = session.peers.early or (), None
        for step in early:
            verdict = session.inbox.offer(step)
            if isinstance(verdict, Again):
                pass_on(session, session.kept(verdict))

    def _failed(self, session: HostedSession, message: Step | Rebuild, error: Exception) -> None:
        name, step = type(error).__name__, message.step if isinstance(message, Step) else None
        _log.error(f"{message.kind} failed", session=session.id[:8], step=step, error=name, exc_info=error)
        self._registry.fail(session, step, f"{name} while {'rebuilding' if step is None else 'computing'}")

    def _step(self, session: HostedSession, step: Step, given: Activations, output: Activations, took_s: float) -> None:
        if not output.is_finite():
            why = f"blocks {session.span.blocks} make activations of it that are infinite or no numbers"
            send(session.owner, Declined("bad_request", why).answer(step))
            self._registry.end(session)
            return
        answer = session.answer(step, output, took_s)
        if session.history.journal is not None:
            session.note(step.step, step.rows, step.keep, output)
        session.keep(step, answer)
        pass_on(session, answer, soon=self._others())
        session.history.tell(step, given, None if answer.activations is None else answer.activations.hidden)

    def _piece(self, session: HostedSession, piece: Rebuild, given: Activations, output: Activations) -> None:
        session.note(session.inbox.accepted, None, piece.start, output)
        peers = session.peers
        after = follow_up(piece, output, from_owner=peers.source is peers.owner)
        if after.onward is not None:
            session.history.window.add(after.onward)
            if peers.next is not None:
                send(peers.next, after.onward, output)
        if after.is_last:
            session.holdings.end_window()
        if after.confirm_sender:
            self._replays.confirm(session, peers.source, after.stop)
        if after.confirm_owner:
            self._replays.confirm(session, peers.owner, after.stop)
        session.history.tell(piece, given, None if after.onward is None else output.hidden)


def pass_on(session: HostedSession, answer: Answer, *, soon: bool = False) -> None:
    """Send an answer to where it goes now, which a repair may have changed since it was computed.

    An answer that the next hop does not get will be sent again: the owner sees to that. One to a next hop that is not
    connected yet goes once it is (`Outcomes.catch_up`). soon: see `send`.
    """
    message, seat = answer.message, session.seat
    if message.epoch != seat.epoch:
        message = message.model_copy(update={"epoch": seat.epoch})
    if isinstance(message, Output) and not isinstance(seat.next, Client):
        return  # it was computed for the owner, and hops take none: they would end the channel of all sessions
    to = session.peers.owner if isinstance(seat.next, Client) else session.peers.next
    if to is not None:
        send(to, message, answer.activations, soon=soon)
    elif isinstance(message, Step) and session.peers.early is not None:
        session.peers.early.append(message.step)
