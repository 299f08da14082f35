"""Until when the scheduler waits, with work at hand, for sessions that are expected back."""

import pytest

from swarm.compute.limits import LingerLimits
from swarm.compute.linger import Linger, Presence

LIMITS = LingerLimits()


@pytest.fixture
def linger() -> Linger:
    return Linger(LIMITS)


def come_and_go(linger: Linger, session: Presence, away_s: list[float], took_s: float) -> None:
    """Once a second the session gets an answer, and is back after so long."""
    for turn, away in enumerate(away_s):
        linger.delivered([session], now=float(turn), took_s=took_s)
        linger.arrived(session, now=turn + away)


def test_sessions_of_the_same_batch_are_waited_for(linger: Linger) -> None:
    a, b, stranger = Presence(), Presence(), Presence()
    linger.delivered([a, b], now=0.0, took_s=0.02)
    linger.arrived(a, now=0.5)
    assert 0.5 < linger.until([a], since=0.5, now=0.5) <= 0.5 + LIMITS.step_s
    now = 0.5 + LIMITS.step_s
    assert linger.until([a], since=0.5, now=now) == now
    assert linger.until([stranger], since=0.5, now=0.5) == 0.5
    linger.arrived(b, now=0.501)
    assert linger.until([a, b], since=0.5, now=0.501) == 0.501


def test_a_session_next_door_is_waited_for_by_others(linger: Linger) -> None:
    near, other = Presence(), Presence()
    come_and_go(linger, near, [0.001] * 5, took_s=0.05)
    linger.delivered([near], now=5.0, took_s=0.05)
    assert linger.until([other], since=5.0, now=5.0) > 5.0
    assert linger.until([other], since=5.0, now=5.003) == 5.003
    assert linger.until([other], since=7.0, now=7.0) == 7.0


def test_prefill_waits_longer_than_a_step(linger: Linger) -> None:
    """Else a session that decodes waits for most of an iteration without its step."""
    near, other = Presence(), Presence()
    come_and_go(linger, near, [0.005] * 5, took_s=0.02)
    linger.delivered([near], now=5.0, took_s=0.02)
    assert linger.until([other], since=5.009, now=5.009) == 5.009
    assert linger.until([], since=5.009, now=5.009) > 5.009
    assert linger.until([], since=5.009, now=5.021) == 5.021


def test_one_long_absence_is_no_rule(linger: Linger) -> None:
    """Else prefill begins just before each of the session's next ten steps."""
    near = Presence()
    come_and_go(linger, near, [0.002] * 19 + [0.5], took_s=0.05)
    linger.delivered([near], now=20.0, took_s=0.05)
    assert linger.until([], since=20.0, now=20.0) > 20.0


def test_a_session_that_becomes_slower_is_soon_waited_for_longer(linger: Linger) -> None:
    near, missed = Presence(), 0
    for turn in range(40):
        away_s = 0.002 if turn < 20 else 0.012
        linger.delivered([near], now=float(turn), took_s=0.02)
        missed += linger.until([], since=float(turn), now=float(turn)) < turn + away_s
        linger.arrived(near, now=turn + away_s)
    assert missed <= 3  # the very first, and few at the change


def test_a_lone_session_is_never_kept_waiting(linger: Linger) -> None:
    lone = Presence()
    linger.delivered([lone], now=0.0, took_s=0.02)
    linger.arrived(lone, now=0.001)
    assert linger.until([lone], since=0.001, now=0.001) == 0.001


def test_sessions_that_stay_away_are_forgotten(linger: Linger) -> None:
    a, b, other = Presence(), Presence(), Presence()
    linger.delivered([a, b], now=0.0, took_s=0.02)
    linger.delivered([other], now=LIMITS.absent_s + 0.1, took_s=0.02)
    linger.arrived(a, now=LIMITS.absent_s + 0.2)
    assert linger.until([a], since=1.2, now=1.2) == 1.2


def test_a_session_that_becomes_quicker_is_waited_for_at_once(linger: Linger) -> None:
    """Before, its steps were too far apart to be waited for."""
    near = Presence()
    come_and_go(linger, near, [0.04] * 10, took_s=0.02)
    linger.delivered([near], now=10.0, took_s=0.02)
    assert linger.until([], since=10.0, now=10.0) == 10.0
    linger.arrived(near, now=10.002)
    linger.delivered([near], now=11.0, took_s=0.02)
    assert linger.until([], since=11.0, now=11.0) > 11.0
