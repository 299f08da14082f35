"""Ways that are tried side by side: the first that works wins, and nothing of the others stays."""

import asyncio
from functools import partial

import pytest

from swarm.errors import NetworkError, Unreachable
from swarm.net.race import race

NEVER = 100.0


class Ways:
    """Ways that begin, work after a while or fail; and what was discarded."""

    def __init__(self):
        self.begun, self.discarded, self.cancelled = [], [], []

    async def way(self, name, after_s, fails=False):
        self.begun.append(name)
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if fails:
            raise Unreachable(name, (), 0.0, f"{name} fails")
        return name

    async def race(self, *ways):
        return await race([(delay, partial(self.way, *way)) for delay, *way in ways], self.discarded.append)


@pytest.fixture
def ways():
    return Ways()


async def test_a_quick_first_way_is_the_only_one(ways):
    assert await ways.race((NEVER, "a", 0.0), (0.1, "b", 0.0)) == "a"
    assert ways.begun == ["a"]


async def test_the_next_way_begins_beside_a_slow_one(ways):
    assert await ways.race((NEVER, "slow", NEVER), (0.02, "quick", 0.0)) == "quick"
    assert (ways.begun, ways.cancelled) == (["slow", "quick"], ["slow"])


async def test_the_next_way_begins_at_once_after_a_failure(ways):
    assert await ways.race((NEVER, "a", 0.0, True), (NEVER, "b", 0.0)) == "b"


async def test_a_slow_way_may_win_when_the_later_ones_fail(ways):
    assert await ways.race((NEVER, "slow", 0.1), (0.01, "b", 0.0, True), (NEVER, "c", 0.0, True)) == "slow"


async def test_the_last_failure_is_told(ways):
    with pytest.raises(NetworkError, match="b fails"):
        await ways.race((NEVER, "a", 0.0, True), (0.01, "b", 0.0, True))


async def test_other_errors_end_the_race(ways):
    async def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await race([(NEVER, broken), (NEVER, partial(ways.way, "b", 0.0))], ways.discarded.append)


async def test_two_results_of_one_moment_are_one_too_many(ways):
    gate = asyncio.Event()

    async def held(name):
        await gate.wait()
        return name

    task = asyncio.create_task(race([(NEVER, partial(held, "a")), (0.0, partial(held, "b"))], ways.discarded.append))
    await asyncio.sleep(0.05)
    gate.set()
    assert (await task, ways.discarded) == ("a", ["b"])  # the earlier way is the better one


async def test_a_caller_that_leaves_takes_all_ways_along(ways):
    task = asyncio.create_task(ways.race((NEVER, "a", NEVER), (0.0, "b", NEVER)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ways.cancelled) == ["a", "b"]


@pytest.mark.parametrize("late", [True, False])
async def test_a_caller_that_leaves_while_the_losers_end_discards_all_results(ways, late):
    ending, gate = asyncio.Event(), asyncio.Event()

    async def lingering():
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            ending.set()
            await gate.wait()
            if not late:
                raise
        return "late"

    won = partial(ways.way, "won", 0.05)
    task = asyncio.create_task(race([(NEVER, lingering), (0.0, won)], ways.discarded.append))
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await asyncio.sleep(0.05)
    assert ways.discarded == ["won", "late"][: 1 + late]
