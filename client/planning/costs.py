"""The estimated cost of one token on a route. Pure.

A route's estimate is the time of one token, in milliseconds:

    trips      from the client to the first hop, from hop to hop, and back: half of a round trip each
    compute    per hop: its blocks * the time of a token in one block
    queue      per hop: compute * load, where load is how many steps it had under way
    software   per hop: `hop_ms`

Servers announce what speeds up a route through them, and may lie. So a claim that is better than an ordinary server's
counts only as far as this client's own use has borne it out:

    a block    max(claimed, min(ordinary, shown))
    a trip     max(announced by either end, min(ordinary, shown)), where both ends announce it
               max(announced by one end, min(unknown, shown)), where the other does not; unknown, where none does

`shown` is the most that the latest session through it has left it. So a server that boasts of speed is as likely in a
route as one of the faster half. One that boasts of short trips gains nothing by them, and several that vouch for each
other gain as much as ordinary neighbours do.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

from swarm.client.planning.evidence import Shown, edge_of, key_of
from swarm.client.planning.promise import exactness_of
from swarm.client.planning.request import Request
from swarm.client.planning.route import Hop, HopEstimate, Route, Speed
from swarm.dht.records import Announcement

PREFIX = 16  # hex digits of a public key that name a peer in announced round trips: the record's format


def estimated(hops: Sequence[Hop], request: Request) -> Route:
    """Return these hops as a route with its estimates."""
    home_ms = client_trip_ms(hops[-1].announcement, request)
    servers = [hop.announcement for hop in hops]
    promise = exactness_of(servers, is_coded=request.coding is not None)
    return Route(tuple(hops), tuple(_estimates(hops, request)), home_ms, request.preferences.optimize, promise)


def block_ms(announcement: Announcement, request: Request) -> float:
    """Return the time of a token in one block of a server that has nothing else to do, as far as it is believed."""
    shown_ms = request.evidence.blocks.get(key_of(announcement), inf)
    return max(request.claimed_ms(announcement), min(request.ordinary_ms, shown_ms))


def caution(announcement: Announcement, request: Request) -> float:
    """Return the share by which a server counts as slower, because no audit has found its outputs right."""
    confirmed = request.evidence.confirmed
    return request.limits.unaudited_share if confirmed and key_of(announcement) not in confirmed else 0.0


def client_trip_ms(announcement: Announcement, request: Request) -> float:
    """Return the time of one way between the client and a server."""
    return request.client_rtts.get(announcement.public_key, request.client_rtt_ms) / 2


def shown_by(hops: Sequence[Hop], token_ms: float, request: Request) -> Shown:
    """Return the most that a token may have taken in one block of each process, and on each trip between two.

    token_ms: the time of one token around these hops, as measured. Where it exceeds the claims of all servers together,
    by more than `ring_slack`, the rest may be any one's: each is charged with all of it. A trip that no server
    announces counts as none, else its unknown time would hide what a server boasts.
    """
    excess_ms = max(0.0, token_ms - request.limits.ring_slack * _claimed_token_ms(hops, request))
    servers = [hop.announcement for hop in hops]
    blocks = {key_of(h.announcement): request.claimed_ms(h.announcement) + excess_ms / len(h.blocks) for h in hops}
    trips = {edge_of(a, b): max(told) / 2 + excess_ms for a, b in pairwise(servers) if (told := _announced(a, b))}
    return Shown(blocks, trips)


def _claimed_token_ms(hops: Sequence[Hop], request: Request) -> float:
    servers = [hop.announcement for hop in hops]
    trips_ms = client_trip_ms(servers[0], request) + client_trip_ms(servers[-1], request)
    trips_ms += sum(max(_announced(one, other), default=0.0) / 2 for one, other in pairwise(servers))
    stages = (len(h.blocks) * request.claimed_ms(h.announcement) * (1.0 + h.announcement.load) for h in hops)
    return trips_ms + sum(stages) + len(hops) * request.limits.hop_ms


def _estimates(hops: Sequence[Hop], request: Request) -> Iterator[HopEstimate]:
    previous = None
    for hop in hops:
        here = hop.announcement
        trip_ms = client_trip_ms(here, request) if previous is None else _trip_ms(previous, here, request)
        compute_ms = len(hop.blocks) * block_ms(here, request)
        queue_ms, slower = compute_ms * here.load, caution(here, request)
        yield HopEstimate(
            hop.peer_id,
            hop.blocks,
            trip_ms,
            compute_ms,
            queue_ms,
            request.limits.hop_ms,
            caution_ms=slower * (compute_ms + queue_ms),
            speed=_speed(here, request),
            is_confirmed=key_of(here) in request.evidence.confirmed,
        )
        previous = here


def _speed(announcement: Announcement, request: Request) -> Speed:
    """Say why a server's speed counts as it does."""
    if request.claimed_ms(announcement) >= request.ordinary_ms:
        return "claimed"
    return "shown" if block_ms(announcement, request) < request.ordinary_ms else "ordinary"


def _trip_ms(one: Announcement, other: Announcement, request: Request) -> float:
    """Return one way between two peers, as far as what they announce is believed."""
    there, back = _told(one, other), _told(other, one)
    least = request.ordinary_rtt_ms if there and back else request.limits.unknown_rtt_ms
    if there or back:
        least = min(least, 2 * request.evidence.trips.get(edge_of(one, other), inf))
    return max(*there, *back, least, 0.0) / 2


def _announced(one: Announcement, other: Announcement) -> list[float]:
    """Return the round trips between two peers that either announces, in ms."""
    return [*_told(one, other), *_told(other, one)]


def _told(one: Announcement, other: Announcement) -> list[float]:
    """Return the round trips to another server that a server announces: one at most, if it is honest."""
    return [ms for peer, ms in one.rtts if peer == other.public_key[:PREFIX]]
