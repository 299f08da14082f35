"""Whom a client does without, and for how long."""

from dataclasses import replace

from swarm.client.planning.route import process_of
from swarm.client.session.avoidance import Avoidance
from swarm.client.session.limits import AvoidanceLimits
from tests.client.test_route import server

LIMITS = AvoidanceLimits()


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
    avoidance = Avoidance(clock, clock)
    times = []
    for _ in range(12):
        avoidance.failed("a")
        times.append(avoided_for(avoidance, clock, "a"))
    assert times[:4] == [LIMITS.avoid_s, 2 * LIMITS.avoid_s, 4 * LIMITS.avoid_s, 8 * LIMITS.avoid_s]
    assert max(times) == LIMITS.avoid_s_max


def test_a_failure_is_forgotten_when_none_follows():
    clock = Clock()
    avoidance = Avoidance(clock, clock)
    for _ in range(3):
        avoidance.failed("a")
    clock.now += LIMITS.forget_s + 1
    avoidance.failed("a")
    assert avoided_for(avoidance, clock, "a") == LIMITS.avoid_s


def test_a_refusal_is_no_failure():
    clock = Clock()
    avoidance = Avoidance(clock, clock)
    for _ in range(3):
        avoidance.declined("a", 2.0)
    assert avoided_for(avoidance, clock, "a") == 2.0
    avoidance.failed("a")
    assert avoided_for(avoidance, clock, "a") == LIMITS.avoid_s


def test_blocked_edge_has_a_direction_an_end_and_no_culprit():
    clock = Clock()
    avoidance = Avoidance(clock, clock)
    avoidance.block(("a", "b"))
    assert avoidance.blocked(("a", "b"))
    assert not avoidance.blocked(("b", "a"))
    assert not avoidance.processes
    clock.now += LIMITS.relay_s + 1
    assert not avoidance.blocked(("a", "b"))
    avoidance.block(("a", "b"))
    clock.now += LIMITS.relay_s + 1
    assert avoidance.blocked(("a", "b"))


def test_what_is_remembered_is_bounded():
    clock = Clock()
    avoidance = Avoidance(clock, clock)
    for number in range(LIMITS.entries_max + 10):
        avoidance.failed(f"p{number}")
    assert len(avoidance.processes) == LIMITS.entries_max
    assert f"p{LIMITS.entries_max + 9}" in avoidance.processes


class Heard:
    at = 0.0

    def __call__(self):
        return self.at


def test_client_that_is_cut_off_holds_nothing_against_hops():
    clock, heard = Clock(), Heard()
    avoidance = Avoidance(clock, heard)
    avoidance.failed("a")
    clock.now, heard.at = 1100.0, 1099.0
    avoidance.lost("a", 1100.0)
    assert not avoidance.cut_off, "it may be a's own fault"
    avoidance.failed("a")
    assert avoidance.processes == ("a",)
    avoidance.lost("b", 1101.0)
    avoidance.failed("b")
    avoidance.failed("c")
    assert avoidance.cut_off
    assert avoidance.processes == ()
    heard.at = 1120.0
    assert not avoidance.cut_off
    avoidance.failed("a")
    assert avoided_for(avoidance, clock, "a") == 2 * LIMITS.avoid_s, (
        "what it did before counts, what it did meanwhile does not"
    )


def test_hop_that_is_silent_while_others_are_heard_has_failed():
    clock, heard = Clock(), Heard()
    avoidance = Avoidance(clock, heard)
    for process, heard.at in (("a", 1000.5), ("b", 1001.5), ("c", 1001.5)):
        avoidance.lost(process, 1000.0 if process != "c" else 1001.0)
        avoidance.failed(process)
    assert not avoidance.cut_off
    assert set(avoidance.processes) == {"a", "b", "c"}


def test_one_hop_that_two_sessions_miss_is_one():
    clock, heard = Clock(), Heard()
    avoidance = Avoidance(clock, heard)
    for since in (1000.0, 1000.1):
        avoidance.lost("a", since)
    assert not avoidance.cut_off


def test_a_process_seems_to_have_ended_until_it_announces_itself_anew():
    """A server that has ended is in the directory for as long as its record lives."""
    clock, one, other = Clock(), server(0, 6), server(0, 6)
    avoidance, process, issued = Avoidance(clock, clock), process_of(one.announcement), one.announcement.issued
    clock.now += 5.0
    avoidance.failed(process)
    assert (avoidance.processes, avoidance.ended([one, other], issued + 5.0)) == ((process,), ())
    clock.now += 10 * LIMITS.avoid_s
    wall_now = issued + 5.0 + 10 * LIMITS.avoid_s
    assert avoidance.processes == ()
    assert avoidance.ended([one, other], wall_now) == (process,)
    later = [replace(one, announcement=one.announcement.model_copy(update={"issued": issued + s})) for s in (3.0, 7.0)]
    assert avoidance.ended([later[0], one, other], wall_now) == (process,)
    assert avoidance.ended([one, later[1], other], wall_now) == ()


def test_a_refusal_says_nothing_of_a_record():
    clock, one = Clock(), server(0, 6)
    avoidance = Avoidance(clock, clock)
    avoidance.declined(process_of(one.announcement), 1.0)
    clock.now += 2.0
    assert avoidance.ended([one], one.announcement.issued + 60.0) == ()
