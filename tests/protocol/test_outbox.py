"""The client's end of a stream of steps, rule by rule."""

import asyncio

import torch

from swarm.activations import Activations
from swarm.protocol.outbox import DROPPED, Answer, Outbox, OutboxLimits, Ticket
from tests.protocol.test_stream import SESSION, NoRoom, one


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


def test_a_step_with_positions_that_stay_is_no_wrong_guess():
    """It was put while no route stood, with a right token before its guesses, which a repair has to bring."""
    outbox, _ = outbox_of(0)
    frame = Activations(torch.zeros(1, 4, 1))
    outbox.put(frame, keep=10, rows=None, want=4, budget_ms=1)
    outbox.put(frame, keep=14, rows=None, want=4, budget_ms=1)
    outbox.truncate(outbox.last_of(12))
    assert outbox.put(frame, keep=12, rows=None, want=4, budget_ms=1, skips=True).step == 2
    assert [(ticket.message.keep, ticket.wanted) for ticket in outbox.due()] == [(10, True), (12, True)]
    outbox.answered(1, one(0))
    assert outbox.last_of(12) == 1


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
