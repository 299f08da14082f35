"""A session's steps under way: sent in order, kept whole until they are answered, sent again where that may help."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from swarm.activations import Activations
from swarm.client.session.leg import fail
from swarm.protocol.messages import Step

WINDOW_MAX = 64  # what a hop can ask for


@dataclass(slots=True)
class Flight:
    """A step on its way."""

    message: Step
    activations: Activations
    answer: asyncio.Future[Tensor | None]
    sent: bool = False  # since it was last to be sent again


class Flights:
    """All of one session. As many are under way as the hops had room for lately.

    After a hop had none one is sent until it is answered, and twice as many with every answer: as TCP does.
    """

    def __init__(self, transmit: Callable[[Flight], None]) -> None:
        """transmit: sends one on the route, or fails its answer."""
        self._transmit = transmit
        self._flights: dict[int, Flight] = {}
        self._at_once = WINDOW_MAX

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, step: int) -> Flight | None:
        """Return a step that has been begun and not been taken off."""
        return self._flights.get(step)

    def unanswered(self) -> list[int]:
        """The steps that are waited for."""
        return [step for step, flight in self._flights.items() if not flight.answer.done()]

    def begin(self, message: Step, activations: Activations) -> Flight:
        """Send a step, as soon as there is room for it."""
        flight = Flight(message, activations, asyncio.get_running_loop().create_future())
        self._flights[message.step] = flight
        self._send_some()
        return flight

    def answer(self, flight: Flight, hidden: Tensor | None) -> None:
        """A step has been answered: there is room for more."""
        flight.answer.set_result(hidden)
        self._at_once = min(2 * self._at_once, WINDOW_MAX)
        self._send_some()

    def send_again(self, epoch: int) -> None:
        """Send what has not been answered, in order."""
        for flight in self._in_order():
            if flight.answer.done():
                if flight.answer.exception() is None:
                    continue
                flight.answer = asyncio.get_running_loop().create_future()
            if flight.message.epoch != epoch:
                flight.message = flight.message.model_copy(update={"epoch": epoch})
            flight.sent = False
        self._send_some()

    def slow_down(self) -> None:
        """A hop had no room: only one is to be sent, and the others as it is answered."""
        self._at_once = 1

    def fail(self, error: Exception) -> None:
        """What is under way will not be answered."""
        for flight in self._flights.values():
            fail(flight.answer, error)

    def take_off(self, flight: Flight) -> None:
        """Forget a step, whose answer has been taken."""
        self._flights.pop(flight.message.step, None)

    def clear(self) -> None:
        """Forget all."""
        self._flights.clear()

    def _in_order(self) -> list[Flight]:
        return [self._flights[step] for step in sorted(self._flights)]

    def _send_some(self) -> None:
        under_way = 0
        for flight in self._in_order():
            if flight.answer.done():
                if flight.answer.exception() is not None:
                    return  # what follows it would be out of order
                continue
            under_way += 1
            if under_way > self._at_once:
                return
            if not flight.sent:
                flight.sent = True
                self._transmit(flight)
