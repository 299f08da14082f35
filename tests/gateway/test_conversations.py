"""Idle sessions: found by what they have in common with a prompt, closed when they are too much."""

from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import SessionClosed
from swarm.gateway.conversations import ConversationLimits, Conversations, Kept, common_prefix

IDS = st.lists(st.integers(0, 2), max_size=12)


class Idle:
    """A session that can be closed."""

    def __init__(self) -> None:
        self.closed, self.error = False, None

    async def close(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def conversations(clock: Clock | None = None, *, rolls_back: bool = True, **limits: float) -> Conversations:
    given = ConversationLimits(**{"shared_min": 1, **limits})
    return Conversations(given, rolls_back=rolls_back, now=clock or Clock())


def kept(ids, owner="", conversation=None) -> Kept:
    return Kept(Idle(), list(ids), owner, conversation)


@given(IDS, IDS)
def test_common_prefix_is_the_longest(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


async def test_longest_prefix_is_taken_and_one_token_is_left_to_compute():
    idle = conversations()
    short, long = kept([1, 2]), kept([1, 2, 3, 4])
    await idle.put(short)
    await idle.put(long)
    match = idle.take([1, 2, 3, 4], "", None)
    assert (match.kept, match.keep) == (long, 3)
    match = idle.take([1, 2, 3, 4], "", None)
    assert (match.kept, match.keep) == (short, 2)
    assert idle.take([1, 2, 3, 4], "", None) is None
    for each in (long, short):  # whichever is idle for longer
        await idle.put(each)
    assert idle.take([1, 2, 3, 4], "", None).kept is long


async def test_failed_session_is_closed_and_not_continued():
    idle = conversations()
    failed, other = kept([1, 2, 3]), kept([1, 2])
    await idle.put(failed)
    await idle.put(other)
    failed.session.error = SessionClosed("a step has failed")
    await idle.close_old()
    assert failed.session.closed
    assert not other.session.closed
    assert idle.take([1, 2, 3, 4], "", None).kept is other


async def test_conversation_breaks_ties():
    idle = conversations()
    await idle.put(kept([1, 2], conversation="a"))
    await idle.put(kept([1, 2], conversation="b"))
    assert idle.take([1, 2, 3], "", "b").kept.conversation == "b"


async def test_among_equals_the_least_is_thrown_away():
    for ours in ([1, 2, 9], [1, 2, 9, 9]), ([1, 2, 9, 9], [1, 2, 9]):
        idle = conversations()
        for ids in ours:
            await idle.put(kept(ids, conversation="a" if len(ids) == 3 else None))
        assert idle.take([1, 2, 3], "", None).kept.ids == [1, 2, 9]


async def test_session_is_never_continued_for_another_owner():
    idle = conversations()
    await idle.put(kept([1, 2, 3], owner="ada"))
    assert idle.take([1, 2, 3, 4], "bob", None) is None
    assert idle.take([1, 2, 3, 4], "ada", None) is not None


async def test_state_that_cannot_go_back_matches_exact_continuations_alone():
    idle = conversations(rolls_back=False)
    await idle.put(kept([1, 2, 3]))
    assert idle.take([1, 2, 4], "", None) is None
    assert idle.take([1, 2, 3], "", None) is None  # one token would have to be taken back
    assert idle.take([1, 2, 3, 4], "", None).keep == 3


async def test_short_prefix_is_not_worth_a_rollback():
    idle = conversations(shared_min=3)
    await idle.put(kept([1, 2, 9, 9]))
    assert idle.take([1, 2, 3, 4], "", None) is None
    await idle.put(kept([1, 2, 3, 9]))
    assert idle.take([1, 2, 3, 4], "", None).keep == 3


async def test_oldest_gives_way_to_the_token_budget():
    idle = conversations(tokens_max=6)
    old, middle, new = kept([1, 2, 3]), kept([4, 5, 6]), kept([7])
    await idle.put(old)
    await idle.put(middle)
    assert not old.session.closed
    await idle.put(new)
    assert old.session.closed
    assert (len(idle), idle.tokens) == (2, 4)


async def test_oldest_gives_way_to_more_than_the_most_sessions():
    idle = conversations(sessions_max=2)
    old, middle, new = (kept([number]) for number in range(3))
    await idle.put(old)
    await idle.put(middle)
    assert not old.session.closed
    await idle.put(new)
    assert old.session.closed
    assert len(idle) == 2


async def test_session_that_no_turn_continues_is_closed():
    clock = Clock()
    idle = conversations(clock, idle_s=10.0)
    old = kept([1])
    await idle.put(old)
    clock.now += 9.0
    await idle.close_old()
    assert not old.session.closed
    clock.now += 1.0
    await idle.close_old()
    assert old.session.closed
    assert not len(idle)


async def test_none_is_kept_where_none_is_to_be():
    """A loop's clock may stand still between an answer's end and the next request."""
    idle = conversations(idle_s=0.0)
    old = kept([1, 2, 3])
    await idle.put(old)
    assert old.session.closed
    assert idle.take([1, 2, 3, 4], "", None) is None


async def test_close_ends_all():
    idle = conversations()
    both = kept([1]), kept([2])
    for each in both:
        await idle.put(each)
    await idle.close()
    assert all(each.session.closed for each in both)
