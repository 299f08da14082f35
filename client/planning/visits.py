"""Ways that visit every peer once. Pure.

A hop holds one part of a session, so a route cannot come back to a peer. `Search` does not know that: leaving a slow
server for a fast one in the middle of its span, and coming back, is the cheapest way at times. So the cheapest way is
tried first. If it comes back to a peer, that peer is confined to one of its parts, and the search runs again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from swarm.client.planning.search import Search
from swarm.client.planning.stages import Ints, Part, Stages

Keep = Callable[[Sequence[Part]], Part]  # chooses, of the parts that a way gives to one peer, the one that it keeps


def longest(parts: Sequence[Part]) -> Part:
    """Keep the part with the most blocks."""
    return max(parts, key=lambda part: part.stop - part.start)


def first(parts: Sequence[Part]) -> Part:
    """Keep the part that comes first."""
    return parts[0]


def last(parts: Sequence[Part]) -> Part:
    """Keep the part that comes last."""
    return parts[-1]


def ways(
    stages: Stages,
    limit: Ints | None,
    best: Sequence[Part],
    keeps: Sequence[Keep],
    tries: int,
    otherwise: Iterable[Sequence[Part]],
) -> Iterator[Sequence[Part]]:
    """Yield `best`, the cheapest way, then cheap ones with peers confined. The first that visits once is the last.

    keeps: tried in turn, `tries` ways with each. otherwise: yielded where every one of these comes back to a peer.
    """
    for keep in keeps:
        for parts in islice(_confining(stages, limit, best, keep), tries):
            yield parts
            if visits_once(stages, parts):
                return
    yield from otherwise


def _confining(stages: Stages, limit: Ints | None, best: Sequence[Part], keep: Keep) -> Iterator[Sequence[Part]]:
    """Yield `best`, then the cheapest way with the peers confined that the way before came back to, and so on."""
    parts: Sequence[Part] | None = best
    while parts is not None:
        yield parts
        stages = _confined(stages, _returning(stages, parts), keep)
        parts = Search(stages, limit).path()


def merged(parts: Sequence[Part]) -> list[Part]:
    """Give a server that a way comes back to all blocks in between."""
    whole: list[Part] = []
    while parts:
        server = parts[0].server
        returned = max(i for i, part in enumerate(parts) if part.server == server)
        whole.append(Part(server, parts[0].start, parts[returned].stop))
        parts = parts[returned + 1 :]
    return whole


def visits_once(stages: Stages, parts: Sequence[Part]) -> bool:
    """Return whether no peer has two parts."""
    return not _returning(stages, parts)


def _returning(stages: Stages, parts: Sequence[Part]) -> dict[int, list[Part]]:
    """Return the peers that a way comes back to, each with its parts."""
    visits: dict[int, list[Part]] = {}
    for part in parts:
        visits.setdefault(int(stages.peer[part.server]), []).append(part)
    return {peer: visited for peer, visited in visits.items() if len(visited) > 1}


def _confined(stages: Stages, returning: dict[int, list[Part]], keep: Keep) -> Stages:
    """Leave each of these peers one of its parts."""
    start, stop = stages.start.copy(), stages.stop.copy()
    for peer, visited in returning.items():
        kept = keep(visited)
        start[stages.peer == peer] = stop[stages.peer == peer] = 0
        start[kept.server], stop[kept.server] = kept.start, kept.stop
    return replace(stages, start=start, stop=stop)
