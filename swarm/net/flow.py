"""Flow control that all channels of one side share: read budgets, and the bound on bytes held for slow peers."""

import asyncio
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from swarm.net.buffers import Buffers
from swarm.net.gate import Allowance
from swarm.net.limits import ChannelLimits
from swarm.net.rate import FairQueue, TokenBucket


class Debtor(Hashable, Protocol):
    """A payer that queues: a read gate, or one side of a relayed pair."""

    def paid(self, shared: Any) -> None:  # noqa: ANN401 - the budget, as the payer knows it
        """Take note that its debt is paid."""


class SharedBudget(FairQueue[Debtor]):
    """A fair queue with the timer that serves it. Lives in the event loop."""

    __slots__ = ("_timer",)

    def __init__(self, per_s: float, burst: float) -> None:
        super().__init__(per_s, burst)
        self._timer: asyncio.TimerHandle | None = None

    def pay(self, payer: Debtor, amount: float, now: float) -> bool:
        """Pay at once, or queue the debt, and tell the payer when it is paid. Returns whether it is paid."""
        if super().pay(payer, amount, now):
            return True
        if self._timer is None:
            self._arm(now)
        return False

    def _arm(self, now: float) -> None:
        wait_s = self.next_s(now)
        self._timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s + 1e-3, self._serve)

    def _serve(self) -> None:
        now = asyncio.get_running_loop().time()
        paid = self.settle(now)
        self._arm(now)
        if paid is not None:
            paid.paid(self)


class FlowControl:
    """The budgets, buffers and allowances of one side's channels. Not for two event loops."""

    def __init__(self, limits: ChannelLimits | None = None) -> None:
        self.limits = limits = limits or ChannelLimits()
        frames, reading, keepalives = limits.frames, limits.reading, limits.keepalives
        self.buffers = Buffers(frames.held_bytes_max, frames.held_bytes_small)
        self.idle = SharedBudget(reading.all_idle_per_s, reading.all_idle_burst)
        self.read = SharedBudget(reading.all_bytes_per_s, reading.all_bytes_burst)
        self.keepalives = TokenBucket(keepalives.all_per_s, keepalives.all_burst)
        self._allowances: WeakValueDictionary[str, Allowance] = WeakValueDictionary()
        self._granted: dict[str, Allowance] = {}

    def grant(self, peer: str, idle_per_s: float, idle_burst: float) -> None:
        """Let a known peer send so many messages that move no session forward, from its next channel on."""
        reading = replace(self.limits.reading, idle_per_s=idle_per_s, idle_burst=idle_burst)
        self._granted[peer] = Allowance(replace(self.limits, reading=reading))

    def allowance(self, peer: str, otherwise: Allowance) -> Allowance:
        """Return the allowance of a proven peer's channels; `otherwise`, if it has no other channel."""
        return self._granted.get(peer) or self._allowances.setdefault(peer, otherwise)
