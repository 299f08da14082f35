"""Planning a route: from announcements to the spans that a session runs through. Pure."""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from swarm.blocks import Blocks, missing_blocks
from swarm.dht.records import Announcement, SignedAnnouncement
from swarm.errors import NoRoute

HOP_MS = 10.0  # what one more hop is assumed to cost, until round trips are known
UNMEASURED_TPS = 20.0  # what a server is assumed to do that has not measured itself yet


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
) -> tuple[Hop, ...]:
    """Return the hops that cover `wanted` in the least estimated time per token.

    It is a shortest path over block boundaries: from boundary b, every span that holds block b leads to any later
    boundary up to its end. A part of a span costs its share of the time that the server needs for a token, plus HOP_MS.
    Two numeric classes are never mixed; the better one is taken. dtype: only classes that compute in it, as "float32".
    numeric_class: only this one, as a route needs it that is repaired. avoid: peer ids, or processes as in
    `Hop.process`, that are left out. Raises NoRoute with the blocks that nobody serves.
    """
    usable = [s for s in servers if s.announcement.state == "online" and not _avoided(s.announcement, avoid)]
    classes = sorted({s.announcement.numeric_class for s in usable})
    others = [
        name
        for name in classes
        if (dtype is not None and name.partition("+")[0] != dtype) or name != (numeric_class or name)
    ]
    classes = [name for name in classes if name not in others]
    plans = []
    for name in classes:
        candidates = [s for s in usable if s.announcement.numeric_class == name]
        if (plan := _cheapest(wanted, candidates)) is not None:
            plans.append(plan)
    if plans:
        return min(plans, key=lambda plan: plan[0])[1]
    held = [s.announcement.span for s in usable if s.announcement.numeric_class in classes]
    missing = missing_blocks(wanted, held)
    if missing and others and not missing_blocks(wanted, (s.announcement.span for s in usable)):
        raise NoRoute(model, missing, f"nobody serves them in {dtype}, but in {', '.join(others)}: pass that as dtype")
    if missing:
        raise NoRoute(model, missing)
    raise NoRoute(model, tuple(wanted), f"no single numeric class covers them ({', '.join(classes)})")


def _avoided(announcement: Announcement, avoid: Collection[str]) -> bool:
    return announcement.peer_id in avoid or process_of(announcement) in avoid


def _cheapest(wanted: Blocks, servers: list[SignedAnnouncement]) -> tuple[float, tuple[Hop, ...]] | None:
    """Dijkstra over the boundaries; ties fall to fewer hops, then to the first peer id: plans are repeatable."""
    best: dict[int, tuple[float, int]] = {}
    came: dict[int, tuple[int, SignedAnnouncement]] = {}
    queue: list[tuple[float, int, int]] = [(0.0, 0, wanted.start)]
    fastest_first = sorted(servers, key=lambda s: (_block_ms(s.announcement), s.announcement.peer_id))
    starts = sorted({s.announcement.blocks.start for s in servers})
    while queue:
        cost, hops, at = heapq.heappop(queue)
        if at == wanted.stop:
            route = _once_each(_walk_back(wanted, came))
            return sum(map(_cost_ms, route)), route
        if best.get(at, (cost, hops)) < (cost, hops):
            continue
        for to, server in _useful_ends(at, wanted.stop, starts, fastest_first):
            reached = (cost + _cost_ms(Hop(server, Blocks(at, to))), hops + 1)
            if to not in best or reached < best[to]:
                best[to] = reached
                came[to] = (at, server)
                heapq.heappush(queue, (*reached, to))
    return None


def _useful_ends(
    at: int, stop: int, starts: list[int], fastest_first: list[SignedAnnouncement]
) -> Iterator[tuple[int, SignedAnnouncement]]:
    """Where it can pay to leave the spans that hold block `at`, and the fastest of those that get there.

    That is at a span's end, or where another one begins. A slower span adds only what lies beyond the faster ones.
    """
    reached = at
    for server in fastest_first:
        span = server.announcement.span
        end = min(span.stop, stop)
        if at in span and end > reached:
            yield from ((to, server) for to in starts[bisect_right(starts, reached) : bisect_left(starts, end)])
            yield end, server
            reached = end


def _once_each(route: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """Let a span that a route comes back to keep everything between: a peer holds one part of a session."""
    for index, hop in enumerate(route):
        last = max(i for i, other in enumerate(route) if other.signed is hop.signed)
        if last > index:
            whole = Hop(hop.signed, Blocks(hop.blocks.start, route[last].blocks.stop))
            return (*route[:index], whole, *_once_each(route[last + 1 :]))
    return route


def _cost_ms(hop: Hop) -> float:
    return HOP_MS + len(hop.blocks) * _block_ms(hop.announcement)


def _block_ms(announcement: Announcement) -> float:
    tokens_per_s = announcement.decode_tps or UNMEASURED_TPS
    return 1000.0 / tokens_per_s / len(announcement.span) * (1.0 + announcement.load)


def _walk_back(wanted: Blocks, came: dict[int, tuple[int, SignedAnnouncement]]) -> tuple[Hop, ...]:
    hops = []
    to = wanted.stop
    while to != wanted.start:
        at, server = came[to]
        hops.append(Hop(server, Blocks(at, to)))
        to = at
    return tuple(reversed(hops))
