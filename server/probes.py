"""Probes: short sessions with another server, of a few one-token steps. They show that it computes, and how fast.

    connect -> OPEN -> Opened -> Step, Step, ... all in flight -> Output, Output, ... -> CLOSE

The inputs are random, so the outputs are not compared with anything: they have the right shape and are finite. A server
that computes other numbers is found by its clients' audits (`swarm.client.auditing`).
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swarm.activations import Activations, NumericClass
from swarm.dht.records import Announcement
from swarm.errors import ChannelClosed, NetworkError
from swarm.limits import limit
from swarm.net.channel import Channel, OnMessage
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from swarm.net.gate import PROGRESS, Toll
from swarm.protocol.messages import AnyMessage, Close, Failed, Opened, Output, Refused, Step
from swarm.protocol.seat import Itinerary, Stop, Terms
from swarm.protocol.tensors import meta_of


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """The size of a probe, which is what a stranger's server pays for it."""

    compute_s: float = limit(0.25, "s", "of computing, by the server's own claim, are asked of it")
    steps_min: int = limit(4, "steps", "of a probe of a slow server, or of one that claims no speed")
    steps_max: int = limit(32, "steps", "of a probe of a fast server; all are in flight at once")
    open_s: float = limit(5.0, "s", "to connect and to open the session; a server that takes longer is silent")
    answer_s: float = limit(5.0, "s", "for the outputs; those that have come by then are what the server has shown")


def steps_of(claimed_tps: float | None, limits: ProbeLimits = ProbeLimits()) -> int:
    """Return how many steps a probe has. claimed_tps: tokens/s through the whole span, None where none are claimed."""
    wanted = 0 if claimed_tps is None else math.ceil(min(claimed_tps * limits.compute_s, limits.steps_max))
    return max(limits.steps_min, min(limits.steps_max, wanted))


@dataclass(eq=False, slots=True)
class _Running:
    """One probe. opened: done with the steps that the server takes in flight. over: why nothing more counts, or ""."""

    channel: Channel
    hidden_size: int
    opened: "asyncio.Future[int]"
    over: "asyncio.Future[str]"
    steps: int = 0  # that were sent
    answered: int = 0

    def end(self, why: str) -> None:
        """Take no more. why: "" where all outputs have come."""
        if not self.over.done():
            self.over.set_result(why)

    def take(self, output: Output, activations: Activations | None) -> None:
        """Take the output of the next step; anything else ends the probe."""
        hidden = None if activations is None else activations.hidden
        fits = hidden is not None and hidden.dtype.is_floating_point and hidden.shape == (1, 1, self.hidden_size)
        if output.step != self.answered + 1 or not fits or activations is None or not activations.is_finite():
            self.end("an output that no span computes")
            return
        self.answered += 1
        if self.answered == self.steps:
            self.end("")


class Prober:
    """Probes servers of one model. Lives in the event loop."""

    def __init__(
        self,
        dialer_of: Callable[[OnMessage], Dialer],
        new_id: Callable[[], str],
        hidden_size: int,
        limits: ProbeLimits = ProbeLimits(),
    ) -> None:
        """dialer_of: makes the dialer, whose channels hand their messages to the probes. new_id: names a session.

        hidden_size: of the state between the model's blocks.
        """
        self._dialer = dialer_of(self._on_message)
        self._new_id, self._hidden_size, self._limits = new_id, hidden_size, limits
        self._running: dict[str, _Running] = {}

    async def close(self) -> None:
        """End the channels of all probes."""
        await self._dialer.close()

    async def connect(self, server: Announcement) -> Channel | None:
        """Return a channel on which a server has proven its identity, to be given to `probe`; None if it is silent."""
        try:
            async with asyncio.timeout(self._limits.open_s):
                remote = Remote(server.peer_id, bytes.fromhex(server.channel_key))
                return await self._dialer.connect(remote, server.ways)
        except (NetworkError, TimeoutError):
            return None

    def release(self, channel: Channel) -> None:
        """Use a channel no more."""
        self._dialer.release(channel)

    async def probe(self, channel: Channel, server: Announcement) -> float:
        """Return the block-tokens/s that a server shows in one probe; 0 if it refuses, is late, or answers nonsense."""
        loop, name = asyncio.get_running_loop(), self._new_id()
        running = _Running(channel, self._hidden_size, loop.create_future(), loop.create_future())
        self._running[name] = running
        try:
            return await self._shown(name, running, server) * len(server.span)
        except (ChannelClosed, ValueError):  # it has ended the channel, or announces a numeric class that is none
            return 0.0
        finally:
            del self._running[name]
            if not channel.closed:
                channel.send(Close(session=name))

    async def _shown(self, name: str, running: _Running, server: Announcement) -> float:
        """Return the steps/s of one session from the first step to the last output. Raises ChannelClosed."""
        limits, channel, loop = self._limits, running.channel, asyncio.get_running_loop()
        wanted = steps_of(server.decode_tps, limits)
        stop = Stop(server.peer_id, b"", server.span, server.numeric_class)
        terms = Terms(server.root, positions_max=wanted, rollback_max=0, positions_soon=wanted)
        channel.send(Itinerary(name, 0, (stop,), frozenset(), 0).open(0, terms, rebuild=False))
        await _first(limits.open_s, running.opened, running.over, channel.ended)
        if not running.opened.done():
            return 0.0
        running.steps = min(wanted, running.opened.result())
        began = loop.time()
        for number, hidden in enumerate(self._inputs(server, running.steps)):
            step = Step(
                session=name,
                epoch=0,
                step=number + 1,
                keep=number,
                budget_ms=round(limits.answer_s * 1000),
                want=1,
                hidden=meta_of(hidden),
            )
            channel.send(step, Activations(hidden))
        await _first(limits.answer_s, running.over, channel.ended)
        if channel.ended.done() or (running.over.done() and running.over.result()):
            return 0.0
        return running.answered / max(loop.time() - began, 1e-3)

    def _inputs(self, server: Announcement, count: int) -> list[torch.Tensor]:
        """Return hidden states, each [1, 1, hidden_size], in the dtype in which the server computes."""
        name = NumericClass.parse(server.numeric_class).dtype
        dtype = getattr(torch, name) if name in {"float32", "float16", "bfloat16"} else torch.float32
        hidden = torch.randn(count, 1, 1, self._hidden_size) * 0.1
        return list(hidden.to(dtype))

    def _on_message(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        """Hand a message to its probe; all others are dropped."""
        if isinstance(message, (Opened, Output, Refused, Failed)):
            running = self._running.get(message.session)
            if running is not None and running.channel is channel:
                match message:
                    case Opened() if not running.opened.done():
                        running.opened.set_result(message.window)
                    case Output() if running.steps:
                        running.take(message, activations)
                    case _:
                        running.end("refused")
        return PROGRESS


async def _first(timeout_s: float, *futures: "asyncio.Future[Any]") -> None:
    """Wait until one of these is done, or the time is over."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
