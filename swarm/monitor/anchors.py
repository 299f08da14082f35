"""Anchors: which of them to ask for their load, and how they look on the page. Pure."""

import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from swarm.dht.records import Announcement
from swarm.monitor.state import API, AnchorFigures, AnchorState
from swarm.net.address import ViaAnchor
from swarm.protocol.meeting import AnchorLoad


@dataclass(frozen=True, slots=True)
class ToldLoad:
    """An anchor's load, and when it told it, in wall seconds."""

    at: float
    load: AnchorLoad


@dataclass(frozen=True, slots=True)
class NamedAnchor:
    """An anchor that records name. ways: to it, that of most servers first. servers: that answer, and name it."""

    peer: str
    ways: tuple[ViaAnchor, ...]
    servers: int


def named(records: Iterable[Announcement], online: Collection[str]) -> tuple[NamedAnchor, ...]:
    """Return the anchors that records name: at most `API.anchors_max`, those of most servers first.

    online: public keys of servers that answer. They count before the others, since any record may name any peer.
    """
    by_peer: dict[str, dict[ViaAnchor, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        for way in record.ways:
            if isinstance(way, ViaAnchor):
                by_peer[way.peer][way].add(record.public_key)
    answering = set(online)

    def votes(keys: Set[str]) -> tuple[int, int]:
        return len(keys & answering), len(keys)

    namers = {peer: set[str]().union(*ways.values()) for peer, ways in by_peer.items()}
    peers = sorted(by_peer, key=lambda peer: (votes(namers[peer]), peer), reverse=True)
    return tuple(
        NamedAnchor(
            peer,
            tuple(sorted(by_peer[peer], key=lambda way: votes(by_peer[peer][way]), reverse=True)),
            len(namers[peer] & answering),
        )
        for peer in peers[: API.anchors_max]
    )


def states(anchors: Sequence[NamedAnchor], loads: Mapping[str, ToldLoad], since: float) -> tuple[AnchorState, ...]:
    """Return the anchors as the page shows them. loads: by peer id; since: older ones do not count, in wall seconds."""
    shown = []
    for anchor in anchors:
        told = loads.get(anchor.peer)
        load = told.load if told is not None and told.at >= since else None
        if anchor.servers or load is not None:  # else only records of silent servers name it
            shown.append(
                AnchorState(
                    peer_id=anchor.peer,
                    network=place_of(anchor.ways[0].at.host),
                    servers=anchor.servers,
                    load=None if load is None else AnchorFigures(**load.model_dump(exclude={"kind"})),
                )
            )
    return tuple(shown)


def place_of(host: str) -> str:
    """Say roughly where a host is: "203.0.*.*", "2001:db8:*" or "*.example.org"."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(("*", *host.split(".")[1:][-2:]))
    if address.version == 4:
        return ".".join((*host.split(".")[:2], "*", "*"))
    return ":".join((*(part.lstrip("0") or "0" for part in address.exploded.split(":")[:2]), "*"))
