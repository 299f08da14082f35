"""Which pairs an anchor relays: a decision without sockets or loop."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from swarm.limits import limit

Pair = TypeVar("Pair", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """How much an anchor relays for others."""

    pairs_max: int = limit(128, "pairs", "relayed at one time; then one of the largest source ends, or the new one")
    pairs_per_peer_max: int = limit(16, "pairs", "of one caller, and of one hidden peer; more are refused as busy")
    pair_bytes_per_s: float = limit(4.0 * 2**20, "bytes/s", "of one pair; faster ones wait")
    pair_burst: float = limit(16.0 * 2**20, "bytes", "of one pair at once")
    bytes_per_s: float = limit(16.0 * 2**20, "bytes/s", "relayed in all; 0 relays nothing")
    burst: float = limit(32.0 * 2**20, "bytes", "relayed at once in all")
    silent_s: float = limit(120.0, "s", "a relayed pair that sends nothing for longer ends")


class Relayed(NamedTuple):
    """Two peers that are relayed, or want to be. source: of the caller."""

    caller: str
    callee: str
    source: str


@dataclass(frozen=True, slots=True)
class Room(Generic[Pair]):
    """Whether a new pair is relayed, and which other one ends for it."""

    is_there: bool
    ends: Pair | None = None


def room_for(new: Relayed, pairs: dict[Pair, Relayed], limits: RelayLimits) -> Room[Pair]:
    """Decide about a new pair. pairs: those that are relayed, the oldest first.

    Identities are free, so the caller's source counts as well. Where there are too many pairs, the newest one of the
    source that has most of them ends, if the new pair's source has fewer even then: a crowd keeps no other source out.
    """
    of_peers = Counter(peer for pair in pairs.values() for peer in (pair.caller, pair.callee))
    if max(of_peers[new.caller], of_peers[new.callee]) >= limits.pairs_per_peer_max:
        return Room(is_there=False)
    if len(pairs) < limits.pairs_max:
        return Room(is_there=True)
    of_sources = Counter(pair.source for pair in pairs.values())
    most = max(of_sources.values(), default=0)
    if of_sources[new.source] + 1 >= most:
        return Room(is_there=False)
    return Room(True, next(pair for pair in reversed(pairs) if of_sources[pairs[pair].source] == most))
