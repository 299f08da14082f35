"""Both ends of a stream of steps, over wires that lose, repeat and reorder: computed once, in order, answered once."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.activations import Activations
from swarm.protocol.inbox import Again, Busy, Early, Forgotten, Full, Inbox, InboxLimits, Late, New
from swarm.protocol.messages import Step
from swarm.protocol.outbox import DROPPED, Answer, Outbox, Ticket

SESSION = "ab" * 16
WINDOW = 8
LIMITS = InboxLimits(window_steps=WINDOW)
ROOM = 1 << 30
wires = settings(max_examples=500, suppress_health_check=list(HealthCheck))
many_wires = settings(wires, max_examples=10_000)


class NoRoom(Exception):
    """A hop had none."""


def one(value: float) -> Activations:
    """One position of one row."""
    return Activations(torch.full((1, 1, 1), float(value)))


def digest(text: tuple[int, ...]) -> float:
    """What a hop answers to a step that leaves it with this text."""
    return float(hash(text) % (1 << 20))


@dataclass
class Hop:
    """A hop that computes in its own time. Its memory takes some answers, or its journal all of them."""

    inbox: Inbox[float | None] = field(default_factory=lambda: Inbox(limits=LIMITS))
    epoch: int = 0
    text: tuple[int, ...] = ()
    queue: list[tuple[Step, int]] = field(default_factory=list)
    room: int = ROOM
    journal: dict[int, float] | None = None
    refuses: bool = False

    def take(self, message: Step, token: int, last_answered: int) -> "Answered | Refusal | Lost | None":
        """What goes back when a step arrives."""
        match self.inbox.offer(message.step):
            case New() if self.refuses:
                self.refuses = False
                return Refusal(self.epoch, message.step)
            case New():
                self.inbox.accept(message.step)
                self.queue.append((message, token))
            case Again(answer, in_journal=in_journal):
                if in_journal:
                    assert self.journal is not None
                    answer = self.journal[message.step]
                assert answer is not None
                return Answered(self.epoch, message.step, answer)
            case Early() | Busy():
                pass
            case Late():
                assert message.step <= last_answered
            case Forgotten():
                return Lost(self.epoch)
            case Full():
                raise AssertionError("the client broke the window")
        return None

    def compute(self) -> "Answered":
        """Run the oldest step."""
        message, token = self.queue.pop(0)
        self.text = (*self.text[: message.keep], token)
        answer = digest(self.text)
        if self.journal is not None:
            self.journal[message.step] = answer
            self.inbox.computed(message.step, None, 0, self.fits, in_journal=True)
        else:
            self.inbox.computed(message.step, answer, 4, self.fits)
        return Answered(self.epoch, message.step, answer)

    def fits(self, n_bytes: int) -> bool:
        """Whether its memory takes so many bytes of answers."""
        return n_bytes <= self.room

    def reroute(self, epoch: int, past: tuple[int, ...] | None, after_step: int) -> None:
        """Go on in a new epoch: with what it has, or with a past that comes anew."""
        self.epoch = epoch
        if past is not None:
            self.queue.clear()  # what of it comes back from the compute thread counts no more
            self.inbox.reset(after_step)
            self.text = past
            self.journal = {}


@dataclass(frozen=True)
class Answered:
    epoch: int
    step: int
    value: float


@dataclass(frozen=True)
class Refusal:
    epoch: int
    step: int


@dataclass(frozen=True)
class Lost:
    epoch: int


@dataclass
class Play:
    """A client that puts steps ahead of their answers and guesses wrong now and then, and a hop behind two wires."""

    hop: Hop = field(default_factory=Hop)
    epoch: int = 0
    text: tuple[int, ...] = ()  # as the last put step leaves it
    after: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})  # the text behind each step
    there: list[tuple[Step, int]] = field(default_factory=list)
    back: list[Answered | Refusal | Lost] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    settled: list[Ticket] = field(default_factory=list)  # those with an answer

    def __post_init__(self) -> None:
        self.outbox = Outbox(SESSION, self._on_settled)
        self.outbox.resend(0, WINDOW)

    def _on_settled(self, ticket: Ticket) -> None:
        if isinstance(ticket.outcome, Answer):
            assert not self.settled or ticket.step == self.settled[-1].step + 1
            self.settled.append(ticket)

    def put(self, x: int) -> None:
        if len(self.outbox) >= 2 * WINDOW:
            return
        keep = max(0, len(self.text) - x) if x < 3 else len(self.text)
        token = len(self.tickets)
        self.text = (*self.text[:keep], token)
        ticket = self.outbox.put(one(token), keep=keep, rows=None, want=1, budget_ms=1)
        self.after[ticket.step] = self.text
        self.tickets.append(ticket)

    def send(self, _: int) -> None:
        self.there += [(ticket.message, int(ticket.activations.hidden.item())) for ticket in self.outbox.due()]

    def deliver_step(self, x: int) -> None:
        if not self.there:
            return
        message, token = self.there.pop(x % min(3, len(self.there)) if x > 5 else 0)
        if message.epoch == self.hop.epoch:
            reply = self.hop.take(message, token, self.outbox.last_answered)
            self.back += [] if reply is None else [reply]

    def deliver_reply(self, x: int) -> None:
        if not self.back:
            return
        reply = self.back.pop(x % min(3, len(self.back)) if x > 5 else 0)
        if reply.epoch != self.epoch:
            return
        match reply:
            case Answered():
                ticket = self.outbox.awaits(reply.step)
                if ticket is not None and ticket.wanted:
                    assert reply.value == digest(self.after[reply.step])
                assert self.outbox.answered(reply.step, one(reply.value)) == (ticket is not None)
            case Refusal():
                self.outbox.refused(reply.step, NoRoom())
            case Lost():
                self.reset(0)

    def compute(self, _: int) -> None:
        if self.hop.queue:
            self.back.append(self.hop.compute())

    def lose(self, x: int) -> None:
        wire = self.there if x % 2 else self.back
        if wire:
            wire.pop(x % len(wire))

    def repeat(self, x: int) -> None:
        for wire in (self.there, self.back):
            if wire:
                wire.append(wire[x % len(wire)])  # type: ignore[arg-type]

    def resend(self, x: int) -> None:
        if self.outbox.blocked is not None and x % 2:
            self.outbox.slow_down()
        self.outbox.resend(self.epoch, WINDOW)

    def fail(self, _: int) -> None:
        self.outbox.failed(NoRoom())

    def refuse(self, _: int) -> None:
        self.hop.refuses = True

    def truncate(self, x: int) -> None:
        """The steps behind some step were a wrong guess."""
        step = max(self.outbox.last_answered, self.outbox.last_put - 1 - x % 8)
        behind = [ticket for ticket in self.tickets if ticket.step > step and ticket.has_left]
        if any(ticket.message.keep < len(self.after[step]) for ticket in behind):
            return  # a hop may have taken back what would have to stay
        self.outbox.truncate(step)
        self.text = self.after[step]
        for ticket in self.tickets:
            if ticket.outcome is None and ticket.step > step:
                assert not ticket.wanted
        self.tickets = [ticket for ticket in self.tickets if ticket.outcome is not DROPPED]

    def reroute(self, _: int) -> None:
        self.epoch += 1
        self.hop.reroute(self.epoch, None, 0)
        self.outbox.resend(self.epoch, WINDOW)

    def reset(self, _: int) -> None:
        """The hop is another one, or begins anew behind the last answered step, as a repair has it."""
        step = self.outbox.last_answered
        self.epoch += 1
        self.hop.reroute(self.epoch, self._computed_after(step), step)
        self.outbox.resend(self.epoch, WINDOW)

    def _computed_after(self, step: int) -> tuple[int, ...]:
        return self.after[step]

    def forget(self, x: int) -> None:
        """The hop's memory is short, or its journal is dropped."""
        if x % 2:
            self.hop.room = 4 * (x % 5)
        elif self.hop.journal is not None:
            self.hop.journal = None
            self.hop.inbox.journal_dropped()

    def finish(self) -> None:
        """Lose nothing more, and send again whatever is late, until all steps are answered."""
        self.hop.room = ROOM
        for _ in range(4 * len(self.outbox) + 20):
            self.send(0)
            while self.there or self.back or self.hop.queue:
                self.deliver_step(0)
                self.compute(0)
                self.deliver_reply(0)
            if not len(self.outbox):
                break
            self.resend(0)
        assert not len(self.outbox)
        assert self.hop.text == self.after[self.outbox.last_answered]


ACTIONS: tuple[Callable[[Play, int], None], ...] = (
    *[Play.put] * 3,
    *[Play.send] * 2,
    *[Play.deliver_step] * 5,
    *[Play.compute] * 3,
    *[Play.deliver_reply] * 4,
    *[
        Play.lose,
        Play.repeat,
        Play.resend,
        Play.fail,
        Play.refuse,
        Play.truncate,
        Play.reroute,
        Play.reset,
        Play.forget,
    ],
)


def play(script: bytes) -> None:
    """Do what the script says, one byte for each action."""
    game = Play()
    for byte in script:
        ACTIONS[byte % len(ACTIONS)](game, byte // len(ACTIONS))
    game.finish()
    assert [ticket.step for ticket in game.settled] == list(range(1, game.outbox.last_put + 1))
    assert game.settled == game.tickets
    for ticket in game.settled:
        assert isinstance(ticket.outcome, Answer)
        assert (ticket.outcome.activations is not None) == ticket.wanted


@wires
@given(st.binary(min_size=40, max_size=400))
def test_every_step_is_computed_once_and_answered_in_order(script):
    play(script)


@pytest.mark.long
@many_wires
@given(st.binary(min_size=40, max_size=1000))
def test_many_wires_lose_no_step_and_no_answer(script):
    play(script)
