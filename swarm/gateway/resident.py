"""Models in memory: how many may be there, which one leaves, and that none leaves under a generation."""

from collections.abc import AsyncGenerator, Sequence
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
    running: int  # generations


Each = TypeVar("Each", bound=Held)


def leaving(held: Sequence[Each], needed: int, bytes_max: int) -> list[Each] | None:
    """Return the models that leave so that `needed` more bytes fit: those that were used longest ago.

    None if it does not fit, because generations run with the others.
    """
    total = sum(each.n_bytes for each in held) + needed
    gone: list[Each] = []
    for each in sorted((each for each in held if not each.running), key=lambda each: each.used):
        if total <= bytes_max:
            break
        gone.append(each)
        total -= each.n_bytes
    return gone if total <= bytes_max else None


@dataclass(slots=True, eq=False)
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
            self.running -= 1
            await self._end_if_unused()

    async def retire(self) -> None:
        """End sessions and membership as soon as no generation runs."""
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
