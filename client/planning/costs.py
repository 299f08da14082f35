"""The estimated cost of one token on a route. Pure.

A route's estimate is the time of one token, in milliseconds:

    trips      from the client to the first hop, from hop to hop, and back: half of a measured round trip each
    compute    per hop: its share of the span, blocks / span / decode_tps
    queue      per hop: compute * load, where load is how many steps it had under way
    software   per hop: `hop_ms`
"""

from collections.abc import Iterator, Sequence

from swarm.client.planning.promise import exactness_of
from swarm.client.planning.request import PlanningLimits, Request
from swarm.client.planning.route import Hop, HopEstimate, Route
from swarm.dht.records import Announcement

PREFIX = 16  # hex digits of a public key that name a peer in announced round trips: the record's format


def estimated(hops: Sequence[Hop], request: Request) -> Route:
    """Return these hops as a route with its estimates."""
    home_ms = client_trip_ms(hops[-1].announcement, request)
    servers = [hop.announcement for hop in hops]
    promise = exactness_of(servers, is_coded=request.coding is not None)
    return Route(tuple(hops), tuple(_estimates(hops, request)), home_ms, request.preferences.optimize, promise)


def block_ms(announcement: Announcement, limits: PlanningLimits) -> float:
    """Return the time of a token in one block of a server that has nothing else to do."""
    tokens_per_s = announcement.decode_tps or limits.unmeasured_tps
    return 1000.0 / tokens_per_s / (announcement.blocks.stop - announcement.blocks.start)


def client_trip_ms(announcement: Announcement, request: Request) -> float:
    """Return the time of one way between the client and a server."""
    return request.client_rtts.get(announcement.public_key, request.client_rtt_ms) / 2


def _estimates(hops: Sequence[Hop], request: Request) -> Iterator[HopEstimate]:
    previous = None
    for hop in hops:
        here = hop.announcement
        trip_ms = client_trip_ms(here, request) if previous is None else _trip_ms(previous, here, request.limits)
        compute_ms = len(hop.blocks) * block_ms(here, request.limits)
        yield HopEstimate(hop.peer_id, hop.blocks, trip_ms, compute_ms, compute_ms * here.load, request.limits.hop_ms)
        previous = here


def _trip_ms(one: Announcement, other: Announcement, limits: PlanningLimits) -> float:
    """Return one way between two peers: the longest that either announces, so that no peer can claim to be near."""
    announced = [
        ms
        for here, there in ((one, other), (other, one))
        for peer, ms in here.rtts
        if peer == there.public_key[:PREFIX]
    ]
    return max(announced, default=limits.unknown_rtt_ms) / 2
