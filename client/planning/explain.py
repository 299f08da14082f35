"""Why a route is as it is: the estimate of each hop, and the reason why every other server is not in it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from swarm.activations import tier_of
from swarm.blocks import Blocks
from swarm.client.planning.eligible import Eligibility, Reason, covered, has_room, offers_of
from swarm.client.planning.pace import quickest_pace
from swarm.client.planning.promise import Crossing
from swarm.client.planning.request import Request
from swarm.client.planning.route import HopEstimate, Optimize, Route, table
from swarm.client.planning.search import Search
from swarm.client.planning.stages import stages_of
from swarm.dht.records import Announcement, SignedAnnouncement


@dataclass(frozen=True, slots=True)
class Rejected:
    """A server that is not in the route.

    slower_ms: by how much the best route through it costs more, where the server is usable (`Route.cost_ms`).
    """

    peer_id: str
    blocks: Blocks
    reason: Reason
    detail: str
    slower_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class Explanation:
    """A route, and the servers that are not in it, those that nearly were first. `str` is two tables for people.

    crossings: repairs that brought blocks into another numeric class.
    """

    route: Route
    rejected: tuple[Rejected, ...]
    coding: str | None = None  # of the activations on all edges
    crossings: tuple[Crossing, ...] = ()
    rows_max: int = 50  # rejected servers that the text lists

    @property
    def optimize(self) -> Optimize:
        """The aim of the plan."""
        return self.route.optimize

    @property
    def hops(self) -> tuple[HopEstimate, ...]:
        """The estimate of each hop."""
        return self.route.estimates

    @property
    def home_ms(self) -> float:
        """One way, from the last hop to the client."""
        return self.route.home_ms

    @property
    def estimate_ms(self) -> float:
        """Estimated time of one token, once around the route."""
        return self.route.estimate_ms

    @property
    def slowest_ms(self) -> float:
        """How long the slowest server of the route is busy with a token."""
        return self.route.slowest_ms

    def __str__(self) -> str:
        lines = [str(self.route), *(f"repaired in another class: {crossing}" for crossing in self.crossings)]
        if self.coding is not None:
            lines.append(f"activations travel as {self.coding} on all edges, in 8.5 bits a number")
        if self.rejected:
            rows = [
                (one.peer_id, str(one.blocks), one.reason.value, one.detail) for one in self.rejected[: self.rows_max]
            ]
            lines += ["", *table(("not chosen", "blocks", "reason", ""), rows)]
        if len(self.rejected) > self.rows_max:
            lines.append(f"and {len(self.rejected) - self.rows_max} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, repr=False)
class ExplainedRoute(Route):
    """The route that a user gets: it can explain itself. request: its plan's, with the servers known now.

    crossings: repairs that brought blocks into another numeric class. Then the text is not that of any one route, and
    its exactness is "tier".
    """

    request: Request = field(compare=False)
    crossings: tuple[Crossing, ...] = ()

    @classmethod
    def of(cls, route: Route, request: Request, crossings: tuple[Crossing, ...] = ()) -> "ExplainedRoute":
        """Put a route, a request and the repairs of a session together."""
        facts = {each.name: getattr(route, each.name) for each in fields(Route)}
        if crossings:
            facts["exactness"] = "tier"
        return cls(**facts, request=request, crossings=crossings)

    def explanation(self) -> Explanation:
        """Compare with the servers that are not in the route. Takes about as long as two plans."""
        return replace(explanation(self, self.request), crossings=self.crossings)

    def explain(self) -> str:
        """Return two tables for people: the estimate of each hop, and why the other servers were not chosen."""
        return str(self.explanation())


def explanation(route: Route, request: Request) -> Explanation:
    """Compare a route with the servers that it does not use. Takes about as long as two plans."""
    eligibility = Eligibility(request)
    mixing = _mixing(route[0].numeric_class, request)
    usable = [
        signed for signed in eligibility.usable() if _mixing(signed.announcement.numeric_class, request) == mixing
    ]
    through_ms = _through(request, usable)
    chosen = {(hop.announcement.public_key, hop.announcement.blocks) for hop in route}
    rejected = []
    for signed in request.servers:
        a = signed.announcement
        if (a.public_key, a.blocks) in chosen:
            continue
        slower_ms = through_ms.get((a.public_key, a.blocks), np.inf) - route.cost_ms
        reason = eligibility.reason(a) or _unchosen(a, request, mixing, slower_ms)
        rejected.append(Rejected(a.peer_id, a.span, reason, _detail(reason, a, slower_ms), slower_ms))
    order = list(Reason)
    rejected.sort(key=lambda one: (order.index(one.reason), one.slower_ms, one.peer_id))
    return Explanation(route, tuple(rejected), request.coding)


def _through(request: Request, usable: Sequence[SignedAnnouncement]) -> dict[tuple[str, tuple[int, int]], float]:
    """Return the cost of the best route through each server, as `Route.cost_ms`."""
    offers = offers_of(request, usable)
    if not covered(request.wanted, offers):
        return {}
    stages = stages_of(request, offers)
    limit = quickest_pace(stages, request.limits).limit if request.preferences.optimize == "throughput" else None
    found: dict[tuple[str, tuple[int, int]], float] = {}
    for offer, ms in zip(offers, Search(stages, limit).through().tolist(), strict=True):
        place = (offer.announcement.public_key, offer.announcement.blocks)
        found[place] = min(ms, found.get(place, np.inf))
    return found


def _mixing(name: str, request: Request) -> str:
    """Return the name of all classes that a route may mix with this one."""
    return name if request.preferences.exact else tier_of(name)


def _unchosen(announcement: Announcement, request: Request, mixing: str, slower_ms: float) -> Reason:
    if _mixing(announcement.numeric_class, request) != mixing:
        return Reason.OTHER_CLASS if request.preferences.exact else Reason.OTHER_TIER
    if not has_room(announcement, request):
        return Reason.NO_ROOM
    return Reason.SLOWER if np.isfinite(slower_ms) else Reason.NO_WAY


def _detail(reason: Reason, announcement: Announcement, slower_ms: float) -> str:
    more = f"{slower_ms:.1f} ms more" if slower_ms >= 0 else f"{-slower_ms:.1f} ms less now"
    details = {
        Reason.SLOWER: f"the best route through it takes {more}",
        Reason.NO_WAY: "no route through it has a slowest server that is as fast",
        Reason.NO_ROOM: f"{announcement.free_tokens} tokens are free",
        Reason.NOT_ONLINE: announcement.state,
        Reason.OTHER_CLASS: announcement.numeric_class,
        Reason.OTHER_TIER: announcement.numeric_class,
        Reason.NO_CODING: "it runs without --wire",
    }
    return details.get(reason, "")
