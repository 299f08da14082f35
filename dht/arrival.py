"""How long a node that joins waits for its initial peers: not for a dead one when another has answered.

Neither hivemind nor libp2p.
"""

import asyncio
import math
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from swarm.dht.records import check_clock
from swarm.errors import ClockSkew, Unreachable
from swarm.limits import limit

Greeting: TypeAlias = float | Unreachable
"""The skew (s) of our clock against one initial peer that answered, or why it cannot be reached."""


@dataclass(frozen=True, slots=True)
class ArrivalLimits:
    """How long initial peers are waited for."""

    late_s: float = limit(
        0.25, "s", "or the first answer's time if longer: the other initial peers get it, then joining goes on"
    )


class Arrival:
    """Waits for calls on initial peers. Those that are late go on: a library's own call may not bear a cancellation."""

    def __init__(self, limits: ArrivalLimits = ArrivalLimits()) -> None:
        self._limits = limits
        self._calls: set[asyncio.Task[Greeting]] = set()

    async def greetings(self, calls: Iterable[Coroutine[Any, Any, Greeting]]) -> list[Greeting]:
        """Make calls side by side, and return what has come when no more is waited for.

        Raises ConnectionError if `close` ends them.
        """
        tasks = [asyncio.create_task(call) for call in calls]
        for task in tasks:
            self._calls.add(task)
            task.add_done_callback(self._ended)
        return await in_time(tasks, self._limits)

    async def close(self) -> None:
        """End the calls that are still under way."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    def _ended(self, call: asyncio.Task[Greeting]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # looked at: after a late call nobody waits for it


async def in_time(calls: Iterable[asyncio.Task[Greeting]], limits: ArrivalLimits) -> list[Greeting]:
    """Wait for calls, and return what has come when no more is waited for. Raises ConnectionError if they are ended."""
    clock, under_way = asyncio.get_running_loop().time, set(calls)
    began, until = clock(), math.inf
    greetings: list[Greeting] = []
    while under_way and clock() < until:
        timeout_s = until - clock() if until < math.inf else None
        done, under_way = await asyncio.wait(under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if any(call.cancelled() for call in done):  # a cancellation would end the caller's task in silence
            raise ConnectionError("the node has been closed meanwhile")
        greetings += [call.result() for call in done]
        if until == math.inf:
            until = clock() + patience_s(greetings, clock() - began, limits)
    return greetings


def patience_s(greetings: Iterable[Greeting], after_s: float, limits: ArrivalLimits) -> float:
    """Return how much longer the other initial peers are waited for; infinity for as long as they take.

    greetings: that have come `after_s` from the beginning. Only a peer whose clock agrees with ours lets a node go on:
    else another one may still show that our clock is right.
    """
    skews = [greeting for greeting in greetings if isinstance(greeting, float)]
    try:
        check_clock(skews)
    except ClockSkew:
        return math.inf
    return max(limits.late_s, after_s) if skews else math.inf
