"""The steps of one session on the client's side: those in flight, the journal, and the tasks that await answers.

The outbox decides which steps are sent, and when (swarm.protocol.outbox). The journal keeps the embeddings, or their
token ids, for a replay: the client is hop 0. This file joins both to asyncio and to the circuit's first leg.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.client.session.chunks import Chunk
from swarm.client.session.circuit import Circuit
from swarm.client.session.limits import SessionLimits
from swarm.client.session.transcript import Transcript
from swarm.errors import HopFailed
from swarm.protocol.journal import Entry, Journal, Past
from swarm.protocol.outbox import Answer, Dropped, Outbox, Ticket
from swarm.protocol.tensors import Coding

Outcome = Answer | Exception | Dropped


class Steps:
    """One session's steps. Its methods send all that is due."""

    def __init__(
        self,
        circuit: Circuit,
        limits: SessionLimits,
        others: Callable[[], bool] = lambda: False,
        coding: Coding | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        """others: whether the client has other sessions, whose steps these may travel with. coding: the session's.

        transcript: notes the answers, if the session is to be audited.
        """
        self._others = others
        self.coding: Coding | None = coding
        self.transcript = transcript
        self.window = 1  # steps that may be in flight, on the route that stood last
        self.skipped = False  # the last answered step was skipped: some hops have its positions, and others do not
        self.form = (1, 0)  # rows and hidden size of the last step; before the first one, as `begin` has it
        self.held = 0  # positions of the prompt that all hops had when the session was opened
        self._circuit = circuit
        self._outbox = Outbox(circuit.session, self._on_settled, limits.outbox, coding)
        self._journal = Journal(limits.journal)
        self._waiters: dict[int, asyncio.Future[Outcome]] = {}
        self._ahead = 0  # the epoch in which steps were sent before its route stood
        self._loop = asyncio.get_running_loop()
        circuit.on_fault(self.fail)

    @property
    def answered(self) -> int:
        """The last step that the last hop has answered."""
        return self._outbox.last_answered

    @property
    def unanswered(self) -> list[int]:
        """The steps in flight that have no outcome yet, in order."""
        return self._outbox.unanswered

    @property
    def past(self) -> Sequence[Past]:
        """The client's own past of all that was answered."""
        return self._journal.past_after(self._outbox.last_answered)

    def begin(self, ids: Sequence[int]) -> None:
        """Begin behind tokens of which all hops have the past: a replay sends them as if they had been a step."""
        self.held = len(ids)
        if ids:
            past = Activations(torch.tensor([ids], dtype=torch.int32)[:, :, None])
            self._journal.add(Entry(self._outbox.last_answered, None, Past(0, past)))

    def put(self, chunk: Chunk, deadline: float, *, skips: bool = False) -> Ticket:
        """Send a part of a step, as soon as there is room for it. deadline: in the loop's time; hops leave it then.

        skips: hops need not compute the steps before it that it takes back. All of those must be forgotten guesses.
        """
        budget_ms = max(1, int(1000 * (deadline - self._loop.time())))
        budget_ms = min(budget_ms, 24 * 3600 * 1000)  # the most that a message can say
        ticket = self._outbox.put(
            chunk.activations, keep=chunk.keep, rows=chunk.rows, want=chunk.want, budget_ms=budget_ms, skips=skips
        )
        rows, _, width = chunk.activations.hidden.shape
        self.form = (rows, width)
        self._journal.add(Entry(ticket.message.step, chunk.rows, Past(chunk.keep, chunk.kept)))
        self._send_due()
        return ticket

    async def outcome(self, ticket: Ticket) -> Tensor | None:
        """Wait for a step's answer. Returns the wanted positions; raises the error that it failed with."""
        outcome = ticket.outcome
        if outcome is None:
            waiter = self._waiters[ticket.message.step] = self._loop.create_future()
            outcome = await waiter
        if isinstance(outcome, Exception):
            raise outcome
        activations = outcome.activations if isinstance(outcome, Answer) else None
        return None if activations is None else activations.hidden

    def awaited(self, step: int) -> Ticket | None:
        """Return the ticket that an answer to this step settles now; None if the answer is to be dropped."""
        return self._outbox.awaits(step)

    def in_flight(self, step: int) -> Ticket | None:
        """Return a step that is not answered."""
        return self._outbox.get(step)

    def answer(self, ticket: Ticket, output: Activations | None) -> None:
        """Take the answer to a step that is awaited."""
        step = ticket.message.step
        self.skipped = output is None and ticket.may_be_skipped
        if self.skipped:
            self._journal.void(step)
        if self.transcript is not None:
            told, message = None if output is None else output.hidden, ticket.message
            tokens = ticket.activations.tokens
            self.transcript.note(message.keep, gathered=message.rows is not None, tokens=tokens, output=told)
        self._outbox.answered(step, output)
        self._send_due()

    def refuse(self, step: int, error: Exception) -> bool:
        """Fail one step. Returns whether it had no outcome yet."""
        return self._outbox.refused(step, error)

    def fail(self, error: Exception) -> None:
        """Fail all steps in flight."""
        self._outbox.failed(error)

    def resend(self) -> None:
        """Send all that is not answered along the route that stands now."""
        standing = self._circuit.standing
        if standing is not None:
            self.window = standing.window
            if self.transcript is not None:
                self.transcript.stands(standing.layout.hops, self.past)
            ahead, self._ahead = self._ahead, 0
            epoch = standing.layout.epoch
            if ahead == epoch:
                self._outbox.widen(standing.window)
                self._send_due()
            elif self._outbox.resend(epoch, standing.window):
                self._send_due()

    def send_ahead(self) -> None:
        """Send the first step on a route whose hops were asked, and have not answered yet."""
        self._ahead = self._circuit.layout.epoch
        self._outbox.resend(self._ahead, 1)
        self._send()

    def forget_guesses(self, keep: int) -> None:
        """Steps from this position on were guessed wrong: forget those that never left, and the outputs of the others.

        A step that begins before it has positions that stay, though its last ones may have been wrong.
        """
        self._outbox.truncate(self._outbox.last_of(keep))
        self._journal.truncate(self._outbox.last_put)

    def slow_down(self) -> None:
        """A hop had no room: have fewer steps in flight."""
        self._outbox.slow_down()

    def clear(self) -> None:
        """Forget the steps in flight."""
        self._outbox.clear()
        self._waiters.clear()

    def _send_due(self) -> None:
        if self._circuit.standing is not None:
            self._send()  # else the next `resend` does

    def _send(self) -> None:
        legs = self._circuit.layout.legs
        for ticket in self._outbox.due():
            if ticket.outcome is not None:
                continue
            message = ticket.message
            if message.skips and not all(leg.skips for leg in legs):
                message = message.model_copy(update={"skips": None})
            try:
                legs[0].send(message, ticket.activations, soon=self._others())
            except HopFailed as failed:
                self._circuit.report(failed)
                self._outbox.refused(ticket.step, failed)  # also if the fault is known already

    def _on_settled(self, ticket: Ticket) -> None:
        waiter = self._waiters.pop(ticket.message.step, None)
        if waiter is not None and not waiter.done():
            assert ticket.outcome is not None
            waiter.set_result(ticket.outcome)
