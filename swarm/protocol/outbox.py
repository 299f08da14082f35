"""The client's end of a session's stream of steps: numbered, sent in order, retransmitted, each answer taken once.

    put       -> a ticket: its Step has the next number and this epoch; it may be put ahead of the answers before it
    due       -> the tickets to send now, in order, as far as the in-flight window, in steps and bytes, and the
                 congestion window have room
    answered  -> settles the ticket behind the last answered one with an Answer; other answers are dropped, because a
                 repair starts from the last answered step, and they come again
    refused   -> settles one ticket with an error, and `failed` settles all of them. A failed ticket holds back those
                 behind it, because they would arrive out of order, until
    resend    -> a new epoch, or the same one: errors are renewed, and all that is not answered is due again. An
                 answered ticket is gone and is not sent again
    truncate  -> a guess was wrong: tickets that never left are forgotten, and their numbers are given out again. Those
                 that left are computed or skipped by the hops, in order as ever, and come back with their outputs
                 dropped. A step that is put next with `skips` allows that
    slow_down -> the congestion window becomes one step. It doubles with each answer

A ticket:   waiting --due--> sent --answered--> settled with an Answer, gone
               |               |----refused, failed-----> settled with an error, --resend--> waiting
               '--truncate--> settled with DROPPED, gone

No asyncio here: a session wraps a ticket in a future of the loop's, made once it waits and settled by `on_settled`:

    def waiting(self, ticket):                               def _on_settled(self, ticket):
        future = self._loop.create_future()                      if (waiter := self._waiters.pop(ticket.step, None)):
        if ticket.outcome is not None:                               waiter.set_result(ticket.outcome)
            future.set_result(ticket.outcome)
        else: self._waiters[ticket.step] = future            # both give: an Answer, DROPPED, or an exception to raise
        return future

After `put`, `answered` and `resend` the session sends the due tickets. Sending one may fail all, so it looks again:

    for ticket in outbox.due():
        if ticket.outcome is None:
            send(ticket.message, ticket.activations)         # if the channel is closed: outbox.failed or outbox.refused

Each new Standing is told by `resend(epoch, window)`, also when nothing is in flight: `put` writes that epoch. The owner
validates an output against `ticket.answer_shape` before `answered`. tests/protocol/test_stream.py drives this end
against `inbox` over a wire that loses, repeats and reorders.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from swarm.activations import Activations
from swarm.limits import limit
from swarm.protocol.messages import Step
from swarm.protocol.tensors import Coding, metas_of


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Bounds on one session's steps in flight."""

    in_flight_max: int = limit(64, "steps", "the congestion window opens no further; a hop's window is 64 at most")
    in_flight_bytes_max: int = limit(8 << 20, "bytes", "of activations that are not answered; then later steps wait")


@dataclass(frozen=True, slots=True)
class Answer:
    """The last hop's answer to a step. activations: the wanted positions; None if none were, or by now none are."""

    activations: Activations | None


class Dropped(Enum):
    """The outcome of a step that never left, after a wrong guess."""

    DROPPED = "dropped"


DROPPED = Dropped.DROPPED


@dataclass(slots=True)
class Ticket:
    """A step that was put into the outbox, which alone changes it."""

    message: Step
    activations: Activations
    wanted: bool = True  # False once a truncation has made its output pointless
    outcome: Answer | Exception | Dropped | None = None  # None until it is settled; an error may be renewed
    is_sent: bool = field(default=False, init=False)  # since the last `resend`
    has_left: bool = field(default=False, init=False)  # it was sent at some time: a hop may have applied it

    @property
    def step(self) -> int:
        """Its number."""
        return self.message.step

    @property
    def answer_shape(self) -> tuple[int, int, int] | None:
        """The shape of the output that answers it; None if none is wanted."""
        rows, _, width = self.activations.hidden.shape
        return (rows, self.message.want, width) if self.message.want else None

    @property
    def may_be_skipped(self) -> bool:
        """Whether an answer without an output says that a hop has skipped it: none may while it is wanted."""
        return self.message.want > 0 and not self.wanted


class Outbox:
    """The steps of one session that are not answered yet."""

    def __init__(
        self,
        session: str,
        on_settled: Callable[[Ticket], None] = lambda _: None,
        limits: OutboxLimits | None = None,
        coding: Coding | None = None,
    ) -> None:
        """on_settled: told of each ticket that gets an outcome. It must not call the outbox. coding: the session's."""
        self.last_put = 0  # the last step's number
        self.last_answered = 0
        self._session = session
        self._on_settled = on_settled
        self._coding: Coding | None = coding
        self._limits = limits or OutboxLimits()
        self._epoch = 0
        self._window = self._limits.in_flight_max  # of the route: the least of its hops'
        self._congestion_window = self._limits.in_flight_max
        self._tickets: dict[int, Ticket] = {}  # not answered, in order

    def __len__(self) -> int:
        """How many steps are not answered."""
        return len(self._tickets)

    @property
    def unanswered(self) -> list[int]:
        """The steps that have no outcome yet, in order."""
        return [ticket.step for ticket in self._tickets.values() if ticket.outcome is None]

    @property
    def blocked(self) -> Ticket | None:
        """The first ticket that has failed: nothing behind it is sent before `resend`."""
        return next((ticket for ticket in self._tickets.values() if ticket.outcome is not None), None)

    def get(self, step: int) -> Ticket | None:
        """Return a step that is not answered."""
        return self._tickets.get(step)

    def put(
        self,
        activations: Activations,
        *,
        keep: int,
        rows: tuple[int, ...] | None,
        want: int,
        budget_ms: int,
        skips: bool = False,
    ) -> Ticket:
        """Add a step, in the units of the message Step."""
        self.last_put += 1
        metas = metas_of(activations, self._coding)
        message = Step(
            session=self._session,
            epoch=self._epoch,
            step=self.last_put,
            keep=keep,
            rows=rows,
            budget_ms=budget_ms,
            want=want,
            skips=True if skips else None,
            hidden=metas.hidden,
            positions=metas.positions,
            mask=metas.mask,
        )
        ticket = self._tickets[self.last_put] = Ticket(message, activations)
        return ticket

    def due(self) -> list[Ticket]:
        """Return the tickets to send now, in order, and count them as sent."""
        due: list[Ticket] = []
        room, n_bytes = min(self._window, self._congestion_window), 0
        for ticket in self._tickets.values():
            if ticket.outcome is not None or room == 0 or n_bytes >= self._limits.in_flight_bytes_max:
                break
            room -= 1
            n_bytes += ticket.activations.hidden.nbytes
            if not ticket.is_sent:
                ticket.is_sent = ticket.has_left = True
                due.append(ticket)
        return due

    def awaits(self, step: int) -> Ticket | None:
        """Return the ticket that an answer to this step settles now; None if the answer is to be dropped."""
        ticket = self._tickets.get(step)
        return ticket if ticket is not None and ticket.outcome is None and step == self.last_answered + 1 else None

    def answered(self, step: int, output: Activations | None) -> bool:
        """Settle a step that is awaited. Returns False, and nothing has changed, for any other."""
        ticket = self.awaits(step)
        if ticket is None:
            return False
        del self._tickets[step]
        self.last_answered = step
        self._congestion_window = min(2 * self._congestion_window, self._limits.in_flight_max)
        self._settle(ticket, Answer(output if ticket.wanted else None))
        return True

    def refused(self, step: int, error: Exception) -> bool:
        """Settle one step with an error. Returns False, and nothing has changed, for one that has an outcome."""
        ticket = self._tickets.get(step)
        if ticket is None or ticket.outcome is not None:
            return False
        self._settle(ticket, error)
        return True

    def failed(self, error: Exception) -> None:
        """Settle with an error all steps that have no outcome."""
        for ticket in self._tickets.values():
            if ticket.outcome is None:
                self._settle(ticket, error)

    def slow_down(self) -> None:
        """A hop had no room: have one step in flight, then two, and so on."""
        self._congestion_window = 1

    def resend(self, epoch: int, window: int | None = None) -> bool:
        """Make all that is not answered due again, on this route. Returns whether there is anything.

        window: the least of its hops' windows, in steps; None for no bound of theirs.
        """
        self._epoch = epoch
        self._window = self._limits.in_flight_max if window is None else window
        for ticket in self._tickets.values():
            ticket.outcome = None
            ticket.is_sent = False
            if ticket.message.epoch != epoch:
                ticket.message = ticket.message.model_copy(update={"epoch": epoch})
        return bool(self._tickets)

    def widen(self, window: int) -> None:
        """Have more steps in flight on this route: its hops have told their windows. window: as in `resend`."""
        self._window = window

    def last_of(self, position: int) -> int:
        """Return the last step that has a position before this one; the last answered one, where none waits."""
        waiting = (ticket.step for ticket in self._tickets.values() if ticket.message.keep < position)
        return max(waiting, default=self.last_answered)

    def truncate(self, after_step: int) -> None:
        """Drop the steps behind this one: forget those that never left, and the outputs of the others."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.step > after_step]:
            ticket.wanted = False
            if not ticket.has_left:
                del self._tickets[ticket.step]
                self.last_put = min(self.last_put, ticket.step - 1)
                self._settle(ticket, DROPPED)

    def clear(self) -> None:
        """Forget all tickets, at the session's end. None of them is told."""
        self._tickets.clear()

    def _settle(self, ticket: Ticket, outcome: Answer | Exception | Dropped) -> None:
        told = ticket.outcome is not None  # a failed ticket that is forgotten has told its error
        ticket.outcome = outcome
        if not told:
            self._on_settled(ticket)
