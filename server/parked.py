"""Steps that come before the Open of their session.

A client sends the first step right behind its Opens, so a hop's output may reach the next hop before the Open does,
which travels by another way. It waits here for a moment.
"""

import asyncio
from dataclasses import dataclass

from swarm.activations import Activations
from swarm.limits import limit
from swarm.net.channel import Channel
from swarm.protocol.messages import Failed, Step
from swarm.protocol.tensors import CHUNK_BYTES
from swarm.server.refusals import send


@dataclass(frozen=True, slots=True)
class ParkedLimits:
    """Bounds on what waits."""

    wait_s: float = limit(2.0, "s", "for the Open; then the step is refused")
    bytes_max: int = limit(8 * CHUNK_BYTES, "bytes", "of all steps that wait; others are refused at once")
    peer_share: int = limit(4, "of them", "a peer's steps have one part of so many, in bytes and in number")
    steps_max: int = limit(256, "steps", "of all peers")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step, and the channel that brought it."""

    channel: Channel
    message: Step
    activations: Activations

    @property
    def n_bytes(self) -> int:
        """Memory of its activations."""
        return self.activations.n_bytes


class Parked:
    """First steps of sessions that are not open yet. Lives in the event loop."""

    def __init__(self, limits: ParkedLimits = ParkedLimits()) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, tuple[Waiting, asyncio.TimerHandle]] = {}  # by session

    def __len__(self) -> int:
        """How many steps wait."""
        return len(self._waiting)

    def park(self, channel: Channel, message: Step, activations: Activations | None) -> None:
        """Let a step wait for its session, or refuse it."""
        waiting = None if activations is None else Waiting(channel, message, activations)
        if waiting is None or not self._fits(waiting):
            _refuse(channel, message)
            return
        timer = self._loop.call_later(self._limits.wait_s, self._expire, message.session)
        self._waiting[message.session] = waiting, timer

    def take(self, session: str) -> Waiting | None:
        """Return the step that has waited for a session, if there is one."""
        waiting, timer = self._waiting.pop(session, (None, None))
        if timer is not None:
            timer.cancel()
        return waiting

    def close(self) -> None:
        """Forget all."""
        for session in list(self._waiting):
            self.take(session)

    def _fits(self, waiting: Waiting) -> bool:
        limits, others = self._limits, [other for other, _ in self._waiting.values()]
        mine = [other.n_bytes for other in others if other.channel.peer == waiting.channel.peer]
        return (
            waiting.message.step == 1
            and waiting.message.session not in self._waiting
            and len(others) < limits.steps_max
            and sum(other.n_bytes for other in others) + waiting.n_bytes <= limits.bytes_max
            and sum(mine) + waiting.n_bytes <= limits.bytes_max // limits.peer_share
            and len(mine) < max(1, limits.steps_max // limits.peer_share)
        )

    def _expire(self, session: str) -> None:
        waiting = self.take(session)
        assert waiting is not None
        _refuse(waiting.channel, waiting.message)


def _refuse(channel: Channel, step: Step) -> None:
    why = "no such session"
    send(channel, Failed(session=step.session, epoch=step.epoch, step=step.step, blame="self", why=why))
