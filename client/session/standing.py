"""A route at one epoch, frozen: a repair makes another one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from swarm.client.planning.route import Hop
from swarm.client.session.leg import Leg
from swarm.net.channel import Channel
from swarm.protocol.seat import Itinerary, Stop

Edge = tuple[str, str]  # two processes, in the order in which activations flow


@dataclass(frozen=True, slots=True)
class Layout:
    """Legs in order. relayed: the hops whose outputs the client passes on to the next one."""

    epoch: int = 0
    legs: tuple[Leg, ...] = ()
    relayed: frozenset[int] = frozenset()

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops, in order."""
        return tuple(leg.hop for leg in self.legs)

    @property
    def prefill_tps(self) -> float | None:
        """Tokens of a prompt that the slowest hop computes in a second, as announced; None if none announces it."""
        rates = [
            hop.announcement.prefill_tps * len(hop.announcement.span) / len(hop.blocks)
            for hop in self.hops
            if hop.announcement.prefill_tps is not None
        ]
        return min(rates, default=None)

    def index_of(self, channel: Channel) -> int | None:
        """Return the index of the leg that uses this channel."""
        for index, leg in enumerate(self.legs):
            if leg.channel is channel:
                return index
        return None

    def has(self, leg: Leg) -> bool:
        """Whether this very leg is a part of the route."""
        return any(leg is ours for ours in self.legs)

    def is_last(self, index: int) -> bool:
        """Whether this leg answers steps."""
        return index == len(self.legs) - 1

    def edge(self, index: int) -> Edge:
        """The connection from this hop to the next one."""
        return self.legs[index].hop.process, self.legs[index + 1].hop.process

    def process_of(self, peer: str) -> str:
        """Return the process of the hop that this peer is; the peer id if it is none any more."""
        return next((leg.hop.process for leg in self.legs if leg.hop.peer_id == peer), peer)

    def is_whole(self, peer: str) -> bool:
        """Whether this peer has all of the session's past."""
        return any(leg.is_whole for leg in self.legs if leg.hop.peer_id == peer)

    def front(self, step: int) -> Leg:
        """Return the leg that this step waits for, by the hops' last answers to inquiries."""
        broken = (leg for leg in self.legs if leg.has_failed or leg.channel is None or leg.awaits_reply)
        behind = (leg for leg in self.legs if leg.applied < step)
        return next(chain(broken, behind), self.legs[-1])

    def itinerary(self, session: str, after_step: int) -> Itinerary:
        """Return the route as Open and Reroute tell it to the hops."""
        stops = tuple(
            Stop(hop.peer_id, hop.signed.data, hop.blocks, hop.announcement.numeric_class) for hop in self.hops
        )
        return Itinerary(session, self.epoch, stops, self.relayed, after_step)

    def next(self, legs: Iterable[Leg] | None = None, relayed: frozenset[int] = frozenset()) -> "Layout":
        """Return a layout of the next epoch, of these legs or of the same."""
        return Layout(self.epoch + 1, self.legs if legs is None else tuple(legs), relayed)

    def with_relays(self, relayed: frozenset[int]) -> "Layout":
        """Return the same layout with these edges relayed."""
        return replace(self, relayed=relayed)


@dataclass(frozen=True, slots=True)
class Standing:
    """A layout whose hops all hold the session and its past. window: steps that may be in flight.

    held: positions of a new session's prompt that every hop has.
    """

    layout: Layout
    window: int
    held: int = 0

    @property
    def epoch(self) -> int:
        """The version of the session's route."""
        return self.layout.epoch
