"""The read gate, by times that are passed in."""

from itertools import pairwise

import pytest

from swarm.net.gate import Allowance, ReadGate
from swarm.net.rate import FairQueue
from tests.net.support import channel_limits

LIMITS = channel_limits(
    bytes_per_s=10.0,
    bytes_burst=100.0,
    step_bytes_free=20,
    idle_per_s=1.0,
    idle_burst=2.0,
    idle_bytes=1000,
    pause_s_max=5.0,
    keepalives={"every_s": 0.3, "burst": 3.0},
)
PLENTY = FairQueue(1e9, 1e9)


def gate(*, proven=True):
    made = ReadGate(LIMITS, lambda: None)
    if proven:
        made.trust(Allowance(LIMITS))
    return made


def empty():
    """A shared budget with nothing in it, for a long time."""
    queue = FairQueue(1e-6, 1.0)
    queue.take(0.0, 1e6)
    return queue


def test_a_peer_within_its_own_allowance_is_read_at_once():
    mine, shared = gate(), empty()
    for now in range(20):
        mine.charge_read(10, shared, float(now))
        assert (mine.is_open, mine.wake_at) == (True, None)


def test_the_shared_budget_pays_beyond_a_peers_own_allowance():
    mine = gate()
    for _ in range(20):
        mine.charge_read(1000, PLENTY, 1.0)
    assert mine.is_open


def test_a_debt_closes_the_gate_until_own_tokens_cover_it():
    mine, shared = gate(proven=False), empty()
    mine.charge_read(110, shared, 0.0)  # a bucket lends while it holds anything
    assert mine.is_open
    mine.charge_read(5, shared, 0.0)
    assert not mine.is_open
    assert mine.wake_at == pytest.approx(1.0, abs=0.01)
    mine.wake(0.9)
    assert not mine.is_open
    mine.wake(mine.wake_at)
    assert mine.is_open
    assert shared.next_s(1.1) is None  # the debt has left the queue


def test_debts_add_up_while_the_gate_is_closed():
    mine, shared = gate(proven=False), empty()
    mine.charge_read(110, shared, 0.0)
    mine.charge_read(15, shared, 0.0)
    mine.charge_read(15, shared, 0.0)  # the carrier had it already
    mine.wake(1.1)
    assert mine.is_open
    mine.charge_read(1, shared, 1.1)
    assert mine.wake_at == pytest.approx(4.0, abs=0.1)


def test_the_gate_opens_when_the_shared_budget_has_paid():
    opened = []
    mine = ReadGate(LIMITS, lambda: opened.append(True))
    shared = FairQueue(100.0, 1.0)
    shared.take(0.0, 51.0)
    mine.charge_read(150, PLENTY, 0.0)
    mine.charge_read(1000, shared, 0.0)
    assert not mine.is_open
    assert shared.settle(0.4) is None
    assert shared.settle(0.6) is mine
    mine.paid(shared)
    assert opened == [True]
    mine.wake(0.6)
    assert mine.is_open


def test_with_two_debts_both_must_be_paid():
    opened, read, idle = [], empty(), empty()
    mine = ReadGate(LIMITS, lambda: opened.append(True))
    mine.charge_read(150, PLENTY, 0.0)
    mine.charge_read(10, read, 0.0)
    mine.charge_idle(5000, PLENTY, 0.0)
    mine.charge_idle(0, idle, 0.0)
    mine.paid(read)
    assert opened == []
    mine.paid(idle)
    assert opened == [True]


def test_a_closed_gate_looks_again_after_a_bounded_pause():
    mine, shared = gate(proven=False), empty()
    mine.charge_read(10_000, PLENTY, 0.0)
    mine.charge_read(1, shared, 0.0)
    assert mine.wake_at == LIMITS.reading.pause_s_max
    mine.wake(5.0)
    assert not mine.is_open
    assert mine.wake_at == 10.0


def test_an_idle_message_costs_a_unit_and_its_bytes():
    mine, shared = gate(), empty()
    mine.charge_idle(0, shared, 0.0)
    mine.charge_idle(2000, shared, 0.0)  # 3 units, of which 1 was left
    mine.charge_idle(0, shared, 0.0)
    assert not mine.is_open
    for now in (0.5, 1.0, 1.9):
        mine.wake(now)
        assert not mine.is_open
    mine.wake(2.1)
    assert mine.is_open


def test_bytes_of_accepted_steps_are_given_back_within_limits():
    for n_bytes, free in ((20, True), (40, False)):
        mine, shared = gate(), empty()
        for _ in range(20):
            mine.charge_read(n_bytes, shared, 0.0)
            mine.give_back(n_bytes)
        assert mine.is_open is free


def test_allowances_are_shared_by_the_channels_of_a_peer():
    one, other, allowance = gate(), gate(), Allowance(LIMITS)
    one.trust(allowance)
    other.trust(allowance)
    one.charge_read(150, PLENTY, 0.0)
    other.charge_read(1, empty(), 0.0)
    assert not other.is_open


def test_the_end_of_a_turn_closes_the_gate_briefly():
    mine = gate()
    mine.yield_turn(1.0)
    assert (mine.is_open, mine.wake_at) == (False, 1.0)
    assert not mine.wake(1.0)  # and is no reason for a keepalive
    assert (mine.is_open, mine.wake_at) == (True, None)


def test_the_end_of_a_turn_cuts_no_debt_short():
    mine, shared = gate(proven=False), empty()
    mine.charge_read(150, PLENTY, 0.0)
    mine.charge_read(1, shared, 0.0)
    at = mine.wake_at
    mine.yield_turn(0.0)
    assert mine.wake_at == at > 1.0


def test_the_time_for_which_it_was_closed_is_counted():
    mine, shared = gate(proven=False), empty()
    mine.charge_read(110, PLENTY, 0.0)
    mine.charge_read(1, shared, 0.0)
    assert mine.closed_s(0.5) == 0.5
    mine.wake(1.5)
    assert mine.is_open
    assert mine.closed_s(9.0) == 1.5
    mine.yield_turn(9.0)
    assert mine.closed_s(9.5) == 2.0


def throttled(mine, until_s):
    """When a gate asks for keepalives, of which each costs a look at its timer."""
    asked, now = [], 0.0
    while (at := mine.wake_at) is not None and at <= until_s:
        now = max(now, at)
        if mine.wake(now):
            asked.append(round(now, 2))
    return asked


def test_a_throttled_peer_is_sent_keepalives_until_it_is_read():
    mine = gate()
    mine.charge_read(110, PLENTY, 0.0)
    mine.charge_read(1, empty(), 0.0)
    assert throttled(mine, 10.0) == [0.3, 0.6, 0.9, 1.2]
    assert mine.is_open


def test_short_pauses_in_a_row_do_not_bring_keepalives_earlier():
    mine, asked = gate(), []
    mine.charge_read(200, PLENTY, 0.0)
    for now in (i / 10 for i in range(30)):
        shared = empty()
        mine.charge_read(1, shared, now)
        assert not mine.is_open
        mine.paid(shared)
        if mine.wake(now + 0.05):
            asked.append(now)
        assert mine.is_open
    assert len(asked) >= 6
    assert min(after - before for before, after in pairwise([0.0, *asked])) >= 0.29


def test_a_peer_that_has_proven_nothing_gets_no_keepalive():
    mine = gate(proven=False)
    mine.charge_read(150, PLENTY, 0.0)
    mine.charge_read(1, empty(), 0.0)
    assert throttled(mine, 4.0) == []


def test_keepalives_are_free_as_often_as_they_may_come():
    mine = gate()
    assert [mine.is_free_keepalive(0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert all(mine.is_free_keepalive(1.0 + i * 0.31) for i in range(100))


def test_an_ended_gate_owes_nothing_and_borrows_nothing():
    mine, shared = gate(), empty()
    mine.charge_read(150, PLENTY, 0.0)
    mine.charge_read(1, shared, 0.0)
    mine.end()
    assert shared.next_s(0.0) is None
    mine.charge_read(1, shared, 0.0)
    mine.charge_idle(10_000, shared, 0.0)
    mine.charge_idle(10_000, shared, 0.0)
    assert shared.next_s(0.0) is None
