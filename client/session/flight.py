"""Steps that are put ahead of the answers before them, such as guesses of the next tokens.

A flight holds the session from its first step until nothing is in flight. Steps that are put meanwhile join it, and
leave at once. If a hop is about to leave the swarm, later steps wait for the next flight, and the session moves between
the two.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from swarm.client.session.chunks import Chunk
from swarm.client.session.moving import Mover
from swarm.client.session.travel import Travel
from swarm.client.session.watch import Watcher
from swarm.errors import SwarmError
from swarm.protocol.outbox import Ticket

Future = asyncio.Future[Tensor]


@dataclass(slots=True)
class _Ahead:
    """A step. restart: those before it of which it keeps no position were guessed wrong. ticket: once it is put."""

    chunk: Chunk
    restart: bool
    answer: Future
    deadline: float  # in the loop's time
    ticket: Ticket | None = None


class Flight:
    """The steps of one session that were put ahead, in order."""

    def __init__(
        self,
        lock: asyncio.Lock,
        travel: Travel,
        watcher: Watcher,
        mover: Mover,
        *,
        failed: Callable[[BaseException], BaseException],
        timeout_s: float,
    ) -> None:
        """lock: the session's. failed: ends the session, and returns the error that it ends with.

        timeout_s: the longest that a step may take.
        """
        self._lock = lock
        self._travel = travel
        self._watcher = watcher
        self._mover = mover
        self._failed = failed
        self._timeout_s = timeout_s
        self._ahead: deque[_Ahead] = deque()
        self._task: asyncio.Task[None] | None = None
        self._flies = False  # steps are sent as they are put
        self._loop = asyncio.get_running_loop()

    def put(self, chunk: Chunk, *, restart: bool) -> Future:
        """Send a step behind all others. restart: those in flight of which it keeps no position were guessed wrong."""
        step = _Ahead(chunk, restart, self._loop.create_future(), self._loop.time() + self._timeout_s)
        step.answer.add_done_callback(_seen)
        if self._flies and not self._mover.is_asked and (not self._ahead or self._ahead[-1].ticket is not None):
            self._send(step)
        elif self._task is None:
            self._task = self._loop.create_task(self._fly())
        self._ahead.append(step)
        return step.answer

    def _send(self, step: _Ahead) -> None:
        if step.restart:
            self._travel.steps.forget_guesses(step.chunk.keep)
        step.ticket = self._travel.steps.put(step.chunk, step.deadline, skips=step.restart)

    async def _fly(self) -> None:
        """Collect the answers, in order, until no step is left."""
        try:
            while self._ahead:
                async with asyncio.timeout_at(self._ahead[0].deadline):
                    await self._lock.acquire()
                try:
                    await self._fly_once()
                finally:
                    self._lock.release()
                self._mover.rest()
                await asyncio.sleep(0)  # a session that is to move does so now
        except (Exception, asyncio.CancelledError) as raised:
            error = self._failed(raised)
            for step in self._ahead:
                if not step.answer.done():
                    step.answer.set_exception(error)
            self._ahead.clear()
            if not isinstance(raised, TimeoutError | SwarmError):
                raise  # it is nobody's answer alone
        finally:
            self._task = None

    async def _fly_once(self) -> None:
        try:
            self._travel.steps.resend()  # the route may be another than the last step's
            for step in self._ahead:
                self._send(step)
            self._flies = True
            alone = True  # nothing was in flight before the first step
            while self._ahead and (ticket := self._ahead[0].ticket) is not None:
                with self._watcher:
                    async with asyncio.timeout_at(self._ahead[0].deadline):
                        await self._collect(self._ahead[0], ticket, alone=alone)
                self._ahead.popleft()
                alone = False
        finally:
            self._flies = False
            self._travel.steps.clear()

    async def _collect(self, step: _Ahead, ticket: Ticket, *, alone: bool) -> None:
        began, repairs = self._loop.time(), self._travel.restorer.repairs
        outputs = await self._travel.collect(ticket, step.deadline)
        if repairs == self._travel.restorer.repairs:
            took_s = self._loop.time() - began
            if alone and ticket.activations.tokens == 1:
                self._watcher.observe(took_s)
            else:
                self._watcher.patience.observe(took_s)
        if not step.answer.done():
            step.answer.set_result(outputs[0] if outputs else step.chunk.activations.hidden[:, :0])


def _seen(answer: Future) -> None:
    """A wrong guess's error is nobody's: do not warn of it."""
    if not answer.cancelled():
        answer.exception()
