"""Models in memory: how many may be there, which one leaves, and that none leaves under a generation."""

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from swarm.gateway.answering import Model
from swarm.gateway.engine import Engine
from swarm.gateway.generation import Emitted, Generation


class Held(Protocol):
    """The facts of a model that decide whether it leaves."""

    n_bytes: int
    used: float  # when a request last asked for it
    running: int  # requests and generations


Each = TypeVar("Each", bound=Held)


def leaving(held: Sequence[Each], needed: int, bytes_max: int, staying: Collection[Each] = ()) -> list[Each] | None:
    """Return the models that leave so that `needed` more bytes fit: those that were used longest ago.

    staying: models that do not leave, since requests wait for them. None if it does not fit, because the others answer
    requests.
    """
    total = sum(each.n_bytes for each in held) + needed
    gone: list[Each] = []
    idle = (each for each in held if not each.running and each not in staying)
    for each in sorted(idle, key=lambda each: each.used):
        if total <= bytes_max:
            break
        gone.append(each)
        total -= each.n_bytes
    return gone if total <= bytes_max else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Resident:
    """A model whose embeddings and head are in memory. entered: its membership."""

    engine: Engine
    entered: AsyncExitStack
    n_bytes: int
    used: float
    running: int = 0
    is_retired: bool = False

    @property
    def positions_max(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.positions_max

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        return self.engine.vocabulary

    async def generate(self, generation: Generation) -> AsyncGenerator[Emitted, bool | None]:
        """Generate as the engine does. A model that has to leave waits for the end."""
        self.running += 1
        try:
            async with aclosing(self.engine.generate(generation)) as emitted:
                enough: bool | None = None
                try:
                    while True:
                        enough = yield await emitted.asend(enough)
                except StopAsyncIteration:
                    return
        finally:
            await self.release()

    async def release(self) -> None:
        """Tell that a request or a generation is over. One of them is the last one of a model that has to leave."""
        self.running -= 1
        await self._end_if_unused()

    async def retire(self) -> None:
        """End sessions and membership as soon as no request is answered."""
        self.is_retired = True
        await self._end_if_unused()

    async def end(self) -> None:
        """End sessions and membership now."""
        await self.engine.close()
        await self.entered.aclose()

    async def _end_if_unused(self) -> None:
        if self.is_retired and not self.running:
            await self.end()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model with the part of it that takes memory."""

    model: Model
    resident: Resident
