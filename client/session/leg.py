"""A leg of a live route: one hop with its connection, and what it is expected to say."""

import asyncio
from dataclasses import dataclass, field
from typing import TypeVar

from swarm.client.planning.route import Hop
from swarm.client.session.avoidance import Edge
from swarm.errors import HopFailed
from swarm.net.channel import Channel
from swarm.protocol import messages as wire
from swarm.protocol.journal import Unconfirmed

Result = TypeVar("Result")
Reply = wire.Opened | wire.Rerouted | wire.Rebuilt | wire.Pong


@dataclass(slots=True)
class Leg:
    """One hop of a session."""

    hop: Hop
    channel: Channel | None = None
    opened: bool = False
    whole: bool = False  # it has all of the session's past
    failed: bool = False  # it is about to be replaced
    window: int = 1
    waiting: dict[type[Reply], "asyncio.Future[Reply]"] = field(default_factory=dict)
    asked: "asyncio.Future[wire.Progress] | None" = None
    applied: int = 0  # the last step that it has said to have sent on
    refusals: int = 0  # of steps, which is a sign of life
    carried: int = 0  # the last step that the client has handed on to it
    unconfirmed: Unconfirmed = field(default_factory=Unconfirmed)  # of the past that the client has sent, or handed on

    def expect(self, kind: type[Reply]) -> "asyncio.Future[Reply]":
        """Return what will be done when the hop says so."""
        self.waiting[kind] = asyncio.get_running_loop().create_future()
        return self.waiting[kind]

    def hear(self, reply: Reply) -> None:
        """The hop has said something."""
        waiting = self.waiting.pop(type(reply), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def tell(self, progress: wire.Progress) -> None:
        """The hop has said how far it is."""
        self.applied = progress.applied
        if self.asked is not None and not self.asked.done():
            self.asked.set_result(progress)

    def fail(self, error: Exception) -> None:
        """What was asked of the hop will not be answered, or is declined."""
        for waiting in self.waiting.values():
            fail(waiting, error)
        self.waiting.clear()

    def broken(self, why: str) -> HopFailed:
        """Name this hop as the one that failed."""
        return HopFailed(self.hop.peer_id, str(self.hop.blocks), why)


class EdgeDown(Exception):
    """Two hops cannot talk to each other; that is nobody's fault. blocked: to connect again would be of no use."""

    def __init__(self, edge: Edge, why: str, *, blocked: bool) -> None:
        super().__init__(why)
        self.edge = edge
        self.blocked = blocked


def fail(future: "asyncio.Future[Result]", error: Exception) -> None:
    """Fail a future that perhaps nobody waits for."""
    if not future.done():
        future.set_exception(error)
        future.exception()
