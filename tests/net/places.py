"""Peers on loopback that meet: an anchor, hidden peers, callers. Loopback has no router, so limits say what works."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from swarm.errors import HandshakeFailed
from swarm.net.address import ViaAnchor
from swarm.net.anchor import AnchorLimits
from swarm.net.calling import CallLimits
from swarm.net.channel import ignore
from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.mooring import MooringLimits
from swarm.net.punch import PunchLimits
from swarm.net.relay import RelayLimits
from swarm.net.traversal import ListeningTraversal, Traversal, TraversalLimits
from swarm.net.upgrades import UpgradeLimits
from tests.net.support import endpoint, remote, until

NO_PUNCH = PunchLimits(least_s=0.0, most_s=0.0)


def limits(
    *,
    punch: bool = True,
    meet_s: float = 6.0,
    relay: RelayLimits | None = None,
    upgrades: UpgradeLimits | None = None,
    **anchor: object,
) -> TraversalLimits:
    punching = PunchLimits() if punch else NO_PUNCH
    return TraversalLimits(
        calls=CallLimits(meet_s=meet_s, punch=punching),
        upgrades=upgrades or UpgradeLimits(),
        moorings=MooringLimits(punch=punching, again_s=0.2, ping_s=0.2, silent_s=0.5),
        anchor=AnchorLimits(relay=relay or RelayLimits(), **anchor),
    )


@dataclass
class Place:
    """A process that listens."""

    me: Endpoint
    ways: ListeningTraversal
    taken: list = field(default_factory=list)
    tasks: list = field(default_factory=list)

    @property
    def via(self) -> ViaAnchor:
        return ViaAnchor(self.me.identity.peer_id, self.me.key.public, self.ways.listener.address)

    def moor(self, *anchors: "Place") -> None:
        self.ways.moorings.offer(anchor.via for anchor in anchors)
        if not self.tasks:
            self.tasks.append(asyncio.create_task(self.ways.moorings.run()))

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.ways.close()
        await self.ways.listener.close()


class Places:
    """Makes them, and ends them."""

    def __init__(self) -> None:
        self.made: list[Place | Traversal] = []

    async def place(self, bounds: TraversalLimits | None = None, *, check=None, public: bool = False) -> Place:
        me = endpoint(public=public)
        listener = Listener(me, "127.0.0.1", 0)
        ways = ListeningTraversal(
            me, listener, check or (lambda peer, record: None), lambda: b"record", bounds or limits()
        )
        place = Place(me, ways)

        def take(channel, message, activations):
            place.taken.append((channel, message))
            return ignore(channel, message, activations)

        await listener.start(ways.before(take))
        self.made.append(place)
        return place

    async def hidden(self, *anchors: Place, bounds: TraversalLimits | None = None) -> Place:
        place = await self.place(bounds)
        place.moor(*anchors)
        await until(lambda: len(place.ways.moorings.anchors) == len(anchors))
        return place

    def caller(self, bounds: TraversalLimits | None = None) -> "Caller":
        me = endpoint()
        ways = Traversal(me, limits=bounds or limits())
        self.made.append(ways)
        return Caller(me, ways)

    async def end(self) -> None:
        for each in self.made:
            await (each.end() if isinstance(each, Place) else each.close())


@dataclass
class Caller:
    """A process that does not listen."""

    me: Endpoint
    ways: Traversal

    async def call(self, anchor: Place, callee: Place):
        return await self.ways.dial(anchor.via, remote(callee.me), self.me, ignore)


def refusing(peer: str, record: bytes) -> None:
    raise HandshakeFailed(peer, f"its record is {record.decode()}")


@contextlib.asynccontextmanager
async def places():
    made = Places()
    try:
        yield made
    finally:
        await made.end()
