"""Steps on their way around the route: each is awaited in order, and the route is repaired until it has answered."""

import asyncio
from collections.abc import Iterator

from torch import Tensor

from swarm.client.session.chunks import Chunk
from swarm.client.session.circuit import Circuit, Shared
from swarm.client.session.recovery import Fail, MoveAway, RefusedStep, Renew, Wait, after_refusal
from swarm.client.session.restore import Restorer
from swarm.client.session.steps import Steps
from swarm.errors import EdgeDown, HopFailed, Refused
from swarm.protocol.outbox import Ticket


class Travel:
    """One session's way around the route, with its repairs."""

    def __init__(self, circuit: Circuit, shared: Shared, steps: Steps, restorer: Restorer) -> None:
        self.steps = steps
        self.restorer = restorer
        self._circuit = circuit
        self._limits = shared.limits.recovery
        self._loop = asyncio.get_running_loop()
        self._begun: tuple[Iterator[Chunk], list[Ticket]] | None = None  # a step that has left before its call

    def send_ahead(self, chunks: Iterator[Chunk], deadline: float) -> None:
        """Send the first chunk of the session's first step, whose hops have not answered their Opens yet."""
        self._begun = chunks, [self.steps.put(next(chunks), deadline)]
        self.steps.send_ahead()

    def begun(self) -> tuple[Iterator[Chunk], list[Ticket]] | None:
        """Return, once, the other chunks of a step that was sent ahead, and the tickets of those that left."""
        begun, self._begun = self._begun, None
        return begun

    async def begin(self, deadline: float) -> None:
        """Have a route that stands. Raises what the session ends with."""
        await self.restorer.restore(deadline)
        self.steps.resend()

    async def collect(self, ticket: Ticket, deadline: float) -> list[Tensor]:
        """Return one step's output, if any is wanted, and repair the route as needed until it is there."""
        began = self._loop.time()
        refused_step: RefusedStep | None = None
        while True:
            if self._circuit.standing is None and ticket.outcome is None:
                await self.begin(deadline)  # a fault between two steps has failed neither
            try:
                output = await self.steps.outcome(ticket)
            except Refused as refused:
                refused_step = refused_step or RefusedStep(self.restorer.patience(began, deadline))
                refused_step = await self._after_refusal(refused_step, refused, deadline)
            except (HopFailed, EdgeDown):
                pass
            else:
                return [] if output is None else [output]
            await self.begin(deadline)

    async def _after_refusal(self, step: RefusedStep, refused: Refused, deadline: float) -> RefusedStep:
        """Act on a refused step until it may be sent again. Raises the refusal if it may not."""
        process = self._circuit.layout.process_of(refused.peer)
        while True:
            action = after_refusal(step, refused, process, self._loop.time(), self._limits)
            match action:
                case Fail(error):
                    raise error
                case Renew():
                    self._circuit.renew()
                case Wait():
                    await self.restorer.wait(action)
                case MoveAway(processes):
                    if not await self.restorer.replace(processes, deadline):
                        step = step.stays_alone()
                        continue
            return step.done(action, refused)
