"""Both ends of a stream of steps, over wires that lose, repeat and reorder: computed once, in order, answered once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.activations import Activations
from swarm.protocol.inbox import Again, Busy, Early, Excuses, Forgotten, Full, Inbox, InboxLimits, Late, New
from swarm.protocol.messages import Step
from swarm.protocol.outbox import DROPPED, Answer, Outbox, OutboxLimits, Ticket

SESSION = "ab" * 16
WINDOW = 8
LIMITS = InboxLimits(window_steps=WINDOW)
ROOM = 1 << 30
wires = settings(max_examples=1500, suppress_health_check=list(HealthCheck))
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


def outbox_of(steps: int, window: int | None = None, **kwargs) -> tuple[Outbox, list[Ticket]]:
    """An outbox with some steps, none of them sent."""
    outbox = Outbox(SESSION, **kwargs)
    outbox.resend(0, window)
    return outbox, [outbox.put(one(n), keep=n, rows=None, want=1, budget_ms=1) for n in range(steps)]


def sent(outbox: Outbox) -> list[int]:
    """The steps that are sent now."""
    return [ticket.step for ticket in outbox.due()]


def test_congestion_window_is_one_after_no_room_and_doubles():
    outbox, _ = outbox_of(70)
    assert sent(outbox) == list(range(1, 65))
    outbox.slow_down()
    outbox.resend(0)
    flights = []
    while (flight := sent(outbox)) and len(flights) < 4:
        flights.append(len(flight))
        for step in flight:
            assert outbox.answered(step, one(0))
    assert flights == [1, 2, 8, 59]  # each of the answers doubles it


def test_route_with_a_small_window_bounds_steps_in_flight():
    outbox, _ = outbox_of(10, window=3)
    assert sent(outbox) == [1, 2, 3]
    assert sent(outbox) == []
    outbox.answered(1, one(0))
    assert sent(outbox) == [4]
    few, _ = outbox_of(10, limits=OutboxLimits(in_flight_max=2))
    assert sent(few) == [1, 2]


def test_large_steps_in_flight_are_bounded_in_bytes():
    outbox, _ = outbox_of(10, limits=OutboxLimits(in_flight_bytes_max=10))
    assert sent(outbox) == [1, 2, 3]  # of 4 bytes each: the third is the last that begins below the bound
    outbox.answered(1, one(0))
    assert sent(outbox) == [4]
    alone, _ = outbox_of(2, limits=OutboxLimits(in_flight_bytes_max=1))
    assert sent(alone) == [1]


def test_failed_step_holds_back_those_behind_it():
    outbox, tickets = outbox_of(4, window=2)
    assert sent(outbox) == [1, 2]
    assert outbox.refused(2, full := NoRoom())
    assert outbox.blocked is tickets[1]
    assert not outbox.refused(2, NoRoom())
    assert (tickets[1].outcome, outbox.unanswered) == (full, [1, 3, 4])
    outbox.answered(1, one(0))
    assert sent(outbox) == []
    assert not outbox.answered(2, one(0))  # it will be sent again
    outbox.resend(5, 2)
    assert outbox.blocked is None
    assert [(ticket.step, ticket.message.epoch) for ticket in outbox.due()] == [(2, 5), (3, 5)]
    assert outbox.put(one(0), keep=9, rows=None, want=1, budget_ms=1).message.epoch == 5


def test_resend_renews_errors_and_keeps_answers():
    told: list[tuple[int, object]] = []
    outbox, tickets = outbox_of(3, on_settled=lambda ticket: told.append((ticket.step, ticket.outcome)))
    sent(outbox)
    assert outbox.answered(1, output := one(7))
    outbox.failed(first := NoRoom())
    outbox.failed(NoRoom())
    assert told == [(1, Answer(output)), (2, first), (3, first)]
    assert tickets[1].outcome is first
    outbox.resend(1)
    assert [ticket.outcome for ticket in tickets] == [Answer(output), None, None]
    assert sent(outbox) == [2, 3]
    assert (outbox.get(1), outbox.get(2)) == (None, tickets[1])


def test_answer_ahead_of_its_turn_is_dropped():
    outbox, tickets = outbox_of(2)
    sent(outbox)
    assert outbox.awaits(2) is None
    assert not outbox.answered(2, one(0))
    assert outbox.answered(1, one(0))
    assert not outbox.answered(1, one(0))
    assert outbox.awaits(2) is tickets[1]
    assert (outbox.last_answered, len(outbox)) == (1, 1)


def test_wrong_guess_forgets_unsent_steps_and_their_numbers():
    told: list[Ticket] = []
    outbox, tickets = outbox_of(4, window=2, on_settled=told.append)
    assert sent(outbox) == [1, 2]
    outbox.resend(1, 1)  # a step that has left once is not forgotten, due again or not
    outbox.truncate(1)
    assert (outbox.last_put, told, tickets[2].outcome) == (2, tickets[2:], DROPPED)
    assert [ticket.wanted for ticket in tickets] == [True, False, False, False]
    assert outbox.put(one(9), keep=1, rows=None, want=1, budget_ms=1).step == 3
    outbox.resend(1, 2)
    assert sent(outbox) == [1, 2]
    assert outbox.answered(1, one(1))
    assert outbox.answered(2, one(2))
    assert tickets[1].outcome == Answer(None)
    assert sent(outbox) == [3]


def test_forgotten_step_that_failed_is_settled_once():
    told: list[Ticket] = []
    outbox, tickets = outbox_of(1, on_settled=told.append)
    outbox.failed(NoRoom())
    outbox.truncate(0)
    assert (told, tickets[0].outcome, len(outbox)) == (tickets, DROPPED, 0)


def test_answer_has_the_shape_that_was_wanted():
    outbox, (ticket,) = outbox_of(1)
    assert ticket.answer_shape == (1, 1, 1)
    wide = Activations(torch.zeros(2, 5, 3))
    assert outbox.put(wide, keep=1, rows=None, want=4, budget_ms=1).answer_shape == (2, 4, 3)
    assert outbox.put(wide, keep=1, rows=(1, 0), want=0, budget_ms=1).answer_shape is None
    outbox.clear()
    assert (len(outbox), sent(outbox)) == (0, [])


async def test_session_waits_for_a_ticket_with_a_future():
    """As the module's first lines have it."""
    waiters: dict[int, asyncio.Future[object]] = {}

    def on_settled(ticket: Ticket) -> None:
        if waiter := waiters.pop(ticket.step, None):
            waiter.set_result(ticket.outcome)

    def waiting(ticket: Ticket) -> asyncio.Future[object]:
        future = asyncio.get_running_loop().create_future()
        if ticket.outcome is not None:
            future.set_result(ticket.outcome)
        else:
            waiters[ticket.step] = future
        return future

    outbox, (first, second) = outbox_of(2, on_settled=on_settled)
    outcome = waiting(first)
    outbox.refused(1, full := NoRoom())
    outbox.resend(0)  # before the session runs: it learns of the refusal all the same
    assert await outcome is full
    outbox.answered(1, None)
    assert await waiting(first) == Answer(None)
    outbox.failed(full)
    assert await waiting(second) is full


def filled(computed: int, under_way: int = 0, room: int = ROOM) -> Inbox[str]:
    """An inbox that has computed some steps, with answers of a byte for each letter of their name."""
    inbox: Inbox[str] = Inbox(limits=LIMITS)
    for step in range(1, computed + under_way + 1):
        inbox.accept(step)
        if step <= computed:
            inbox.computed(step, f"{step:03}", 3, lambda n_bytes: n_bytes <= room)
    return inbox


@pytest.mark.parametrize(
    ("step", "verdict"),
    [
        (2, Late("step 2 is long past; the next is 14")),
        (3, Again("003", in_journal=False)),
        (10, Again("010", in_journal=False)),
        (11, Busy("step 11 is still being computed")),
        (13, Busy("step 13 is still being computed")),
        (14, New()),
        (15, Early("step 15 came, 14 is the next")),
    ],
)
def test_hop_says_what_a_step_is(step, verdict):
    inbox = filled(computed=10, under_way=3)
    assert (inbox.accepted, inbox.applied, inbox.under_way) == (13, 10, 3)
    assert inbox.offer(step) == verdict


def test_hop_accepts_no_more_than_a_window_of_steps():
    inbox = filled(computed=2, under_way=WINDOW)
    assert inbox.offer(11) == Full("more than 8 steps under way")
    assert inbox.offer(12) == Early("step 12 came, 11 is the next")
    inbox.computed(3, "003", 3, lambda _: True)
    assert inbox.offer(11) == New()


def test_oldest_answers_are_evicted_when_memory_is_short():
    inbox = filled(computed=6, room=7)
    assert inbox.n_bytes == 6
    assert [inbox.offer(step) for step in (5, 6)] == [Again("005", in_journal=False), Again("006", in_journal=False)]
    assert inbox.offer(4) == Forgotten("the output of step 4 was too much to keep")
    assert filled(computed=20).n_bytes == 3 * WINDOW


def test_answers_in_a_dropped_journal_are_forgotten():
    inbox: Inbox[str] = Inbox(after_step=4, limits=LIMITS)
    for step, in_journal in ((5, True), (6, False)):
        inbox.accept(step)
        inbox.computed(step, "what went on", 0 if in_journal else 5, lambda _: True, in_journal=in_journal)
    assert inbox.offer(5) == Again("what went on", in_journal=True)
    inbox.journal_dropped()
    assert isinstance(inbox.offer(5), Forgotten)
    assert inbox.offer(6) == Again("what went on", in_journal=False)
    assert inbox.n_bytes == 5


def test_reset_makes_room_for_a_whole_window():
    inbox = filled(computed=5, under_way=WINDOW)
    inbox.reset(3)
    assert (inbox.accepted, inbox.applied, inbox.under_way, inbox.n_bytes) == (3, 3, 0, 0)
    assert isinstance(inbox.offer(3), Forgotten)
    for step in range(4, 4 + WINDOW):
        assert inbox.offer(step) == New()
        inbox.accept(step)


def test_refusal_for_want_of_room_is_free_after_waiting():
    excuses = Excuses(LIMITS)
    assert excuses.excuse(5, 5, 1.0, now=0.0)
    assert not excuses.excuse(5, 5, 1.0, now=0.4)
    assert excuses.excuse(5, 5, 1.0, now=0.5)
    assert excuses.excuse(5, 5, 0.1, now=1.0)
    assert not excuses.excuse(5, 5, 0.1, now=1.2)  # again_s, at least
    assert excuses.excuse(6, 6, 0.1, now=1.2)


def test_steps_behind_one_without_room_are_free_once():
    excuses = Excuses(LIMITS)
    assert not excuses.excuse(6, 5, 1.0, now=0.0)
    assert excuses.excuse(5, 5, 1.0, now=0.0)
    assert all(excuses.excuse(step, 5, None, now=0.0) for step in range(6, 5 + WINDOW))
    assert not any(excuses.excuse(step, 5, None, now=0.0) for step in range(5, 6 + WINDOW))
    assert excuses.excuse(5, 5, 1.0, now=1.0)
    assert not excuses.excuse(6, 5, None, now=1.0)  # its sender knew
