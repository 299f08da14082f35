"""Which connections may come, and which channel ends for a new one: decisions without sockets, loop or clock.

A connection has proven nothing yet, so its cost is bounded: by how often any is let in, by where it comes from,
and by their number. Identities are free, so among channels the source counts as well as the peer.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Generic, Protocol, TypeVar

from swarm.net.limits import ListenerLimits


class Present(Protocol):
    """An accepted channel, as far as admission goes."""

    peer: str
    heard_at: float


Accepted = TypeVar("Accepted", bound=Present)


@dataclass(frozen=True, slots=True)
class Entry(Generic[Accepted]):
    """Whether a proven peer's channel may stay, and which other one ends for it."""

    stays: bool
    ends: Accepted | None = None


class Admission(Generic[Accepted]):
    """The accepted channels of one listener."""

    def __init__(self, limits: ListenerLimits, channels_max: int) -> None:
        """channels_max: `limits` has the most, and a process that may have few descriptors has less."""
        self.channels: dict[Accepted, str] = {}  # with the source of each
        self.unproven: dict[Accepted, None] = {}  # the oldest first
        self.proven: defaultdict[str, dict[Accepted, bytes]] = defaultdict(dict)  # of each peer, with their processes
        self._limits = limits
        self._channels_max = channels_max

    def make_room(self, arriving: int, in_use: Collection[str]) -> Entry[Accepted]:
        """Decide whether one more connection may come. arriving: those that wait for their turn.

        in_use: peers whose channels take part in sessions.
        """
        if len(self.channels) + arriving < self._channels_max:
            return Entry(stays=True)
        ends = gives_way(self.channels, in_use, self._limits.channels_per_peer_max)
        if ends is not None:
            del self.channels[ends]  # at once: the next connection must find another one
        return Entry(ends is not None, ends)

    def begin(self, channel: Accepted, source: str) -> Accepted | None:
        """Add a channel that begins its handshake. Returns the one that ends for it: it has had the longest time."""
        oldest = next(iter(self.unproven)) if len(self.unproven) >= self._limits.handshakes.unproven_max else None
        self.unproven[channel] = None
        self.channels[channel] = source
        return oldest

    def greeted(self, channel: Accepted) -> None:
        """The handshake of a channel is over, one way or the other."""
        self.unproven.pop(channel, None)

    def prove(self, channel: Accepted, process: bytes) -> Entry[Accepted]:
        """Add a proven peer's channel: of many, a new one ends the one that was silent for longest.

        A peer may have lost the ones before without notice, and minutes can pass before this side finds out. Each
        process makes a channel key at its start, and a peer can make as many as it likes: so both are bounded.
        """
        limits, mine = self._limits, self.proven[channel.peer]
        crowd = [known for known, its in mine.items() if its == process]
        if len(crowd) < limits.channels_per_process_max:
            crowd = list(mine) if len(mine) >= limits.channels_per_peer_max else []
        silent = min(crowd, key=lambda known: known.heard_at, default=None)
        if silent is not None:
            if channel.heard_at - silent.heard_at < limits.silent_s:
                return Entry(stays=False)
            del mine[silent]
        mine[channel] = process
        return Entry(True, silent)

    def moved(self, channel: Accepted, source: str) -> None:
        """A channel comes from somewhere else now."""
        if channel in self.channels:
            self.channels[channel] = source

    def forget(self, channel: Accepted) -> None:
        """A channel has ended."""
        self.channels.pop(channel, None)
        mine = self.proven.get(channel.peer)
        if mine is not None:
            mine.pop(channel, None)
            if not mine:
                del self.proven[channel.peer]

    def idle(self, now: float, in_use: Collection[str]) -> list[Accepted]:
        """Return the channels that are silent for too long and take part in no session."""
        limit_s = self._limits.idle_s
        return [each for each in self.channels if now - each.heard_at > limit_s and each.peer not in in_use]


def gives_way(channels: Mapping[Accepted, str], in_use: Collection[str], channels_per_peer_max: int) -> Accepted | None:
    """Return which one of too many channels ends for a new one; None if all are in use, and no source has so many.

    channels: with the source of each. Identities are free, so a peer that has taken too much is told by its source:
    the source with the most channels that are not in use loses the one that is silent for longest. A source that has
    more than half of all comes first, and loses one even if they are all in use; so does the largest one with more than
    `channels_per_peer_max` where there is nothing else: no source keeps all others out.
    """
    counts = Counter(channels.values())
    crowd = {channel: source for channel, source in channels.items() if counts[source] > len(channels) // 2}
    large = {channel: source for channel, source in channels.items() if counts[source] > channels_per_peer_max}
    idle = {channel: source for channel, source in (crowd or channels).items() if channel.peer not in in_use}
    idle = idle or crowd or large
    counts = Counter(idle.values())
    most = max(counts.values(), default=0)
    silent = (channel for channel, source in idle.items() if counts[source] == most)
    return min(silent, key=lambda channel: channel.heard_at, default=None)


def source_of(host: str) -> str:
    """Return where a connection comes from: an IPv4 address, or the network of an IPv6 one."""
    return str(ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host
