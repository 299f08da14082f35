"""How long the scheduler waits, with work at hand, for sessions that are expected back. Pure.

Steps that ran together were delivered together, so their sessions' next ones come together too, as long as they travel
the same way; and a client next door is back before the next iteration has begun. Without lingering, sessions fall into
groups that take turns, each of which reads all weights for itself. Prefill lingers longer: a step that comes a moment
later would wait for the whole iteration.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass

from swarm.compute.limits import LingerLimits


@dataclass(eq=False, slots=True)
class Presence:
    """A peer's session as seen by lingering: how long it is away between its steps, and which batch it was in last."""

    owner: str = ""
    away_s: float | None = None
    batch: int = 0


class Linger:
    """Learns how soon sessions come back, and says until when to wait for them."""

    def __init__(self, limits: LingerLimits) -> None:
        self._limits = limits
        self._since: dict[Presence, float] = {}  # absent sessions: when they left
        self._batch = 0
        self._iteration_s = 0.0

    def delivered(self, sessions: Iterable[Presence], now: float, took_s: float) -> None:
        """Note that one step each of these sessions went out together, after an iteration of `took_s`."""
        self._batch += 1
        self._iteration_s = took_s
        absent_s = self._limits.absent_s
        for session in [session for session, since in self._since.items() if now - since > absent_s]:
            del self._since[session]
            session.away_s, session.batch = None, 0
        for session in sessions:
            self._since[session] = now
            session.batch = self._batch

    def arrived(self, session: Presence, now: float) -> None:
        """Note that a session has sent its next task."""
        since = self._since.pop(session, None)
        if since is None:
            return
        away_s = min(now - since, self._limits.prefill_s)  # one long absence is no rule
        expected_s = away_s if session.away_s is None else session.away_s
        if away_s < expected_s / 2:
            expected_s = away_s
        session.away_s = expected_s + self._limits.smoothing * (away_s - expected_s)

    def until(
        self, ready: Collection[Presence], since: float, now: float, replaying: Container[str] = frozenset()
    ) -> float:
        """Return until when to wait before the next iteration; `now` where no session is worth it.

        ready: the sessions that wait for a decode step; none means that prefill alone waits. since: when it began to.
        replaying: peers whose lost pasts wait, which stand still until these are back: not for the peer's other steps.
        """
        if not self._since:
            return now
        limits = self._limits
        if ready:
            limit_s, late = min(limits.step_s, limits.step_share * self._iteration_s), 1.5
        else:
            limit_s, late = min(limits.prefill_s, max(limits.prefill_min_s, self._iteration_s)), 4.0
        if now >= since + limit_s:
            return now
        batches = {session.batch for session in ready}
        until = now
        for session, left_at in self._since.items():
            if not ready and session.owner in replaying:
                continue
            away_s = limit_s if session.away_s is None else session.away_s
            soon, latest = left_at + 1.5 * away_s, min(left_at + late * away_s, since + limit_s)
            if soon <= since + limit_s and now < latest:
                until = max(until, latest)
            elif session.batch in batches:
                until = since + limit_s
        return until
