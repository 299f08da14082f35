"""How long a node that joins waits for its initial peers: not for a dead one when another has answered.

Neither hivemind nor libp2p.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

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


async def arrived(calls: Iterable[asyncio.Task[Greeting]], limits: ArrivalLimits) -> list[Greeting]:
    """Wait for calls on initial peers, and return what has come when no more is waited for.

    Calls that are late go on: their owner ends them.
    """
    clock, under_way = asyncio.get_running_loop().time, set(calls)
    began, until = clock(), math.inf
    greetings: list[Greeting] = []
    while under_way and clock() < until:
        timeout_s = until - clock() if until < math.inf else None
        done, under_way = await asyncio.wait(under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
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
