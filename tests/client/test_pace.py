"""Whether guessing pays, from times that are given: without a clock and without a swarm."""

import pytest

from swarm.client.speculation.limits import AheadLimits, PaceLimits
from swarm.client.speculation.pace import Pace, cut_off, pays

TRIP_S = 0.1
LIMITS = PaceLimits(tokens=8, pause_min=16, pause_max=64)


class Caller:
    """Asks for tokens, and spends 2 ms on each."""

    def __init__(self, pace=None):
        self.pace = pace or Pace(LIMITS)
        self.now = 0.0

    def token(self, waits_s=TRIP_S, *, is_guessed=False):
        self.pace.asked(self.now, is_there=not waits_s)
        self.now += waits_s
        self.pace.returned(self.now, is_guessed=is_guessed, is_trip=bool(waits_s))
        self.now += 0.002


def after(*waits_s, is_guessed=True):
    """Return the pace of a session whose plain tokens take 100 ms, after tokens with guesses that took these times."""
    caller = Caller()
    for _ in range(4):
        caller.token()
    for wait_s in waits_s:
        caller.token(wait_s, is_guessed=is_guessed)
    return caller


def test_guesses_that_are_right_go_on():
    assert not after(*[TRIP_S, 0.0, 0.0] * 20).pace.loses


@pytest.mark.parametrize(("took_s", "loses"), [(1.01 * TRIP_S, False), (1.1 * TRIP_S, True)])
def test_guesses_that_make_tokens_slower_pause(took_s, loses):
    assert after(*[took_s] * LIMITS.tokens).pace.loses is loses


def test_a_pause_ends_and_each_further_one_is_longer():
    caller, lengths = after(), []
    for _ in range(5):
        for _ in range(LIMITS.tokens):
            caller.token(1.5 * TRIP_S, is_guessed=True)
        lengths.append(0)
        while caller.pace.loses:
            caller.token()
            lengths[-1] += 1
    assert lengths == [16, 32, 64, 64, 64]
    for _ in range(LIMITS.tokens):
        caller.token(0.0, is_guessed=True)
    for _ in range(LIMITS.tokens):
        caller.token(1.5 * TRIP_S, is_guessed=True)
    assert caller.pace.loses
    for _ in range(16):  # they had paid in between: the pauses begin anew
        caller.token()
    assert not caller.pace.loses


def test_the_time_that_a_user_takes_does_not_count():
    caller = after()
    for _ in range(LIMITS.tokens):
        caller.now += 60.0
        caller.token(is_guessed=True)
    assert not caller.pace.loses


def test_on_a_quick_route_nothing_is_guessed():
    caller = Caller()
    assert caller.pace.is_quick  # nothing is known yet
    caller.token(0.005)
    assert caller.pace.is_quick
    for _ in range(20):
        caller.token()
    assert not caller.pace.is_quick


@pytest.mark.parametrize(
    ("took_s", "load", "expected"), [(TRIP_S, 0.0, True), (1.5 * TRIP_S, 0.0, False), (TRIP_S, 4.5, False)]
)
def test_guesses_pay_where_they_do_not_lose_and_hops_have_room(took_s, load, expected):
    assert pays(after(*[took_s] * LIMITS.tokens).pace, load, AheadLimits()) is expected
    assert not pays(Pace(LIMITS), load, AheadLimits())  # of a route of which nothing is known


def test_a_draft_that_is_slow_for_the_route_does_not_guess():
    caller = after()
    for _ in range(10):
        caller.pace.drafted(0.03)
    assert not caller.pace.is_quick
    assert caller.pace.depth == 1 + int(TRIP_S / 0.03)
    for _ in range(60):
        caller.pace.drafted(0.07)
    assert caller.pace.is_quick
    for _ in range(60):
        caller.token()
    assert not caller.pace.is_quick  # it is tried again


def test_a_trip_is_filled_with_tokens():
    caller = after(*[0.0] * 60)
    assert caller.pace.depth == 1 + int(TRIP_S / 0.002)


@pytest.mark.parametrize(
    ("guess_s", "step_s", "guesses"),
    [(0.002, 0.0, 6), (0.002, 0.012, 13), (0.02, 0.0, 1), (0.02, 0.05, 6), (0.02, 0.005, 1)],
)
def test_a_step_gathers_the_guesses_that_are_made_while_a_hop_computes_one(guess_s, step_s, guesses):
    """Half of the slowest hop's time is for others."""
    pace = Pace()
    assert pace.gathered(step_s) == 1  # nothing is known of the draft
    pace.drafted(guess_s)
    assert pace.gathered(step_s) == guesses


@pytest.mark.parametrize(("load", "expected"), [(0.0, 0.02), (1.0, 0.02), (2.0, 0.1), (9.0, 0.1)])
def test_guesses_must_be_likelier_where_hops_have_others_to_serve(load, expected):
    assert cut_off(load, AheadLimits()) == expected
