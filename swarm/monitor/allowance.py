"""The time that audits may take: a share of all time. Pure.

    credit'  =  share, up to banked_s        while no audit runs, and while one does
    credit  -=  its seconds                  when an audit has ended
    an audit begins only while credit >= 0

So within any w seconds audits run for share * w + banked_s + one audit at most, and no server spends more on them. They
run one after the other, and a step is computed by one server after the other.
"""

from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class AllowanceLimits:
    """How much audits may take."""

    share: float = limit(0.02, "of the time", "in which audits run, at most; then the next one waits")
    banked_s: float = limit(60.0, "s", "of time that was not used are kept, for an audit that takes long")


class Allowance:
    """The credit of one auditor."""

    def __init__(self, now: float, limits: AllowanceLimits = AllowanceLimits()) -> None:
        """now: seconds of a clock that only goes forward."""
        self._limits = limits
        self._credit_s, self._at = 0.0, now

    def spent(self, took_s: float, now: float) -> None:
        """Note an audit that has ended."""
        self._credit_s = self._credit(now) - took_s
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return how long no audit may begin; 0 if one may now."""
        return max(0.0, -self._credit(now) / self._limits.share)

    def _credit(self, now: float) -> float:
        return min(self._limits.banked_s, self._credit_s + self._limits.share * (now - self._at))
