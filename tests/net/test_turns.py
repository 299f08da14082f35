"""Turns to shake hands: by times that are passed in, and with the timer that gives them."""

import asyncio

import pytest

from swarm.net.limits import HandshakeLimits
from swarm.net.turns import TurnQueue, Turns

LIMITS = HandshakeLimits()
MINUTE = 60.0


def served(turns: Turns, until: float, now: float = 0.0) -> list[tuple[object, float]]:
    """Return who had a turn, and when."""
    had = []
    while (wait_s := turns.next_s(now)) is not None and (now := now + wait_s + 1e-3) < until:
        while (one := turns.take(now)) is not None:
            had.append((one, now))
    return had


def test_a_source_that_connects_too_often_waits_then_is_refused():
    turns = Turns(LIMITS)
    asked = [turns.ask(number, "10.0.0.1", 0.0) for number in range(100)]
    had = served(turns, MINUTE)
    assert [number for number, _ in had] == [number for number, may in enumerate(asked) if may]
    at_once = [number for number, at in had if at < 0.01]
    assert len(at_once) == LIMITS.all_burst + 1  # the bucket lends one
    assert all(asked[: int(LIMITS.burst)])
    assert not asked[-1]
    assert had[-1][1] < LIMITS.turn_wait_s + 0.1
    assert turns.ask("later", "10.0.0.1", MINUTE)


def test_a_quiet_source_has_its_turn_before_a_crowd():
    turns = Turns(LIMITS)
    crowd = [(source, number) for source in "abcd" for number in range(30) if turns.ask((source, number), source, 0.0)]
    assert len(crowd) > LIMITS.all_burst + LIMITS.all_per_s  # more than a second of turns waits
    while turns.take(0.0) is not None:
        pass
    assert turns.ask("quiet", "e", 0.1)
    (first, at), *_ = served(turns, MINUTE, 0.1)
    assert (first, at < 0.2) == ("quiet", True)


def test_a_crowd_of_sources_leaves_a_quiet_one_room_to_wait():
    turns = Turns(LIMITS)
    asked = [turns.ask((source, number), f"10.0.0.{source}", 0.0) for number in range(8) for source in range(50)]
    assert not all(asked)
    assert turns.ask("quiet", "10.0.1.0", 0.0)


def test_a_refused_connection_uses_no_turn_up():
    turns = Turns(HandshakeLimits(all_burst=1.0, all_per_s=1.0, burst=4.0, per_s=0.001))
    assert [turns.ask(number, "a", 0.0) for number in range(9)] == [True] * 2 + [False] * 7
    served(turns, MINUTE)
    assert turns.ask("later", "a", MINUTE)


def test_one_that_has_left_has_no_turn():
    turns = Turns(HandshakeLimits(all_burst=1.0, all_per_s=1.0))
    turns.ask("one", "a", 0.0)
    turns.leave("one")
    assert (turns.take(MINUTE), turns.next_s(MINUTE)) == (None, None)


def test_a_new_source_is_refused_while_all_are_in_debt():
    turns = Turns(HandshakeLimits(sources_max=2, all_burst=100.0))
    for source in ("a", "b"):
        assert turns.ask(source, source, 0.0)
    assert not turns.ask("c", "c", 0.0)
    assert turns.ask("more of a", "a", 0.0)
    assert turns.ask("c", "c", MINUTE)


@pytest.mark.virtual_clock
async def test_turns_come_at_the_common_rate_or_not_in_time():
    queue, loop = TurnQueue(HandshakeLimits(all_burst=1.0, all_per_s=1.0, turn_wait_s=2.0)), asyncio.get_running_loop()
    began, ended = loop.time(), []

    async def wait(source):
        ended.append((source, await queue.wait(source), round(loop.time() - began)))

    await asyncio.gather(*(wait(source) for source in "abcd"))
    assert sorted(ended) == [("a", True, 0), ("b", True, 0), ("c", True, 1), ("d", False, 0)]
