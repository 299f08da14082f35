"""Why a route is as it is: what each hop is estimated to cost, and why every other server is not in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from swarm.blocks import Blocks

ROWS_MAX = 50  # rejected servers that the text lists

Optimize = Literal["latency", "throughput"]


class Reason(StrEnum):
    """Why a server is not in a route."""

    SLOWER = "slower"  # the best route through it takes longer
    NO_WAY = "no way"  # no route through it, or none whose slowest server is as fast
    NO_ROOM = "no room"  # too little free KV memory, where others have enough
    AVOIDED = "avoided"  # it failed or refused lately, or the session has it already
    BLOCKED = "blocked"  # by `blocked_peers`
    NOT_ALLOWED = "not allowed"  # not among `allowed_peers`
    NOT_TRUSTED = "not trusted"  # `trusted_peers` names others for these blocks
    NOT_ONLINE = "not online"  # it joins or leaves
    OTHER_CLASS = "other class"  # it computes in another numeric class
    ELSEWHERE = "elsewhere"  # it holds none of the wanted blocks


@dataclass(frozen=True, slots=True)
class HopEstimate:
    """What one hop adds to a token, in milliseconds. trip_ms: one way, from the hop before or from the client."""

    peer_id: str
    blocks: Blocks
    trip_ms: float
    compute_ms: float
    queue_ms: float
    software_ms: float

    @property
    def stage_ms(self) -> float:
        """How long it is busy with a token."""
        return self.compute_ms + self.queue_ms

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.trip_ms + self.stage_ms + self.software_ms


@dataclass(frozen=True, slots=True)
class Rejected:
    """A server that is not in the route. slower_ms: by how much the best route through it is, where it is usable."""

    peer_id: str
    blocks: Blocks
    reason: Reason
    detail: str
    slower_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class Explanation:
    """A route's estimate in its parts, and the servers that are not in it, those that nearly were first."""

    optimize: Optimize
    hops: tuple[HopEstimate, ...]
    home_ms: float  # one way, from the last hop to the client
    rejected: tuple[Rejected, ...]

    @property
    def estimate_ms(self) -> float:
        """Estimated time of one token, once around the route."""
        return sum(hop.total_ms for hop in self.hops) + self.home_ms

    @property
    def slowest_ms(self) -> float:
        """How long the slowest server of the route is busy with a token."""
        return max(hop.stage_ms for hop in self.hops)

    def __str__(self) -> str:
        lines = [
            f"{len(self.hops)} hops, {self.estimate_ms:.1f} ms a token by estimate, planned for {self.optimize}",
            "",
            *_table(
                ("chosen", "blocks", "trip ms", "compute ms", "queue ms", "software ms", "together ms"),
                [
                    (
                        hop.peer_id,
                        str(hop.blocks),
                        *(
                            f"{ms:.1f}"
                            for ms in (hop.trip_ms, hop.compute_ms, hop.queue_ms, hop.software_ms, hop.total_ms)
                        ),
                    )
                    for hop in self.hops
                ],
            ),
            f"and {self.home_ms:.1f} ms from the last hop to the client",
        ]
        if self.rejected:
            rows = [(one.peer_id, str(one.blocks), one.reason.value, one.detail) for one in self.rejected[:ROWS_MAX]]
            lines += ["", *_table(("not chosen", "blocks", "reason", ""), rows)]
        if len(self.rejected) > ROWS_MAX:
            lines.append(f"and {len(self.rejected) - ROWS_MAX} more")
        return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows)]
