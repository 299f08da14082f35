"""A hop's end of a stream of steps, rule by rule."""

import pytest

from swarm.protocol.inbox import Again, Busy, Early, Excuses, Forgotten, Full, Inbox, Late, New
from tests.protocol.test_stream import LIMITS, ROOM, WINDOW


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
