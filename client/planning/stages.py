"""Offers as arrays, the form in which they are searched. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from swarm.client.planning.costs import PREFIX, block_ms, caution, client_trip_ms
from swarm.client.planning.eligible import Offer, has_room
from swarm.client.planning.evidence import key_of
from swarm.client.planning.request import Request
from swarm.dht.records import Announcement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trips:
    """Known one-way trips in ms from server `source[i]` to server `target[i]`; all others take `default_ms`.

    Infinite where a server may not follow the other. Every server is there with itself. Sorted by target.
    """

    source: Ints
    target: Ints
    ms: Floats
    default_ms: float


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks [start, stop) on one server."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class Stages:
    """S servers that hold [start, stop) of blocks 0 to n_blocks, each at least one, in the order that breaks ties.

    block_ms: the time of a token in one block. weight_ms: the same as the search counts it, with penalties.
    client_ms: one way between the client and each. peer: a number for the peer that each belongs to.
    hop_ms: the software of one hop.
    """

    n_blocks: int
    start: Ints
    stop: Ints
    block_ms: Floats
    weight_ms: Floats
    client_ms: Floats
    peer: Ints
    trips: Trips
    hop_ms: float

    @cached_property
    def holders(self) -> list[Ints]:
        """The servers that hold each block."""
        return [np.flatnonzero((self.start <= b) & (b < self.stop)) for b in range(self.n_blocks)]

    def mirrored(self) -> "Stages":
        """Return the same pipeline from its other end: trips take the same time both ways."""
        trips = self.trips
        order = np.argsort(trips.source, kind="stable")
        back = Trips(trips.target[order], trips.source[order], trips.ms[order], trips.default_ms)
        return replace(self, start=self.n_blocks - self.stop, stop=self.n_blocks - self.start, trips=back)


def stages_of(request: Request, offers: Sequence[Offer]) -> Stages:
    """Return the offers as arrays, in their order; block 0 is the first wanted one."""
    wanted, limits = request.wanted, request.limits
    announcements = [offer.announcement for offer in offers]
    spans = np.array([(o.blocks.start, o.blocks.stop) for o in offers], dtype=np.int64).reshape(-1, 2)
    start, stop = np.clip(spans - wanted.start, 0, len(wanted)).T
    busy_ms = np.array([block_ms(a, request) * (1.0 + a.load) for a in announcements])
    slower = np.array([caution(a, request) for a in announcements])
    numbers = {a.public_key: number for number, a in enumerate(announcements)}
    no_room = np.array([not has_room(a, request) for a in announcements], dtype=bool)
    return Stages(
        n_blocks=len(wanted),
        start=start,
        stop=stop,
        block_ms=busy_ms,
        weight_ms=busy_ms * (1.0 + slower) + limits.no_room_ms * no_room,
        client_ms=np.array([client_trip_ms(a, request) for a in announcements]),
        peer=np.array([numbers[a.public_key] for a in announcements], dtype=np.int64),
        trips=_trips_between(announcements, request),
        hop_ms=limits.hop_ms,
    )


def _announced(announcements: Sequence[Announcement]) -> tuple[Ints, Ints, Floats]:
    """Return the measured one-way trips: the server that announces each, the other server, and the time in ms."""
    by_prefix = {a.public_key[:PREFIX]: index for index, a in enumerate(announcements)}
    rtts = [a.rtts for a in announcements]
    said = list(chain.from_iterable(rtts))  # 16,000 of 1,000 servers: all that follows is a loop in C
    source = np.repeat(np.arange(len(announcements)), list(map(len, rtts)))
    target = np.fromiter(map(by_prefix.get, map(itemgetter(0), said), repeat(-1)), np.int64, len(said))
    trip_ms = np.fromiter(map(itemgetter(1), said), np.float64, len(said)) / 2
    usable = target >= 0  # the others are not among these servers
    return source[usable], target[usable], trip_ms[usable]


def _trips_between(announcements: Sequence[Announcement], request: Request) -> Trips:
    """Sort known trips, each with its way back. Each counts as `costs` says."""
    source, target, ms = _announced(announcements)
    itself = np.arange(len(announcements))
    by_source = np.repeat([1.0, 0.0, 1.0], [len(ms), len(ms), len(itself)])
    source, target = np.concatenate([source, target, itself]), np.concatenate([target, source, itself])
    ms = np.concatenate([ms, ms, np.full(len(itself), np.inf)])  # no server follows itself
    key = target << 32 | source
    order = np.argsort(key)
    first = np.flatnonzero(np.diff(key[order], prepend=-1))

    def most(values: Floats) -> Floats:
        """Return the most of each pair of servers."""
        found: Floats = np.maximum.reduceat(values[order], first)
        return found

    by_both = (most(by_source) * most(1.0 - by_source)).astype(bool)
    unknown_ms = request.limits.unknown_rtt_ms / 2
    least = np.where(by_both, request.ordinary_rtt_ms / 2, unknown_ms)
    _lower_shown(least, key[order][first], announcements, request)
    return Trips(source[order][first], target[order][first], np.maximum(most(ms), least), unknown_ms)


def _lower_shown(least: Floats, pairs: Ints, announcements: Sequence[Announcement], request: Request) -> None:
    """Let trips count as less where use has shown less. pairs: target << 32 | source, sorted."""
    places = {key_of(announcement): index for index, announcement in enumerate(announcements)}
    for edge, shown_ms in request.evidence.trips.items():
        one, other = (places.get(key, -1) for key in edge)
        if one < 0 or other < 0:
            continue
        for pair in (one << 32 | other, other << 32 | one):
            at = int(np.searchsorted(pairs, pair))
            if at < len(pairs) and pairs[at] == pair:
                least[at] = min(least[at], shown_ms)
