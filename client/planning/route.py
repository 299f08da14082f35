"""Planning a route: from announcements to the spans that a session runs through. Pure; the arithmetic is in `stages`.

A route's estimate is the time of one token, in milliseconds:

    trips      from the client to the first hop, from hop to hop, and back: half of a measured round trip each
    compute    per hop: its share of the span, blocks / span / decode_tps
    queue      per hop: compute * load, where load is how many steps it had under way
    software   per hop: HOP_MS
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, repeat
from operator import itemgetter
from statistics import median

import numpy as np

from swarm.blocks import Blocks, missing_blocks
from swarm.client.planning.explain import Explanation, HopEstimate, Optimize, Reason, Rejected
from swarm.client.planning.stages import HOP_MS, Floats, Ints, Pace, Part, Search, Stages, quickest_pace, trips_between
from swarm.dht.records import Announcement, SignedAnnouncement
from swarm.errors import NoRoute
from swarm.identity import public_key_of

UNKNOWN_RTT_MS = 40.0  # between two peers of whom neither has measured it: half-way round a continent
UNMEASURED_TPS = 20.0  # what a server is assumed to do that has not measured itself yet
NO_ROOM_MS = 1e6  # for each block on a server without room: more than any route, so that it is the last resort
RETURN_SLACK = 1.05  # a route that takes so much longer than one that comes back to a peer would is good enough
REVISITS_MAX = 3  # plans tried where the cheapest way leaves a peer and comes back to it
PREFIX = 16  # hex digits of a public key that name a peer in measured round trips


@dataclass(frozen=True, slots=True)
class Hop:
    """One span of a route: `blocks` of what a peer serves."""

    signed: SignedAnnouncement
    blocks: Blocks
    latency_ms: float | None = None  # a measured round trip to it

    @property
    def announcement(self) -> Announcement:
        """What the peer announces."""
        return self.signed.announcement

    @property
    def peer_id(self) -> str:
        """The peer that serves it."""
        return self.announcement.peer_id

    @property
    def process(self) -> str:
        """The process that serves it, for `avoid`."""
        return process_of(self.announcement)

    def __str__(self) -> str:
        latency = "" if self.latency_ms is None else f", {self.latency_ms:.1f} ms"
        return f"{self.peer_id} {self.blocks}{latency}"


Trusted = tuple[tuple[Blocks, frozenset[str]], ...]
"""Ranges of blocks, each with the only peers (ids) that may be given any of it."""


@dataclass(frozen=True)
class Request:
    """What a route is planned from; see `plan_route`."""

    model: str
    wanted: Blocks
    servers: tuple[SignedAnnouncement, ...]
    dtype: str | None = None
    numeric_class: str | None = None
    avoid: Collection[str] = ()
    allowed_peers: Collection[str] | None = None
    blocked_peers: Collection[str] = ()
    trusted_peers: Trusted = ()
    client_rtts: Mapping[str, float] = field(default_factory=dict)
    positions_needed: int = 0
    optimize: Optimize = "latency"

    @cached_property
    def pins(self) -> tuple[tuple[Blocks, set[str]], ...]:
        """The trusted peers by their public keys."""
        return tuple((blocks, _keys(peers)) for blocks, peers in self.trusted_peers)

    @cached_property
    def client_rtt_ms(self) -> float:
        """A round trip to a peer that the client has not measured: what is between it and the world is part of all."""
        return median(self.client_rtts.values()) if self.client_rtts else UNKNOWN_RTT_MS


class Route(tuple[Hop, ...]):
    """The hops that cover the wanted blocks in order: a tuple that can say why it is so."""

    request: Request

    def __new__(cls, hops: Iterable[Hop], request: Request) -> "Route":
        """request: what it was planned from, or what it is to be compared with now."""
        route = super().__new__(cls, hops)
        route.request = request
        return route

    @cached_property
    def estimates(self) -> tuple[HopEstimate, ...]:
        """What each hop is estimated to cost."""
        return tuple(_estimates(self, self.request))

    @property
    def estimate_ms(self) -> float:
        """Estimated time of one token, once around the route."""
        return sum(hop.total_ms for hop in self.estimates) + _client_trip_ms(self[-1].announcement, self.request)

    def explanation(self) -> Explanation:
        """Compare with the servers that are not in it. Takes about as long as two plans."""
        home_ms = _client_trip_ms(self[-1].announcement, self.request)
        return Explanation(self.request.optimize, self.estimates, home_ms, _rejected(self))

    def explain(self) -> str:
        """Return two tables for people: what the hops are estimated to cost, and why others were not chosen."""
        return str(self.explanation())


def process_of(announcement: Announcement) -> str:
    """Name the process that announces: a peer that is started again has another channel key.

    With the peer's id, since anybody could announce somebody else's channel key, to have him avoided.
    """
    return f"{announcement.peer_id}/{announcement.channel_key}"


def plan_route(
    model: str,
    wanted: Blocks,
    servers: Iterable[SignedAnnouncement],
    *,
    dtype: str | None = None,
    numeric_class: str | None = None,
    avoid: Collection[str] = (),
    allowed_peers: Collection[str] | None = None,
    blocked_peers: Collection[str] = (),
    trusted_peers: Trusted = (),
    client_rtts: Mapping[str, float] | None = None,
    positions_needed: int = 0,
    optimize: Optimize = "latency",
) -> Route:
    """Return the hops that cover `wanted` at the least estimated cost.

    A span may be entered and left at any block; a peer holds one part. "latency" takes the route with the least time
    per token. "throughput" first makes the slowest server of the route as fast as it can be, where a server takes
    max(STAGE_FLOOR_MS, compute + queue) for a token, to within STAGE_SLACK and as far as a greedy trial finds it; among
    such routes it takes the one with the least time per token.

    Two numeric classes are never mixed; the better one is taken. dtype: only classes that compute in it, as "float32".
    numeric_class: only this one, as a route needs it that is repaired. avoid: peer ids, or processes as in
    `Hop.process`, that are left out; as are blocked_peers and, unless None, all but allowed_peers (peer ids).
    trusted_peers: blocks of these ranges go to their peers alone.
    client_rtts: round trips in ms that the client has measured, by public key (hex); a peer that it has not measured
    is taken to be as far as the median of these. positions_needed: cached tokens; servers with less room are taken
    only where others leave blocks uncovered. Raises NoRoute with the blocks that nobody serves.
    """
    return plan_request(
        Request(
            model=model,
            wanted=wanted,
            servers=tuple(servers),
            dtype=dtype,
            numeric_class=numeric_class,
            avoid=avoid,
            allowed_peers=allowed_peers,
            blocked_peers=blocked_peers,
            trusted_peers=trusted_peers,
            client_rtts=client_rtts or {},
            positions_needed=positions_needed,
            optimize=optimize,
        )
    )


def plan_request(request: Request) -> Route:
    """Plan as `plan_route` does. Raises NoRoute."""
    unusable = _Sieve(request).reason
    usable = [signed for signed in request.servers if unusable(signed.announcement) is None]
    found = []
    for name in sorted({signed.announcement.numeric_class for signed in usable}):
        pipeline = _Pipeline(request, [s for s in usable if s.announcement.numeric_class == name])
        if (best := pipeline.best()) is not None:
            found.append(best)
    if not found:
        raise _no_route(request)
    return min(found, key=lambda best: best[0])[1]


class _Sieve:
    """Tells servers that may not be used from those that may."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._blocked = _keys(request.blocked_peers)
        self._allowed = None if request.allowed_peers is None else _keys(request.allowed_peers)
        self._avoided = {(key, process) for key, process in map(_key_and_process, request.avoid)}

    def reason(self, announcement: Announcement) -> Reason | None:
        """Return why a server may not be used, or None."""
        wanted, key = self._request.wanted, announcement.public_key
        if announcement.blocks.stop <= wanted.start or announcement.blocks.start >= wanted.stop:
            return Reason.ELSEWHERE
        if (unwanted := self._unwanted(announcement)) is not None:
            return unwanted
        if announcement.state != "online":
            return Reason.NOT_ONLINE
        if (key, "") in self._avoided or (key, announcement.channel_key) in self._avoided:
            return Reason.AVOIDED
        return None if self._right_class(announcement.numeric_class) else Reason.OTHER_CLASS

    def _unwanted(self, announcement: Announcement) -> Reason | None:
        """Return which of the user's preferences rules a server out."""
        key = announcement.public_key
        if key in self._blocked:
            return Reason.BLOCKED
        if self._allowed is not None and key not in self._allowed:
            return Reason.NOT_ALLOWED
        if self._request.pins and not _offers(announcement, self._request):
            return Reason.NOT_TRUSTED
        return None

    def _right_class(self, name: str) -> bool:
        dtype, numeric_class = self._request.dtype, self._request.numeric_class
        return dtype in {None, name.partition("+")[0]} and numeric_class in {None, name}


def _key_and_process(avoided: str) -> tuple[str, str]:
    """Split a peer id or a process into public key and channel key, "" where it is any process."""
    peer_id, _, channel_key = avoided.partition("/")
    try:
        return public_key_of(peer_id).hex(), channel_key
    except ValueError:  # no peer has it
        return "", channel_key


def _keys(peer_ids: Iterable[str]) -> set[str]:
    return {_key_and_process(peer_id)[0] for peer_id in peer_ids}


def _offers(announcement: Announcement, request: Request) -> tuple[Blocks, ...]:
    """Return what a server may be given of its span: all of it, or the ranges for which nobody else is trusted."""
    if not request.pins:
        return (announcement.span,)
    key, wanted = announcement.public_key, request.wanted
    fit = [
        block
        for block in announcement.span
        if block in wanted and all(key in trusted for blocks, trusted in request.pins if block in blocks)
    ]
    runs = [[block for _, block in run] for _, run in groupby(enumerate(fit), lambda pair: pair[1] - pair[0])]
    return tuple(Blocks(run[0], run[-1] + 1) for run in runs)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A server, and blocks that it may be given."""

    signed: SignedAnnouncement
    blocks: Blocks

    @property
    def announcement(self) -> Announcement:
        """What the server announces."""
        return self.signed.announcement


class _Pipeline:
    """What servers of one numeric class offer that may be used, as `stages` wants them."""

    def __init__(self, request: Request, servers: Sequence[SignedAnnouncement]) -> None:
        offers = [_Offer(signed, blocks) for signed in servers for blocks in _offers(signed.announcement, request)]
        with_room = [offer for offer in offers if _has_room(offer.announcement, request)]
        if len(with_room) < len(offers) and _covered(request.wanted, with_room):
            offers = with_room
        self._request = request
        self.servers = sorted(offers, key=lambda o: (o.announcement.public_key, o.announcement.blocks, o.blocks))

    @cached_property
    def stages(self) -> Stages:
        """The servers as arrays, in the order of their peer ids."""
        wanted, announcements = self._request.wanted, [offer.announcement for offer in self.servers]
        spans = np.array([(o.blocks.start, o.blocks.stop) for o in self.servers], dtype=np.int64).reshape(-1, 2)
        start, stop = np.clip(spans - wanted.start, 0, len(wanted)).T
        block_ms = np.array([_block_ms(a) * (1.0 + a.load) for a in announcements])
        numbers = {a.public_key: number for number, a in enumerate(announcements)}
        peer = np.array([numbers[a.public_key] for a in announcements], dtype=np.int64)
        no_room = np.array([not _has_room(a, self._request) for a in announcements], dtype=bool)
        return Stages(
            n_blocks=len(wanted),
            start=start,
            stop=stop,
            block_ms=block_ms,
            weight_ms=block_ms + NO_ROOM_MS * no_room,
            client_ms=np.array([_client_trip_ms(a, self._request) for a in announcements]),
            peer=peer,
            trips=trips_between(len(announcements), *_measured(announcements), UNKNOWN_RTT_MS / 2),
        )

    @cached_property
    def pace(self) -> Pace | None:
        """How fast the slowest server shall be; None where that does not count."""
        return quickest_pace(self.stages) if self._request.optimize == "throughput" else None

    @property
    def limit(self) -> Ints | None:
        """How many blocks each server may take; None for all."""
        return self.pace.limit if self.pace is not None else None

    def best(self) -> tuple[tuple[float, float], Route] | None:
        """Return the best route behind its cost, or None where there is none."""
        if not _covered(self._request.wanted, self.servers):
            return None
        found: list[tuple[tuple[float, float], Route]] = []
        for way, least_ms in self._ways():
            if (route := self._once_each(way)) is not None:
                found.append((self._cost(route), route))
                if found[-1][0] <= (self._stage_ms, RETURN_SLACK * least_ms):
                    break
        return min(found, key=lambda one: one[0], default=None)

    @property
    def _stage_ms(self) -> float:
        return self.pace.stage_ms if self.pace is not None else 0.0

    def _cost(self, route: Route) -> tuple[float, float]:
        if self.pace is None:
            return 0.0, route.estimate_ms
        return max(self._stage_ms, *(hop.stage_ms for hop in route.estimates)), route.estimate_ms

    def _ways(self) -> Iterator[tuple[Sequence[Part], float]]:
        """The best way, and others near it that come back to a peer less; with the time that none can be below."""
        least_ms = 0.0
        for kept in _KEPT if self._request.pins else _KEPT[:1]:
            stages = self.stages
            for _ in range(REVISITS_MAX):
                search = Search(stages, self.limit)
                parts = search.path()
                if parts is None:
                    break
                least_ms = least_ms or search.least_ms
                yield parts, least_ms
                confined = self._without_returns(stages, parts, kept)
                if confined is None:
                    return
                stages = confined
        for way in self.pace.ways if self.pace is not None else ():
            yield way, least_ms

    def _once_each(self, parts: Sequence[Part]) -> Route | None:
        """Let a span that a route comes back to keep everything between: a peer holds one part of a session."""
        hops: list[Hop] = []
        first = self._request.wanted.start
        while parts:
            server = parts[0].server
            last = max(i for i, part in enumerate(parts) if part.server == server)
            hops.append(Hop(self.servers[server].signed, Blocks(first + parts[0].start, first + parts[last].stop)))
            parts = parts[last + 1 :]
        peers = {hop.announcement.public_key for hop in hops}
        return Route(hops, self._request) if len(peers) == len(hops) else None

    @staticmethod
    def _without_returns(
        stages: Stages, parts: Sequence[Part], kept: Callable[[Sequence[Part]], Part]
    ) -> Stages | None:
        """Leave every peer that a way comes back to only one of its parts. None if there is no such peer."""
        visits: dict[int, list[Part]] = {}
        for part in parts:
            visits.setdefault(int(stages.peer[part.server]), []).append(part)
        if len(visits) == len(parts):
            return None
        start, stop = stages.start.copy(), stages.stop.copy()
        for peer, mine in visits.items():
            if len(mine) > 1:
                one = kept(mine)
                start[stages.peer == peer] = stop[stages.peer == peer] = 0
                start[one.server], stop[one.server] = one.start, one.stop
        return replace(stages, start=start, stop=stop)


_KEPT: tuple[Callable[[Sequence[Part]], Part], ...] = (
    lambda parts: max(parts, key=lambda part: part.stop - part.start),
    lambda parts: parts[0],  # the blocks between may be pinned, and those behind to be had from others
    lambda parts: parts[-1],
)


def _measured(announcements: Sequence[Announcement]) -> tuple[Ints, Ints, Floats]:
    """Return who measured one-way trips, to whom, and how long they are in ms."""
    by_prefix = {a.public_key[:PREFIX]: index for index, a in enumerate(announcements)}
    said = [rtt for a in announcements for rtt in a.rtts]
    source = np.repeat(np.arange(len(announcements)), [len(a.rtts) for a in announcements])
    target = np.fromiter(map(by_prefix.get, map(itemgetter(0), said), repeat(-1)), np.int64, len(said))
    trip_ms = np.fromiter(map(itemgetter(1), said), np.float64, len(said)) / 2
    usable = target >= 0  # the others are not among these servers
    return source[usable], target[usable], trip_ms[usable]


# --- estimates -------------------------------------------------------------------------------------------------------


def _estimates(hops: Sequence[Hop], request: Request) -> Iterable[HopEstimate]:
    previous = None
    for hop in hops:
        here = hop.announcement
        trip_ms = _client_trip_ms(here, request) if previous is None else _trip_ms(previous, here)
        compute_ms = len(hop.blocks) * _block_ms(here)
        yield HopEstimate(hop.peer_id, hop.blocks, trip_ms, compute_ms, compute_ms * here.load, HOP_MS)
        previous = here


def _block_ms(announcement: Announcement) -> float:
    """What a token takes through one block of a server that has nothing else to do."""
    tokens_per_s = announcement.decode_tps or UNMEASURED_TPS
    return 1000.0 / tokens_per_s / (announcement.blocks.stop - announcement.blocks.start)


def _trip_ms(one: Announcement, other: Announcement) -> float:
    """One way between two peers; the longest that they say: nobody comes nearer by saying so."""
    said = [
        ms
        for here, there in ((one, other), (other, one))
        for peer, ms in here.rtts
        if peer == there.public_key[:PREFIX]
    ]
    return max(said, default=UNKNOWN_RTT_MS) / 2


def _client_trip_ms(announcement: Announcement, request: Request) -> float:
    return request.client_rtts.get(announcement.public_key, request.client_rtt_ms) / 2


def _has_room(announcement: Announcement, request: Request) -> bool:
    return announcement.free_tokens >= request.positions_needed


def _covered(wanted: Blocks, offers: Sequence[_Offer]) -> bool:
    return not missing_blocks(wanted, (offer.blocks for offer in offers))


# --- explanations ----------------------------------------------------------------------------------------------------


def _no_route(request: Request) -> NoRoute:
    """Say which blocks are missing, and what stands in the way."""
    wanted = request.wanted
    reasons = [(signed.announcement, _Sieve(request).reason(signed.announcement)) for signed in request.servers]
    usable = [a for a, reason in reasons if reason is None]
    missing = missing_blocks(wanted, (blocks for a in usable for blocks in _offers(a, request)))
    if not missing:
        classes = ", ".join(sorted({a.numeric_class for a in usable}))
        return NoRoute(request.model, tuple(wanted), f"no single numeric class covers them ({classes})")

    def held_by(*excused: Reason | None) -> set[str]:
        """Return the classes that would do if these reasons did not count."""
        held = [a for a, reason in reasons if reason in excused]
        return set() if missing_blocks(wanted, (a.span for a in held)) else {a.numeric_class for a in held}

    if request.pins and held_by(None, Reason.NOT_TRUSTED):
        return NoRoute(request.model, missing, "only peers serve them that trusted_peers does not name for them")
    if held_by(None, Reason.BLOCKED, Reason.NOT_ALLOWED):
        return NoRoute(request.model, missing, "only peers outside allowed_peers or in blocked_peers serve them")
    if others := held_by(None, Reason.OTHER_CLASS) - {a.numeric_class for a in usable}:
        named = ", ".join(sorted(others))
        why = f"nobody serves them in {request.numeric_class or request.dtype}, but in {named}"
        return NoRoute(request.model, missing, why + ": pass that as dtype" * (request.numeric_class is None))
    return NoRoute(request.model, missing)


def _rejected(route: Route) -> tuple[Rejected, ...]:
    """Say of every server that is not in the route why, those that nearly were first."""
    request = route.request
    unusable = _Sieve(request).reason
    numeric_class = route[0].announcement.numeric_class
    usable = [
        s for s in request.servers if unusable(s.announcement) is None and s.announcement.numeric_class == numeric_class
    ]
    through = _through(request, usable)
    chosen = {(hop.announcement.public_key, hop.announcement.blocks) for hop in route}
    found = []
    for signed in request.servers:
        a = signed.announcement
        if (a.public_key, a.blocks) in chosen:
            continue
        reason = unusable(a)
        slower_ms = through.get((a.public_key, a.blocks), np.inf) - route.estimate_ms
        if reason is None:
            reason = _unchosen(a, request, numeric_class, slower_ms)
        found.append(Rejected(a.peer_id, a.span, reason, _detail(reason, a, slower_ms), slower_ms))
    order = list(Reason)
    return tuple(sorted(found, key=lambda one: (order.index(one.reason), one.slower_ms, one.peer_id)))


def _through(request: Request, usable: Sequence[SignedAnnouncement]) -> dict[tuple[str, tuple[int, int]], float]:
    """Return the time per token of the best route through each server."""
    pipeline = _Pipeline(request, usable)
    if not _covered(request.wanted, pipeline.servers):
        return {}
    through_ms = Search(pipeline.stages, pipeline.limit).through().tolist()
    found: dict[tuple[str, tuple[int, int]], float] = {}
    for offer, ms in zip(pipeline.servers, through_ms, strict=True):
        place = (offer.announcement.public_key, offer.announcement.blocks)
        found[place] = min(ms, found.get(place, np.inf))
    return found


def _unchosen(announcement: Announcement, request: Request, numeric_class: str, slower_ms: float) -> Reason:
    if announcement.numeric_class != numeric_class:
        return Reason.OTHER_CLASS
    if not _has_room(announcement, request):
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
    }
    return details.get(reason, "")
