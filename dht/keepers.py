"""The nodes that keep a node's own records, remembered for a while: a refresh costs each of them one call, not two."""

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """How long the nodes around a key are taken to be the same."""

    known_s: float = limit(110.0, "s", "then a refresh searches for the nodes again: one in six")
    keys_max: int = limit(256, "keys", "remembered; the oldest is searched for again")
    few: int = limit(10, "nodes", "around a key; fewer are searched for each time: the swarm is small or just joined")
    silent_share: float = limit(0.2, "share", "of them without an answer; then they are searched for again at once")


@dataclass(slots=True)
class Keepers:
    """By key, the nodes that were found last."""

    limits: KeeperLimits = KeeperLimits()
    _known: dict[bytes, tuple[tuple[bytes, ...], float]] = field(default_factory=dict)

    def known(self, key: bytes, now: float) -> tuple[bytes, ...]:
        """Return the nodes that were found lately around a key; none if that is to be done now. now: seconds."""
        peers, until = self._known.get(key, ((), 0.0))
        return peers if now < until else ()

    def learn(self, key: bytes, peers: tuple[bytes, ...], now: float) -> None:
        """Take in the result of a search."""
        self._known.pop(key, None)
        if len(peers) >= self.limits.few:
            self._known[key] = peers, now + self.limits.known_s
        while len(self._known) > self.limits.keys_max:
            del self._known[next(iter(self._known))]

    def note(self, key: bytes, silent: Collection[bytes]) -> None:
        """Forget the nodes around a key if too many of them do not answer."""
        peers, _ = self._known.get(key, ((), 0.0))
        if sum(peer in silent for peer in peers) > self.limits.silent_share * len(peers):
            del self._known[key]
