"""Planning a route: from a request to the hops that a session runs through. Pure.

One search for each tier of numeric classes, because tiers are never mixed; or for each class where none are to be. A
repair searches among servers of the classes that it had first. The search works on arrays (`stages`, `search`), for
throughput with a limit of blocks for each server (`pace`); `visits` turns its ways into ones that visit a peer once.
"""

from collections import defaultdict
from collections.abc import Sequence

from swarm.activations import tier_of
from swarm.blocks import Blocks
from swarm.client.planning import visits
from swarm.client.planning.costs import estimated
from swarm.client.planning.eligible import Eligibility, Offer, covered, has_room, no_route, offers_of
from swarm.client.planning.pace import quickest_pace
from swarm.client.planning.request import Request
from swarm.client.planning.route import Hop, Route
from swarm.client.planning.search import Search
from swarm.client.planning.stages import Part, stages_of
from swarm.dht.records import SignedAnnouncement

Cost = tuple[float, float]  # ms: of the slowest stage, 0.0 where that does not count, and `Route.cost_ms`


def plan(request: Request) -> Route:
    """Return the hops that cover the wanted blocks at the least estimated cost.

    A span may be entered and left at any block; a peer holds one part. Two tiers are never mixed, nor two numeric
    classes of an exact route: the better one is taken. Raises NoRoute with the blocks that are missing.
    """
    usable = Eligibility(request).usable()
    if request.held and (kept := _best(request, _held_offers(request, usable))) is not None:
        return kept[1]
    mixing: dict[str, list[SignedAnnouncement]] = defaultdict(list)
    for signed in usable:
        name = signed.announcement.numeric_class
        mixing[name if request.preferences.exact else tier_of(name)].append(signed)
    bests = [_best(request, offers_of(request, mixing[name])) for name in sorted(mixing)]
    found = [best for best in bests if best is not None]
    if not found:
        raise no_route(request)
    return min(found, key=lambda best: best[0])[1]


def _held_offers(request: Request, usable: Sequence[SignedAnnouncement]) -> list[Offer]:
    """Return the blocks that servers with room may be given in the class in which a route has them already."""
    offers = offers_of(request, usable, request.held)
    return [offer for offer in offers if has_room(offer.announcement, request)]


def _best(request: Request, offers: Sequence[Offer]) -> tuple[Cost, Route] | None:
    """Return the best route through servers that may be mixed behind its cost; None where there is none.

    The first route that is good enough ends the search, where the cheapest way comes back to a peer: cheaper ones may
    exist, within `return_slack`.
    """
    if not covered(request.wanted, offers):
        return None
    stages = stages_of(request, offers)
    pace = quickest_pace(stages, request.limits) if request.preferences.optimize == "throughput" else None
    limit, stage_ms, paced = (pace.limit, pace.stage_ms, pace.ways) if pace is not None else (None, 0.0, ())
    search = Search(stages, limit)
    cheapest = search.path()
    if cheapest is None:
        return None
    good_enough = stage_ms, request.limits.return_slack * search.least_ms
    # Where blocks are pinned, the longest part may be the wrong one to keep: other peers may not have the rest.
    keeps = (visits.longest, visits.first, visits.last) if request.pins else (visits.longest,)
    found: list[tuple[Cost, Route]] = []
    for way in visits.ways(stages, limit, cheapest, keeps, request.limits.revisits_max, otherwise=paced):
        parts = visits.merged(way)
        if not visits.visits_once(stages, parts):
            continue
        route = _route(request, offers, parts)
        cost = (0.0 if pace is None else max(stage_ms, route.slowest_ms)), route.cost_ms
        found.append((cost, route))
        if cost <= good_enough:
            break
    return min(found, key=lambda one: one[0], default=None)


def _route(request: Request, offers: Sequence[Offer], parts: Sequence[Part]) -> Route:
    first = request.wanted.start
    return estimated(
        [Hop(offers[part.server].signed, Blocks(first + part.start, first + part.stop)) for part in parts], request
    )
