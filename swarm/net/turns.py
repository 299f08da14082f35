"""When connections may begin to shake hands: the turns of a listener, as a decision and with the timer that serves it.

A handshake costs milliseconds of computing before its peer has proven anything, so turns are few. The source that has
had the fewest recently comes first: a crowd that connects without pause delays no quiet source, however many wait.
"""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.net.limits import HandshakeLimits
from swarm.net.rate import TokenBucket

Newcomer = TypeVar("Newcomer", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one that waits. used: the share of its source's turns that others of it had before. ready_at: by its rate."""

    used: float
    ready_at: float


class Turns(Generic[Newcomer]):
    """A token bucket for each source, one for all, and the connections that wait for theirs."""

    def __init__(self, limits: HandshakeLimits) -> None:
        self._limits = limits
        self._all = TokenBucket(limits.all_per_s, limits.all_burst)
        self._sources: dict[str, TokenBucket] = {}
        self._waiting: dict[Newcomer, _Place] = {}  # the longest first

    def ask(self, newcomer: Newcomer, source: str, now: float) -> bool:
        """Let a connection wait for its turn. Returns False if that takes too long, and then no turn is used up."""
        bucket, limits = self._of(source, now), self._limits
        if bucket is None:
            return False
        used = bucket.used(now)
        before = sum(place.used <= used for place in self._waiting.values())
        own_s, all_s = bucket.owe(now), self._all.wait_s(now) + before / limits.all_per_s
        if max(own_s, all_s) >= limits.turn_wait_s:
            bucket.give(1.0)
            return False
        self._waiting[newcomer] = _Place(used, now + own_s)
        return True

    def take(self, now: float) -> Newcomer | None:
        """Return the connection whose turn has come; None if there is none."""
        ready = (one for one, place in self._waiting.items() if place.ready_at <= now)
        first = min(ready, key=lambda one: self._waiting[one].used, default=None)
        if first is None or self._all.take(now) > 0:
            return None
        del self._waiting[first]
        return first

    def next_s(self, now: float) -> float | None:
        """Return the seconds until the next turn; None if no connection waits for one."""
        if not self._waiting:
            return None
        return max(self._all.wait_s(now), min(place.ready_at for place in self._waiting.values()) - now)

    def leave(self, newcomer: Newcomer) -> None:
        """A connection waits no more."""
        self._waiting.pop(newcomer, None)

    def _of(self, source: str, now: float) -> TokenBucket | None:
        limits = self._limits
        if source not in self._sources:
            if len(self._sources) >= limits.sources_max:
                self._sources = {name: bucket for name, bucket in self._sources.items() if not bucket.is_full(now)}
            if len(self._sources) >= limits.sources_max:
                return None
            self._sources[source] = TokenBucket(limits.per_s, limits.burst)
        return self._sources[source]


class TurnQueue:
    """The turns, with the timer that gives them. Lives in the event loop."""

    def __init__(self, limits: HandshakeLimits) -> None:
        self._limits = limits
        self._turns: Turns[asyncio.Future[None]] = Turns(limits)
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, source: str) -> bool:
        """Wait for the turn of a connection from this source. Returns whether it has come in time."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._turns.ask(turn, source, loop.time()):
            return False
        self._serve()
        try:
            async with asyncio.timeout(self._limits.turn_wait_s):
                await turn
        except TimeoutError:
            return False
        finally:
            self._turns.leave(turn)
        return True

    def _serve(self) -> None:
        """Give all turns that are due, and look again when the next one is."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        now = loop.time()
        while (turn := self._turns.take(now)) is not None:
            if not turn.done():
                turn.set_result(None)
        wait_s = self._turns.next_s(now)
        self._timer = None if wait_s is None else loop.call_later(wait_s + 1e-3, self._serve)
