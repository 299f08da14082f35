"""What is concluded from what hops say."""

import asyncio
from types import SimpleNamespace

import pytest

from swarm.client.session.limits import WatchLimits
from swarm.client.session.rounds import Overdue, Rounds, Stuck, Wedged, rebuilding_front
from swarm.client.session.timeout import Timeout
from swarm.client.session.watch import Before, Watcher
from swarm.protocol.messages import Progress

LIMITS = WatchLimits()
APPLIED, WAITING = 7, 6  # of step 7


def hop(applied, *, length=0, under_way=0, jobs_done=0, quiet_ms=10_000):
    return Progress(
        session="0" * 32,
        epoch=0,
        applied=applied,
        length=length,
        under_way=under_way,
        jobs_done=jobs_done,
        quiet_ms=quiet_ms,
    )


def rounds(hops, count, every_s=0.5):
    """The verdicts of so many rounds in which the hops say the same."""
    watch = Rounds(LIMITS)
    done = [each.applied >= APPLIED for each in hops]
    return [watch.judge(hops, done, APPLIED, every_s * number) for number in range(count)]


@pytest.mark.parametrize("front", [0, 1, 2, 3])
def test_lost_messages_are_retransmitted_and_then_given_up(front):
    hops = [hop(APPLIED) for _ in range(front)] + [hop(WAITING) for _ in range(3 - front)]
    verdicts = rounds(hops, 1 + LIMITS.give_up_rounds)
    assert verdicts[LIMITS.resend_rounds] == Stuck(front, again=True)
    assert verdicts[LIMITS.give_up_rounds] == Stuck(front, again=False)
    assert [verdict for verdict in verdicts if verdict is None] == [None] * (LIMITS.give_up_rounds - 1)


def test_hop_that_refuses_steps_has_received_them():
    watch, hops = Rounds(LIMITS), [hop(WAITING)]
    assert not any(watch.judge(hops, [False], APPLIED, 1.0 * number, number) for number in range(50))
    assert any(watch.judge(hops, [False], APPLIED, 50.0 + number, 49) for number in range(LIMITS.give_up_rounds))


def test_bytes_on_their_way_are_waited_for_until_something_whole_should_have_come():
    hops, count = [hop(APPLIED), hop(WAITING, quiet_ms=5)], int(2 * LIMITS.receives_s)  # rounds of half a second
    verdicts = rounds(hops, count + LIMITS.give_up_rounds + 1)
    assert verdicts[: count + 1] == [None] * (count + 1)
    assert [each for each in verdicts if each] == [Stuck(1, again=True), Stuck(1, again=False)]


def test_a_past_whose_pieces_come_is_waited_for_without_end():
    watch = Rounds(LIMITS)
    for second in range(int(4 * LIMITS.receives_s)):
        hops = [hop(APPLIED), hop(WAITING, quiet_ms=5, length=second // 80)]
        assert watch.judge(hops, [True, False], 7, float(second)) is None


def test_busy_hop_that_finishes_any_job_is_waited_for():
    watch = Rounds(LIMITS)
    for number in range(1000):
        hops = [hop(APPLIED), hop(WAITING, under_way=1, jobs_done=number // 10)]
        assert watch.judge(hops, [True, False], number // 100, 0.5 * number) is None


def test_hop_that_keeps_one_step_is_overdue_again_and_again():
    watch = Rounds(LIMITS)
    done = [True, False]
    overdue_s = LIMITS.overdue_s
    said = [
        watch.judge([hop(APPLIED), hop(WAITING, under_way=1, jobs_done=second)], done, 7, float(second))
        for second in range(int(2.5 * LIMITS.overdue_s))
    ]
    assert [second for second, verdict in enumerate(said) if verdict] == [overdue_s + 1, 2 * overdue_s + 2]
    assert set(said) == {None, Overdue(1)}


def test_hop_that_gets_further_with_a_step_is_not_overdue():
    watch = Rounds(LIMITS)
    for second in range(int(2.5 * LIMITS.overdue_s)):
        hops = [hop(APPLIED), hop(WAITING, under_way=1, jobs_done=second, length=second // 50)]
        assert watch.judge(hops, [True, False], APPLIED, float(second)) is None


@pytest.mark.parametrize("quiet_ms", [5, 10_000])
def test_hop_that_finishes_nothing_is_wedged_whatever_it_receives(quiet_ms):
    hops = [hop(APPLIED), hop(WAITING, under_way=1, quiet_ms=quiet_ms)]
    verdicts = rounds(hops, int(3 * LIMITS.wedged_s))
    assert verdicts[int(1.9 * LIMITS.wedged_s)] is None
    assert verdicts[-1] == Wedged(1)


def test_hop_behind_a_busy_one_is_not_suspected():
    assert rounds([hop(WAITING, under_way=1), hop(WAITING)], 20) == [None] * 20


@pytest.mark.parametrize(
    ("said", "front"),
    [
        ("0 0 0 0 0", 1),  # nothing has come to the first one
        ("0 8 4 0 0", 2),  # nothing comes to the second one, and the first one waits for it
        ("0 8+ 4 0 0", 1),
        ("0 8 8+ 0 0", 2),
        ("0 9 9+ 0 0", 2),
        ("0 9 9 0 0", 4),  # the other run
        ("0 9 9 0 9", 5),
    ],
)
def test_past_waits_for_the_last_hop_it_has_not_passed(said, front):
    hops = [hop(WAITING, length=int(each.rstrip("+")), under_way=each.count("+")) for each in said.split()]
    assert rebuilding_front(hops, {1, 2, 4}, 9) == front


def test_patience_follows_earlier_times_within_limits():
    least, first, most = LIMITS.patience_s
    usual = Timeout(LIMITS.patience_s)
    assert usual.wait_s == first
    for _ in range(50):
        usual.observe(0.001)
    assert usual.wait_s == least
    for _ in range(50):
        usual.observe(0.4)
    assert 0.4 < usual.wait_s < 0.6
    for _ in range(50):
        usual.observe(30.0)
    assert usual.wait_s == most


async def test_hop_has_as_long_for_an_answer_as_steps_take():
    least, first, _ = LIMITS.answer_s
    watcher = Watcher(None, None, LIMITS)
    assert watcher.answer_s == first
    for _ in range(50):
        watcher.patience.observe(0.01)
    assert watcher.answer_s == least
    for _ in range(50):
        watcher.patience.observe(0.6)
    assert least < watcher.answer_s <= first


def test_answer_waits_while_a_steps_bytes_are_in_the_questions_way():
    before, rate = Before(100.0, {1: 5_000}), LIMITS.line_bytes_s
    assert before.behind_s(1, 5_000, 100.5, LIMITS) == 0.0
    assert before.behind_s(1, 5_000 + 4 * rate, 100.5, LIMITS) == 3.5
    assert before.behind_s(1, 5_000 + 4 * rate, 104.5, LIMITS) == 0.0  # the line has carried them
    assert before.behind_s(1, 5_000 + 1000 * rate, 100.5, LIMITS) == LIMITS.line_s_max
    assert before.behind_s(2, 1000 * rate, 100.5, LIMITS) == 0.0  # a connection that is new to the watch
    assert before.behind_s(2, 1002 * rate, 101.0, LIMITS) == 1.0


class Silent:
    """A channel on which nothing comes and goes."""

    unsent_bytes = sent_bytes = 0
    heard_at = 0.0


class Answers:
    """Steps of which so many more are answered with each look."""

    def __init__(self, more):
        self._more, self._answered = more, 0

    @property
    def answered(self):
        self._answered += self._more
        return self._answered


@pytest.mark.parametrize(("more", "lost"), [(0, ["silent"]), (1, [])])
async def test_silent_hop_of_a_route_that_answers_steps_has_not_failed(more, lost):
    async def inquire(_):
        await asyncio.sleep(60)

    channel = Silent()
    leg = SimpleNamespace(channel=channel, has_failed=False, is_open=True, inquire=inquire, broken=lambda _: "silent")
    layout, reported = SimpleNamespace(epoch=1, legs=[leg], has=lambda _: True), []
    circuit = SimpleNamespace(session="0" * 32, layout=layout, lose=lambda *_: None, report=reported.append)
    watcher = Watcher(circuit, Answers(more), WatchLimits(answer_s=(0.01, 0.01, 0.01)))
    assert await watcher._ask(leg) is None
    assert reported == lost
