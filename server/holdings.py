"""A session's share of its server's memory. Nothing else touches the pools.

    lease     unit     taken                           given back
    cache     tokens   when a step is accepted         after a rollback was computed; at the end
    inputs    bytes    when a step is accepted         when its task has come back
    outputs   bytes    when an answer is kept          when it is evicted; at a reset; at the end
    journal   bytes    when an output is noted,        when the journal is dropped and no replay uses it; at the end
                       or a receipt's tally grows
    window    bytes    with the first piece of a past  when the past is whole; when hardly any of it comes; at a reroute

Cache and inputs stay charged until the compute thread has no work of the session any more, even after its end: the
memory is not free before.
"""

from dataclasses import dataclass

from swarm.protocol.messages import Open
from swarm.server.limits import MemoryLimits
from swarm.server.pool import Pool, Prices
from swarm.server.refusals import Declined


@dataclass(frozen=True, slots=True)
class Memory:
    """One server's pools. cache: tokens, at the cost of `prices`; the others are bytes of host memory."""

    cache: Pool
    prices: Prices
    inputs: Pool
    windows: Pool
    outputs: Pool
    journals: Pool
    limits: MemoryLimits

    @classmethod
    def of(
        cls,
        cache: Pool,
        *,
        prices: Prices | None = None,
        journal_bytes: int = 1 << 30,
        limits: MemoryLimits | None = None,
    ) -> "Memory":
        """Make the pools of a server. prices: None charges a token for each position of each row."""
        limits = limits or MemoryLimits()
        inputs, windows, outputs = limits.input_bytes_max, limits.window_bytes_max, limits.output_bytes_max
        return cls(cache, prices or Prices(), Pool(inputs), Pool(windows), Pool(outputs), Pool(journal_bytes), limits)

    @property
    def used(self) -> int:
        """The sum over all sessions and units: 0 if no session is left."""
        return sum(pool.used for pool in (self.cache, self.inputs, self.windows, self.outputs, self.journals))


class Holdings:
    """One session's leases."""

    def __init__(self, memory: Memory, request: Open, owner: str, retry_after_s: float) -> None:
        """owner: the peer whose share they count against."""
        self.expected = memory.prices.tokens(request.batch, request.positions_soon, request.rollback_max)
        self._memory = memory
        self._rollback_max = request.rollback_max
        self._retry_after_s = retry_after_s
        self._cache, self._inputs = memory.cache.lease(owner), memory.inputs.lease(owner)
        self._outputs, self._journal = memory.outputs.lease(owner), memory.journals.lease(owner)
        self._window = memory.windows.lease(owner)
        self._window_used = 0  # bytes that came of a past since `review_window` was last called
        self._due = 0  # cache tokens for the past as it is when all accepted work is computed
        self._tasks = 0  # that the compute thread has, those included that count no more

    @property
    def is_computing(self) -> bool:
        """Whether the compute thread has tasks of it."""
        return self._tasks > 0

    @property
    def cache_tokens(self) -> int:
        """Cache that it holds."""
        return self._cache.amount

    @property
    def still_expected(self) -> int:
        """Cache tokens that it was opened for and does not hold yet."""
        return max(0, self.expected - self._cache.amount)

    def step(self, rows: int, positions: int, n_bytes: int) -> Declined | None:
        """Take the memory of one task: cache for so many positions in all, and its input.

        Returns why not if there is no room, and then nothing has changed.
        """
        cache, inputs = self._cache, self._inputs
        if not inputs.resize(inputs.amount + n_bytes):
            return Declined("busy", "too much waits to be computed", self._retry_after_s)
        tokens = self._memory.prices.tokens(rows, positions, self._rollback_max)
        # A rollback's cache is free only when it has been computed, so the lease does not shrink here.
        if tokens > cache.amount and not cache.resize(tokens):
            inputs.resize(inputs.amount - n_bytes)
            return self._no_room(tokens - cache.amount)
        self._due = tokens
        self._tasks += 1
        return None

    def begin(self, positions: int) -> bool:
        """Take the cache of so many positions of one row, which the session begins with. Returns whether it fits."""
        tokens = self._memory.prices.tokens(1, positions, self._rollback_max)
        if not self._cache.resize(tokens):
            return False
        self._due = tokens
        return True

    def came_back(self, n_bytes: int, *, settled: bool) -> None:
        """Give back a task's input. settled: with nothing under way, the past takes as much cache as was last asked."""
        self._tasks -= 1
        self._inputs.resize(self._inputs.amount - n_bytes)
        if settled and not self._tasks and self._cache.amount != self._due:
            self._cache.resize(self._due)

    def answers(self, n_bytes: int) -> bool:
        """Hold so much for answers that are kept. Returns False where there is no room; for none there always is."""
        return n_bytes == self._outputs.amount or self._outputs.resize(n_bytes)

    @property
    def journal_bytes(self) -> int:
        """Bytes that it holds for journal, replay and tally."""
        return self._journal.amount

    def journal(self, n_bytes: int) -> bool:
        """Hold so much for journal, replay and tally. Returns False where there is no room; less always fits."""
        return self._journal.resize(n_bytes)

    def past(self, n_bytes: int, reserve_bytes: int | None) -> Declined | None:
        """Count a piece of a past that comes. reserve_bytes: take room for so much of it, with its first piece.

        Without a reserve, many pasts would each come in part, and be refused in the end for want of room.
        """
        if reserve_bytes is not None and not self._window.resize(reserve_bytes):
            return Declined("busy", "too many pasts are being rebuilt", self._retry_after_s)
        self._window_used += n_bytes
        return None

    def end_window(self) -> None:
        """Give back the room for a past: the past is whole, or nothing more comes of it."""
        self._window.resize(0)

    def review_window(self) -> None:
        """Give back the room for a past of which hardly anything has come since this was last called."""
        if self._window_used < self._memory.limits.window_use_bytes_min:
            self.end_window()
        self._window_used = 0

    def end(self) -> None:
        """Give back all but the memory that the compute thread still has, which `came_back` will."""
        self.end_window()
        self._outputs.resize(0)
        self._journal.resize(0)
        self._due = 0
        if not self._tasks:
            self._cache.resize(0)

    def _no_room(self, needed: int) -> Declined:
        cache = self._cache
        why = f"{needed} more tokens do not fit, {cache.room} are there for you"
        fits_ever = cache.amount + needed <= cache.pool.most
        return Declined("no_room", why, self._retry_after_s if fits_ever else None)
