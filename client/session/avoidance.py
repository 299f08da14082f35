"""Whom a client does without for now. After each failure for twice as long; forgotten when nothing more happens.

Where several hops fall silent and nobody is heard since, it is the client that is cut off. Until it hears from anybody
it holds nothing against anybody.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

AVOID_S = 5.0  # after the first failure
AVOID_S_MAX = 600.0
FORGET_S = 900.0  # after a failure, when none has followed
RELAY_S = 60.0  # what a blocked edge would carry goes through the client, the first time for so long
ENTRIES_MAX = 4096
CUT_OFF_LOST = 2  # hops that are silent, with nobody heard since: of one alone it cannot be told whose fault it is

Edge = tuple[str, str]  # two processes, in the order in which activations flow


@dataclass(slots=True)
class _Entry:
    failures: int
    failed_at: float
    until: float


@dataclass(frozen=True, slots=True)
class _Lost:
    """A silent hop. before: what was held against it."""

    since: float
    before: _Entry | None


class Avoidance:
    """What a client's sessions have learned, by process: one that is started again is another (see `Hop.process`)."""

    def __init__(self, clock: Callable[[], float], heard_at: Callable[[], float]) -> None:
        """clock: seconds, monotonic. heard_at: when, by that clock, anything last came from anybody."""
        self._clock = clock
        self._heard_at = heard_at
        self._entries: dict[str | Edge, _Entry] = {}
        self._lost: dict[str, _Lost] = {}

    @property
    def cut_off(self) -> bool:
        """Whether it is this client that nobody can reach."""
        heard_at = self._heard_at()
        return sum(lost.since > heard_at for lost in self._lost.values()) >= CUT_OFF_LOST

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
        """It ended, broke or stalled: avoid it for AVOID_S * 2 ** (earlier failures)."""
        if not self.cut_off:
            self._strike(process, AVOID_S)

    def declined(self, process: str, for_s: float) -> None:
        """It has no room, or is leaving: not a failure, but there is no use in asking before `for_s` are over."""
        now = self._clock()
        entry = self._entry(process, now)
        entry.until = max(entry.until, now + min(for_s, AVOID_S_MAX))

    def block(self, edge: Edge) -> None:
        """Two hops that both live cannot talk to each other: that is nobody's fault."""
        self._strike(edge, RELAY_S)

    def blocked(self, edge: Edge) -> bool:
        """Whether this edge's traffic goes through the client."""
        entry = self._entries.get(edge)
        return entry is not None and self._clock() < entry.until

    @property
    def processes(self) -> tuple[str, ...]:
        """Whom to avoid now, the latest failure first."""
        now = self._clock()
        found = [
            (entry.failed_at, key) for key, entry in self._entries.items() if isinstance(key, str) and now < entry.until
        ]
        return tuple(key for _, key in sorted(found, reverse=True))

    def _strike(self, key: str | Edge, first_s: float) -> None:
        now = self._clock()
        entry = self._entry(key, now)
        entry.until = now + min(AVOID_S_MAX, first_s * 2.0 ** min(entry.failures, 32))
        entry.failures += 1
        entry.failed_at = now

    def _entry(self, key: str | Edge, now: float) -> _Entry:
        if len(self._entries) >= ENTRIES_MAX:
            self._entries = {k: e for k, e in self._entries.items() if now < e.until}
        while len(self._entries) >= ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]  # the oldest
        entry = self._entries.get(key)
        if entry is None or (now > entry.failed_at + FORGET_S and now > entry.until):
            entry = self._entries[key] = _Entry(0, now, now)
        return entry
