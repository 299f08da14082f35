"""A leg: one hop of a session with its connection, and the answers that the session awaits from it.

PLANNED --Opened--> OPEN --all of the past is there--> WHOLE
   |                 ^  '------its past comes anew-------'
   '----------- any of them --a fault--> FAILED, until a repair replaces it
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from swarm.activations import Activations
from swarm.client.planning.route import Hop
from swarm.errors import ChannelClosed, HopFailed
from swarm.net.channel import Channel
from swarm.protocol import messages as wire
from swarm.protocol.attest import Attested
from swarm.protocol.base import Message
from swarm.protocol.replay import ReplayWindow

Reply = wire.Opened | wire.Rerouted | wire.Rebuilt | wire.Pong | Attested


class LegState(Enum):
    """How far a leg is."""

    PLANNED = auto()  # the hop does not hold the session
    OPEN = auto()  # it holds the session, and lacks some of the past
    WHOLE = auto()  # it has all of the past
    FAILED = auto()


@dataclass(eq=False, slots=True)
class Leg:
    """One hop of a session."""

    hop: Hop
    state: LegState = LegState.PLANNED
    channel: Channel | None = None
    window: int = 1  # steps that the hop takes in flight
    asked: bool = False  # for a past that it may have kept, by an attempt that has not made the route stand
    held: int = 0  # positions of that past
    applied: int = 0  # the last step that it has reported as sent on
    refusals: int = 0  # of steps: what a hop refuses has arrived
    relayed: int = 0  # the last step that the client has relayed to it
    past: ReplayWindow = field(default_factory=ReplayWindow)  # pieces that the client has sent or relayed to it
    _replies: dict[type[Reply], "asyncio.Future[Reply]"] = field(default_factory=dict)
    _progress: "asyncio.Future[wire.Progress] | None" = None

    @property
    def is_open(self) -> bool:
        """Whether the hop holds the session."""
        return self.state in {LegState.OPEN, LegState.WHOLE}

    @property
    def is_whole(self) -> bool:
        """Whether it has all of the session's past."""
        return self.state is LegState.WHOLE and not self.asked

    @property
    def has_failed(self) -> bool:
        """Whether it is to be replaced."""
        return self.state is LegState.FAILED

    @property
    def awaits_reply(self) -> bool:
        """Whether the hop was asked for something that a repair waits for."""
        return bool(self._replies)

    @property
    def skips(self) -> bool:
        """Whether the hop takes steps without activations."""
        return self.channel is not None and self.channel.ready.result().skips

    @property
    def signs(self) -> bool:
        """Whether the hop knows the question for a receipt."""
        return self.channel is not None and self.channel.ready.result().receipts

    def is_usable(self, without: Collection[str]) -> bool:
        """Whether a repair may keep it. without: processes that are to be left.

        Not if it was asked for a kept past in vain: it has begun with one of its own length.
        """
        connected = self.channel is not None and not self.channel.closed
        return self.is_open and not self.asked and connected and self.hop.process not in without

    def send(self, message: Message, activations: Activations | None = None, *, soon: bool = False) -> None:
        """Send to the hop. Raises HopFailed.

        soon: at the end of this turn of the loop, perhaps in one frame with other sessions'.
        """
        if self.channel is None:
            raise self.broken("not connected")
        try:
            self.channel.send(message, activations, soon=soon)
        except ChannelClosed as closed:
            raise self.broken(closed.why) from None

    def expect(self, kind: type[Reply]) -> "asyncio.Future[Reply]":
        """Return a future of the hop's next reply of this kind."""
        self._replies[kind] = asyncio.get_running_loop().create_future()
        return self._replies[kind]

    def reply(self, reply: Reply) -> None:
        """Take a reply of the hop's."""
        future = self._replies.pop(type(reply), None)
        if future is not None and not future.done():
            future.set_result(reply)

    def decline(self, error: Exception) -> None:
        """Fail the replies that are awaited: they will not come."""
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # the repair that asked may have gone
        self._replies.clear()

    def inquire(self, inquiry: wire.Inquiry) -> "asyncio.Future[wire.Progress]":
        """Ask the hop how far it is. Returns a future of its answer. Raises ChannelClosed."""
        assert self.channel is not None
        self._progress = asyncio.get_running_loop().create_future()
        self.channel.send(inquiry)
        return self._progress

    def report(self, progress: wire.Progress) -> None:
        """Take the hop's answer to an inquiry."""
        self.applied = progress.applied
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(progress)

    def broken(self, why: str) -> HopFailed:
        """Return a fault that names this hop."""
        return HopFailed(self.hop.peer_id, str(self.hop.blocks), why)
