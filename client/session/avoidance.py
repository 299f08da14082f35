"""The processes and edges that a client does without for now: after each failure for twice as long.

If several hops fall silent, and no peer is heard since, the client itself is cut off. Until it hears from a peer again
it holds nothing against any hop.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from swarm.client.planning.route import process_of
from swarm.client.session.limits import AvoidanceLimits
from swarm.client.session.standing import Edge
from swarm.dht.records import SignedAnnouncement


@dataclass(slots=True)
class _Entry:
    failures: int
    failed_at: float
    until: float


@dataclass(frozen=True, slots=True)
class _Lost:
    """A silent hop. before: its entry until then."""

    since: float
    before: _Entry | None


class Avoidance:
    """What a client's sessions have learned, by process: a restarted server is another one (see `Hop.process`)."""

    def __init__(
        self, clock: Callable[[], float], heard_at: Callable[[], float], limits: AvoidanceLimits | None = None
    ) -> None:
        """clock: seconds, monotonic. heard_at: when, by that clock, bytes last came from any peer."""
        self._limits = limits or AvoidanceLimits()
        self._clock = clock
        self._heard_at = heard_at
        self.banned: frozenset[str] = frozenset()  # ids of peers whose outputs are wrong: they are never taken
        self._entries: dict[str | Edge, _Entry] = {}
        self._lost: dict[str, _Lost] = {}

    @property
    def cut_off(self) -> bool:
        """Whether this client itself has lost its connection. Of one silent hop alone that cannot be told."""
        heard_at = self._heard_at()
        return sum(lost.since > heard_at for lost in self._lost.values()) >= self._limits.cut_off_lost

    def lost(self, process: str, since: float) -> None:
        """A hop that was connected has given no sign of life since it was asked for one. Told before `failed`."""
        heard_at, before = self._heard_at(), self._entries.get(process)
        self._lost = {key: lost for key, lost in self._lost.items() if lost.since > heard_at}
        self._lost.setdefault(process, _Lost(since, replace(before) if before is not None else None))
        if self.cut_off:
            for key, lost in self._lost.items():  # the first ones have been blamed
                self._entries.pop(key, None)
                if lost.before is not None:
                    self._entries[key] = lost.before

    def failed(self, process: str) -> None:
        """It ended, broke or stalled: avoid it for avoid_s * 2 ** (earlier failures)."""
        if not self.cut_off:
            self._strike(process, self._limits.avoid_s)

    def declined(self, process: str, for_s: float) -> None:
        """It has no room, or is leaving: not a failure, and asking again before `for_s` have passed is of no use."""
        now = self._clock()
        entry = self._entry(process, now)
        entry.until = max(entry.until, now + min(for_s, self._limits.avoid_s_max))

    def ban(self, peer: str) -> None:
        """Others contradict it: leave it out for good."""
        self.banned |= {peer}

    def block(self, edge: Edge) -> None:
        """Two hops that both live cannot reach each other: the client relays this edge."""
        self._strike(edge, self._limits.relay_s)

    def blocked(self, edge: Edge) -> bool:
        """Whether this edge's traffic goes through the client."""
        entry = self._entries.get(edge)
        return entry is not None and self._clock() < entry.until

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes to avoid now, the latest failure first."""
        now = self._clock()
        found = [
            (entry.failed_at, key) for key, entry in self._entries.items() if isinstance(key, str) and now < entry.until
        ]
        return tuple(key for _, key in sorted(found, reverse=True))

    def ended(self, servers: Iterable[SignedAnnouncement], wall_now: float) -> tuple[str, ...]:
        """Return the other processes of these servers that have announced nothing since they failed, the latest first.

        Most of them have ended. A server announces itself several times within the life of a record, so one that lives
        is soon taken again. One whose clock is ahead of `wall_now` may seem to have announced itself since.
        """
        now, newest, of = self._clock(), dict[str, float](), self._entries
        failed = {k: e.failed_at for k, e in of.items() if isinstance(k, str) and e.failures and now >= e.until}
        for each in servers if failed else ():
            if (process := process_of(each.announcement)) in failed:
                newest[process] = max(each.announcement.issued, newest.get(process, 0.0))
        found = [process for process, issued in newest.items() if wall_now - issued >= now - failed[process]]
        return tuple(sorted(found, key=lambda process: (failed[process], process), reverse=True))

    @property
    def failures(self) -> dict[str, int]:
        """How often each process has failed; a failure is forgotten if no other follows within `forget_s`."""
        return {key: entry.failures for key, entry in self._entries.items() if isinstance(key, str) and entry.failures}

    def _strike(self, key: str | Edge, first_s: float) -> None:
        now = self._clock()
        entry = self._entry(key, now)
        entry.until = now + min(self._limits.avoid_s_max, first_s * 2.0 ** min(entry.failures, 32))
        entry.failures += 1
        entry.failed_at = now

    def _entry(self, key: str | Edge, now: float) -> _Entry:
        if len(self._entries) >= self._limits.entries_max:
            self._entries = {k: e for k, e in self._entries.items() if now < e.until}
        while len(self._entries) >= self._limits.entries_max:
            del self._entries[next(iter(self._entries))]  # the oldest
        entry = self._entries.get(key)
        if entry is None or (now > entry.failed_at + self._limits.forget_s and now > entry.until):
            entry = self._entries[key] = _Entry(0, now, now)
        return entry
