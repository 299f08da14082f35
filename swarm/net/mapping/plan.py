"""When a lease is renewed, and when it is given up: pure, by times that are passed in."""

from dataclasses import dataclass, replace

from swarm.net.mapping.limits import MappingLimits


@dataclass(frozen=True, slots=True)
class Lease:
    """What a router granted. lifetime_s: of the port that has the shortest. failures: of renewals, in a row."""

    at_s: float
    lifetime_s: int
    failures: int = 0

    @property
    def ends_s(self) -> float:
        """The time at which the router stops forwarding."""
        return self.at_s + self.lifetime_s

    def failed(self) -> "Lease":
        """Return this lease after one more renewal that failed."""
        return replace(self, failures=self.failures + 1)


def is_lost(lease: Lease, now_s: float, limits: MappingLimits) -> bool:
    """Tell whether its ports are no longer to be counted on."""
    return lease.failures >= limits.failures_max or now_s >= lease.ends_s


def next_s(lease: Lease | None, now_s: float, limits: MappingLimits) -> float:
    """Return the seconds until the router is to be asked again; None: it maps nothing."""
    if lease is None:
        return limits.again_s
    if lease.failures:
        return max(0.0, min(limits.retry_s, lease.ends_s - now_s))
    return max(0.0, min(limits.renew_s, lease.lifetime_s / 2) - (now_s - lease.at_s))
