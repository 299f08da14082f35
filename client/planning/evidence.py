"""The experience that one client has of servers, beside their claims. Values only: `Router` keeps the latest."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarm.dht.records import Announcement
from swarm.limits import limit

Name = TypeVar("Name")
Value = TypeVar("Value")
Key = tuple[str, str]
"""A process: the peer's public key, and the process's channel key, both hex. It is quicker to find than an id."""


Edge = tuple[Key, Key]
"""Two processes between which activations travel, in either direction; the smaller key first."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The findings of one session about its route.

    blocks: the time in ms of one token in one block of each process, at most. trips: of one way between two, at most.
    """

    blocks: Mapping[Key, float]
    trips: Mapping[Edge, float]


@dataclass(frozen=True, slots=True)
class EvidenceLimits:
    """How much of other servers a client remembers."""

    processes_max: int = limit(1024, "processes", "of which use, or audits, have shown anything; the latest stay")
    trips_max: int = limit(1024, "trips", "that use has shown; the latest stay")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The findings of sessions and audits about some processes.

    blocks, trips: as in `Shown`, by the latest session through each. confirmed: processes whose outputs an audit has
    found right. All the latest last. salt: decides the order of servers that cost the same. It differs from client to
    client, so that they do not all take the same server.
    """

    blocks: Mapping[Key, float] = field(default_factory=dict)
    trips: Mapping[Edge, float] = field(default_factory=dict)
    confirmed: Mapping[Key, None] = field(default_factory=dict)
    salt: bytes = b""
    limits: EvidenceLimits = field(default_factory=EvidenceLimits)

    def place(self, announcement: Announcement) -> bytes:
        """Return the place of a server among those that cost the same."""
        return hashlib.blake2b(announcement.public_key.encode(), digest_size=8, key=self.salt).digest()

    def used(self, shown: Shown, salt: bytes) -> "Evidence":
        """Take a session's findings.

        salt: a fresh one. It counts where a process is new to this client, so that the next route tries others of those
        that cost the same. A route that shows nothing new is kept: its servers may have kept a prompt's beginning.
        """
        is_news = any(key not in self.blocks for key in shown.blocks)
        return replace(
            self,
            blocks=_latest(self.blocks, shown.blocks, self.limits.processes_max),
            trips=_latest(self.trips, shown.trips, self.limits.trips_max),
            salt=salt if is_news else self.salt,
        )

    def audited(self, right: Iterable[Key], blamed: Iterable[Key]) -> "Evidence":
        """Take an audit's verdict: outputs that were right, and processes that are wrong or may be."""
        latest = _latest(self.confirmed, dict.fromkeys(right), self.limits.processes_max)
        gone = set(blamed)
        return replace(self, confirmed={key: None for key in latest if key not in gone})


def key_of(announcement: Announcement) -> Key:
    """Name the process that announces, for evidence."""
    return announcement.public_key, announcement.channel_key


def edge_of(one: Announcement, other: Announcement) -> Edge:
    """Name the trip between two processes, for evidence."""
    keys = key_of(one), key_of(other)
    return keys if keys[0] < keys[1] else keys[::-1]


def _latest(known: Mapping[Name, Value], news: Mapping[Name, Value], most: int) -> dict[Name, Value]:
    """Put news behind the rest, and forget the oldest."""
    every = {name: value for name, value in known.items() if name not in news} | dict(news)
    return dict(list(every.items())[-most:])
