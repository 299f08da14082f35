"""What is concluded from what hops say."""

import pytest

from swarm.client.watch import (
    GIVE_UP_ROUNDS,
    PATIENCE_S_MAX,
    PATIENCE_S_MIN,
    RESEND_ROUNDS,
    WEDGED_S,
    StepTimes,
    Stuck,
    Watch,
    Wedged,
)
from swarm.wire.messages import Progress

APPLIED, WAITING = 7, 6  # of step 7


def hop(applied, *, under_way=0, jobs_done=0, quiet_ms=10_000):
    return Progress(
        session="0" * 32,
        epoch=0,
        applied=applied,
        length=0,
        under_way=under_way,
        jobs_done=jobs_done,
        quiet_ms=quiet_ms,
    )


def rounds(hops, count, every_s=0.5):
    """The verdicts of so many rounds in which the hops say the same."""
    watch = Watch()
    done = [each.applied >= APPLIED for each in hops]
    return [watch.judge(hops, done, every_s * number) for number in range(count)]


@pytest.mark.parametrize("front", [0, 1, 2, 3])
def test_what_does_not_arrive_is_sent_again_and_then_given_up(front):
    hops = [hop(APPLIED) for _ in range(front)] + [hop(WAITING) for _ in range(3 - front)]
    verdicts = rounds(hops, 1 + GIVE_UP_ROUNDS)
    assert verdicts[RESEND_ROUNDS] == Stuck(front, again=True)
    assert verdicts[GIVE_UP_ROUNDS] == Stuck(front, again=False)
    assert [verdict for verdict in verdicts if verdict is None] == [None] * (GIVE_UP_ROUNDS - 1)


def test_bytes_on_their_way_are_waited_for():
    assert rounds([hop(APPLIED), hop(WAITING, quiet_ms=5)], 20) == [None] * 20


def test_a_busy_hop_that_finishes_anything_for_anybody_is_waited_for():
    watch = Watch()
    for number in range(1000):
        hops = [hop(APPLIED), hop(WAITING, under_way=1, jobs_done=number // 10)]
        assert watch.judge(hops, [True, False], 0.5 * number) is None


def test_a_hop_that_finishes_nothing_is_wedged():
    verdicts = rounds([hop(APPLIED), hop(WAITING, under_way=1)], int(3 * WEDGED_S))
    assert verdicts[int(1.9 * WEDGED_S)] is None
    assert verdicts[-1] == Wedged(1)


def test_a_hop_behind_a_busy_one_is_not_suspected():
    assert rounds([hop(WAITING, under_way=1), hop(WAITING)], 20) == [None] * 20


def test_patience_follows_the_steps_within_limits():
    times = StepTimes()
    times.observe(60.0, tokens=512)  # a prefill
    assert PATIENCE_S_MIN < times.patience_s < PATIENCE_S_MAX
    for _ in range(50):
        times.observe(0.001, tokens=1)
    assert times.patience_s == PATIENCE_S_MIN
    for _ in range(50):
        times.observe(0.4, tokens=1)
    assert 0.4 < times.patience_s < 1.0
    for _ in range(50):
        times.observe(30.0, tokens=1)
    assert times.patience_s == PATIENCE_S_MAX
