"""Decides which requests run, which wait, and which are refused.

`Admission` is pure: times are passed in, in seconds, and nothing is awaited. `Slots` is the thin part that waits.

    ask -> a ticket that runs | a ticket that waits | Refusal
    end -> the tickets whose turn has come

A tenant's turn comes when it has fewest requests running; among equals, the tenant that had its last turn longest ago.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from swarm.gateway.api.problems import Problem, Rejected
from swarm.limits import limit
from swarm.net.rate import TokenBucket


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many requests run and wait."""

    running_max: int = limit(48, "requests", "of all tenants; more wait, because a server gives one peer 60 sessions")
    waiting_max: int = limit(256, "requests", "of all tenants together; more are answered with 429")
    tenant_waiting_max: int = limit(128, "requests", "of one tenant; more are answered with 429")
    wait_s: float = limit(60.0, "s", "a request that has waited for longer is answered with 429")
    retry_s: float = limit(5.0, "s", "a client is told to try again after this, where the queue was full")


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """How many sequences are generated at one time. A request may ask for many."""

    running_max: int = limit(48, "sequences", "of all requests; more wait, because a server gives one peer 60 sessions")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """One tenant's own limits; None where it has none."""

    running_max: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request does not even wait, and when it is worth trying again."""

    cause: Literal["requests", "tokens", "queue"]
    why: str
    retry_after_s: float

    def problem(self) -> Problem:
        """Return it as an HTTP client is told."""
        return Problem(429, "rate_limit", self.why, "rate_limit_exceeded", retry_after_s=self.retry_after_s)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that runs or waits."""

    tenant: str
    is_running: bool = False


@dataclass(slots=True, eq=False)
class _Tenant:
    limits: TenantLimits
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    running: int = 0
    waiting: list[Ticket] = field(default_factory=list)  # first come, first served
    turn: int = 0  # number of its last turn

    def adopt(self, limits: TenantLimits) -> None:
        """Take limits, which the file may have changed; a bucket whose rate is the same keeps its level."""
        before, self.limits = self.limits, limits
        if self.requests is None or before.requests_per_minute != limits.requests_per_minute:
            self.requests = _bucket(limits.requests_per_minute, lends=1.0)
        if self.tokens is None or before.tokens_per_minute != limits.tokens_per_minute:
            self.tokens = _bucket(limits.tokens_per_minute)

    @property
    def may_run(self) -> bool:
        return self.limits.running_max is None or self.running < self.limits.running_max

    def is_idle(self, now: float) -> bool:
        buckets = (bucket for bucket in (self.requests, self.tokens) if bucket is not None)
        return not self.running and not self.waiting and all(bucket.is_full(now) for bucket in buckets)


class Admission:
    """The requests of all tenants."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.running = self.waiting = 0
        self._tenants: dict[str, _Tenant] = {}
        self._turns = 0

    def ask(self, tenant: str, limits: TenantLimits, now: float) -> Ticket | Refusal:
        """Take a request in, to run or to wait, or refuse it. limits: the tenant's own."""
        self._forget_idle(now)
        state = self._tenants.setdefault(tenant, _Tenant(limits))
        state.adopt(limits)
        refusal = self._refusal(state, now)
        if refusal is not None:
            return refusal
        ticket = Ticket(tenant)
        state.waiting.append(ticket)
        self.waiting += 1
        self._start_all()
        return ticket

    def end(self, ticket: Ticket) -> list[Ticket]:
        """Take a request out, whether it ran or waited. Returns the tickets that run from now on."""
        state = self._tenants[ticket.tenant]
        if ticket.is_running:
            ticket.is_running = False
            state.running -= 1
            self.running -= 1
        elif ticket in state.waiting:
            state.waiting.remove(ticket)
            self.waiting -= 1
        return self._start_all()

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Charge tokens that were computed for a tenant. It may owe them: then its next requests are refused."""
        state = self._tenants.get(tenant)
        if state is not None and state.tokens is not None:
            state.tokens.owe(now, tokens)

    def _refusal(self, state: _Tenant, now: float) -> Refusal | None:
        limits = state.limits
        if state.tokens is not None and (wait_s := state.tokens.wait_s(now)) > 0:
            return Refusal("tokens", f"this key has {limits.tokens_per_minute} tokens a minute", wait_s)
        if not self._can_start(state):
            if len(state.waiting) >= self.limits.tenant_waiting_max:
                return Refusal("queue", f"{len(state.waiting)} requests of this key wait already", self.limits.retry_s)
            if self.waiting >= self.limits.waiting_max:
                return Refusal("queue", f"{self.waiting} requests wait already", self.limits.retry_s)
        if state.requests is not None and (wait_s := state.requests.take(now)) > 0:
            return Refusal("requests", f"this key has {limits.requests_per_minute} requests a minute", wait_s)
        return None

    def _can_start(self, state: _Tenant) -> bool:
        return self.running < self.limits.running_max and state.may_run and not state.waiting

    def _start_all(self) -> list[Ticket]:
        started = []
        while self.running < self.limits.running_max:
            ready = [state for state in self._tenants.values() if state.waiting and state.may_run]
            if not ready:
                break
            state = min(ready, key=lambda each: (each.running, each.turn))
            self._turns += 1
            state.turn = self._turns
            ticket = state.waiting.pop(0)
            ticket.is_running = True
            state.running += 1
            self.waiting -= 1
            self.running += 1
            started.append(ticket)
        return started

    def _forget_idle(self, now: float) -> None:
        """Forget tenants that have nothing here and owe nothing: keys come and go."""
        for name in [name for name, state in self._tenants.items() if state.is_idle(now)]:
            del self._tenants[name]


def _bucket(per_minute: int | None, lends: float = 0.0) -> TokenBucket | None:
    """Return a bucket of a minute's amount. lends: the part of it that is given beyond the level."""
    return None if per_minute is None else TokenBucket(per_minute / 60, per_minute - lends + 1e-6)


class Slots:
    """Holds requests back until their turn has come."""

    def __init__(self, limits: AdmissionLimits, now: Callable[[], float]) -> None:
        self.admission = Admission(limits)
        self._now = now
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def held(self, tenant: str, limits: TenantLimits) -> AsyncIterator[None]:
        """Hold one slot within the block. Raises Rejected with status 429."""
        asked = self.admission.ask(tenant, limits, self._now())
        if isinstance(asked, Refusal):
            raise Rejected(asked.problem())
        try:
            if not asked.is_running:
                await self._turn(asked)
            yield
        finally:
            for started in self.admission.end(asked):
                if (waiting := self._waiting.get(started)) is not None and not waiting.done():
                    waiting.set_result(None)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge tokens that were computed for a tenant."""
        self.admission.charge(tenant, tokens, self._now())

    async def _turn(self, ticket: Ticket) -> None:
        limits = self.admission.limits
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limits.wait_s if isfinite(limits.wait_s) else None):
                await turn
        except TimeoutError:
            why = f"the request waited {limits.wait_s:.0f} s for its turn"
            raise Rejected(Refusal("queue", why, limits.retry_s).problem()) from None
        finally:
            del self._waiting[ticket]
