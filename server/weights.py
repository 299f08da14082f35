"""The weight of a server's record in a choice of blocks. Pure.

A record is free, so a server's weight is the power that it has shown to the server that looks. A block has a fair part
of all shown power. Claims alone, however many, add at most `unproven_share` of that part to it.

    shown by a probe    its claim, if that is within `slack` of what it showed; else what it showed
                        and no more than `spread_max` times the median power
    nothing yet         its claim, and the median power at most         } all of these together
    silent              a hundredth of that                             } within `unproven_share`
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from swarm.activations import NumericClass, tier_of
from swarm.blocks import Blocks
from swarm.dht.records import Announcement
from swarm.limits import limit
from swarm.server.placement import Holder, served


@dataclass(frozen=True, slots=True)
class WeightLimits:
    """How far claims count."""

    slack: float = limit(2.0, "times", "power that a probe showed; a greater claim counts as that power")
    spread_max: float = limit(20.0, "times", "the median power; a server with more counts as that much")
    silent_share: float = limit(0.01, "share", "of its claim, and of the median power, that a silent server may add")
    unproven_share: float = limit(
        0.1, "share", "of a block's fair part of the proven power; all unproven claims together add so much at most"
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """A record's statement of a server's span. tps: tokens/s through it; None where it has not measured yet."""

    key: str  # the public key, hex
    blocks: Blocks
    tps: float | None
    automatic: bool = False

    @property
    def power(self) -> float | None:
        """Block-tokens per second."""
        return None if self.tps is None else self.tps * len(self.blocks)


Proven = Mapping[str, float]
"""By public key, the block-tokens/s that a server has shown; 0 for a silent one; infinite for one that is believed."""


def holders_of(
    announcements: Iterable[Announcement],
    proven: Proven,
    numeric_class: NumericClass | None = None,
    limits: WeightLimits = WeightLimits(),
) -> tuple[Holder, ...]:
    """Return the servers that hold or will soon hold blocks: online or joining, of the tier of a numeric class."""
    tier = None if numeric_class is None else tier_of(str(numeric_class))
    there = [a for a in announcements if a.state in {"online", "joining"} and tier in {None, tier_of(a.numeric_class)}]
    there.sort(key=lambda a: (a.public_key, a.span))
    claims = [Claim(a.public_key, a.span, a.decode_tps, a.automatic) for a in there]
    return weighed(max((a.n_blocks for a in there), default=0), claims, proven, limits)


def weighed(
    n_blocks: int, claims: Sequence[Claim], proven: Proven, limits: WeightLimits = WeightLimits()
) -> tuple[Holder, ...]:
    """Return the claims with their weights, in their order. The claims of one key share its shown power."""
    records = Counter(claim.key for claim in claims)
    shown = [proven.get(claim.key, 0.0) for claim in claims]
    known = [believed(claim, power, limits) for claim, power in zip(claims, shown, strict=True) if power]
    measured = [power for power in known if power is not None]
    typical = median(measured or [c.power for c in claims if c.power is not None] or [1.0])
    holders = []
    for claim, power in zip(claims, shown, strict=True):
        if power:
            own = believed(claim, power, limits)
            weight = min(typical, power) if own is None else min(own, limits.spread_max * typical)
        else:
            weight = min(typical if claim.power is None else claim.power, typical)
            weight *= limits.silent_share if claim.key in proven else 1.0
        tps = weight / records[claim.key] / len(claim.blocks)
        holders.append(Holder(claim.key, claim.blocks, tps, claim.automatic, proven=power > 0))
    return _bounded(n_blocks, holders, limits)


def believed(claim: Claim, shown: float, limits: WeightLimits = WeightLimits()) -> float | None:
    """Return the block-tokens/s of a claim. shown: by a probe. None where none are claimed."""
    if claim.power is None:
        return None
    return claim.power if claim.power <= limits.slack * shown else shown


def _bounded(n_blocks: int, holders: Sequence[Holder], limits: WeightLimits) -> tuple[Holder, ...]:
    """Return the holders; those without proof have less, where they would add too much to a block together."""
    fair = sum(holder.power for holder in holders if holder.proven) / max(1, n_blocks)
    claimed = served(n_blocks, [holder for holder in holders if not holder.proven])

    def bounded(holder: Holder) -> Holder:
        most = claimed[holder.blocks.start : holder.blocks.stop].max()
        share = min(1.0, limits.unproven_share * fair / max(most, math.ulp(0.0)))
        tps = holder.tps * float(share)
        return Holder(holder.key, holder.blocks, tps, holder.automatic, proven=False)

    return tuple(holder if holder.proven or not fair else bounded(holder) for holder in holders)
