"""A full crowd of connections belongs to no host."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.net.crowd import Crowd


async def test_the_oldest_of_the_largest_part_ends():
    crowd, ended = Crowd(), []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    for number in range(6):
        crowd.add(waits(f"flood {number}"), "flood", 6)
        await asyncio.sleep(0)
    for number in range(3):
        crowd.add(waits(f"quiet {number}"), f"quiet {number}", 6)
        await asyncio.sleep(0.01)
    assert ended == ["flood 0", "flood 1", "flood 2"]
    crowd.add(waits("flood 6"), "flood", 6)
    await asyncio.sleep(0.01)
    assert ended[3:] == ["flood 3"]
    assert len(crowd) == 6
    for task in crowd:
        task.cancel()
    await asyncio.sleep(0.01)
    assert len(crowd) == 0


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_no_source_ends_while_another_has_more(sources):
    async def play() -> None:
        crowd, ended = Crowd(), []
        there: Counter[str] = Counter()

        async def waits(source: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(source)

        for source in sources:
            there[source] += 1
            crowd.add(waits(source), source, 5)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for other in ended:
                assert there[other] == max(there.values())
                there[other] -= 1
            ended.clear()
            assert len(crowd) == min(5, sum(there.values()))
        for task in crowd:
            task.cancel()
        await asyncio.sleep(0)

    asyncio.run(play())
