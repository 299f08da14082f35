"""Whom a client does without, and for how long."""

from swarm.client.avoidance import AVOID_S, AVOID_S_MAX, ENTRIES_MAX, FORGET_S, RELAY_S, Avoidance


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def avoided_for(avoidance, clock, process):
    began = clock.now
    while process in avoidance.processes:
        clock.now += 0.5
    return clock.now - began


def test_every_failure_doubles_the_time_up_to_a_limit():
    clock = Clock()
    avoidance = Avoidance(clock)
    times = []
    for _ in range(12):
        avoidance.failed("a")
        times.append(avoided_for(avoidance, clock, "a"))
    assert times[:4] == [AVOID_S, 2 * AVOID_S, 4 * AVOID_S, 8 * AVOID_S]
    assert max(times) == AVOID_S_MAX


def test_a_failure_is_forgotten_when_none_follows():
    clock = Clock()
    avoidance = Avoidance(clock)
    for _ in range(3):
        avoidance.failed("a")
    clock.now += FORGET_S + 1
    avoidance.failed("a")
    assert avoided_for(avoidance, clock, "a") == AVOID_S


def test_a_refusal_is_no_failure():
    clock = Clock()
    avoidance = Avoidance(clock)
    for _ in range(3):
        avoidance.declined("a", 2.0)
    assert avoided_for(avoidance, clock, "a") == 2.0
    avoidance.failed("a")
    assert avoided_for(avoidance, clock, "a") == AVOID_S


def test_a_blocked_edge_has_a_direction_and_an_end_and_costs_no_process_its_name():
    clock = Clock()
    avoidance = Avoidance(clock)
    avoidance.block(("a", "b"))
    assert avoidance.blocked(("a", "b"))
    assert not avoidance.blocked(("b", "a"))
    assert not avoidance.processes
    clock.now += RELAY_S + 1
    assert not avoidance.blocked(("a", "b"))
    avoidance.block(("a", "b"))
    clock.now += RELAY_S + 1
    assert avoidance.blocked(("a", "b"))


def test_what_is_remembered_is_bounded():
    clock = Clock()
    avoidance = Avoidance(clock)
    for number in range(ENTRIES_MAX + 10):
        avoidance.failed(f"p{number}")
    assert len(avoidance.processes) == ENTRIES_MAX
    assert f"p{ENTRIES_MAX + 9}" in avoidance.processes
