"""What a gateway may have that the operator knows. Light: the command reads it before it imports torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.server.limits import AccountLimits


@dataclass(frozen=True, slots=True)
class GatewayAllowance:
    """More than other peers may have, for a gateway that the operator knows: it is one peer for many people."""

    sessions: int
    openings_per_s: float
    steps_per_s: float

    def of(self, limits: "AccountLimits") -> "AccountLimits":
        """Return the limits of its account: the bursts keep their proportion to the rates."""
        openings, steps = self.openings_per_s / limits.openings_per_s, self.steps_per_s / limits.steps_per_s
        return replace(
            limits,
            openings_per_s=self.openings_per_s,
            openings_burst=max(limits.openings_burst, limits.openings_burst * openings),
            steps_per_s=self.steps_per_s,
            steps_burst=max(limits.steps_burst, limits.steps_burst * steps),
            tokens_per_s=max(limits.tokens_per_s, limits.tokens_per_s * steps),
            tokens_burst=max(limits.tokens_burst, limits.tokens_burst * steps),
        )
