"""A route: the hops that cover a range of blocks in order, and the estimated cost of each. Values only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from swarm.blocks import Blocks
from swarm.client.planning.promise import Exactness, Held
from swarm.dht.records import Announcement, SignedAnnouncement

Optimize = Literal["latency", "throughput"]

Speed = Literal["claimed", "shown", "ordinary"]
"""Why a server's speed counts as it does: it claims no more than ordinary servers do; or it claims more, and a session
of this client has borne that out; or none has, and it counts as an ordinary one.
"""


@dataclass(frozen=True, slots=True, repr=False)
class Hop:
    """One span of a route: some blocks of a peer's span."""

    signed: SignedAnnouncement
    blocks: Blocks
    latency_ms: float | None = None  # a measured round trip to it

    @property
    def announcement(self) -> Announcement:
        """The peer's announcement."""
        return self.signed.announcement

    @property
    def peer_id(self) -> str:
        """The peer that serves it."""
        return self.announcement.peer_id

    @property
    def numeric_class(self) -> str:
        """How the peer computes, as "float32+int8"."""
        return self.announcement.numeric_class

    @property
    def process(self) -> str:
        """The process that serves it, for `avoid`."""
        return process_of(self.announcement)

    def __str__(self) -> str:
        latency = "" if self.latency_ms is None else f", {self.latency_ms:.1f} ms"
        return f"{self.peer_id} {self.blocks}{latency}"

    def __repr__(self) -> str:
        return f"<Hop {self}>"


def classes_of(hops: Iterable[Hop]) -> Held:
    """Return the numeric class in which each hop has its blocks."""
    return tuple((hop.blocks, hop.numeric_class) for hop in hops)


def load_of(hops: Iterable[Hop]) -> float:
    """Return the steps of others that the busiest hop announced when the route was planned."""
    return max((hop.announcement.load for hop in hops), default=0.0)


def step_s_of(hops: Iterable[Hop]) -> float:
    """Return how long the slowest hop takes for a step, others' steps included, by what it announced; 0 for unknown."""
    measured = ((hop.blocks, hop.announcement) for hop in hops)
    return max(
        (
            len(blocks) / len(there.span) / there.decode_tps * (1.0 + there.load)
            for blocks, there in measured
            if there.decode_tps
        ),
        default=0.0,
    )


def process_of(announcement: Announcement) -> str:
    """Name the process that announces: a peer that is started again has another channel key.

    The peer's id is a part of the name. A peer could announce another one's channel key to have that one avoided.
    """
    return f"{announcement.peer_id}/{announcement.channel_key}"


@dataclass(frozen=True, slots=True)
class HopEstimate:
    """One hop's part of a token's time, in milliseconds.

    trip_ms: one way, from the hop before or from the client. caution_ms: no part of that time; plans add it where no
    audit of this client has found the server's outputs right, and has so of others. is_confirmed: whether one has.
    """

    peer_id: str
    blocks: Blocks
    trip_ms: float
    compute_ms: float
    queue_ms: float
    software_ms: float
    caution_ms: float = 0.0
    speed: Speed = "claimed"
    is_confirmed: bool = False

    @property
    def stage_ms(self) -> float:
        """How long the hop is busy with a token."""
        return self.compute_ms + self.queue_ms

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.trip_ms + self.stage_ms + self.software_ms


@dataclass(frozen=True, slots=True, repr=False)
class Route(Sequence[Hop]):
    """The hops in order. `str` and `repr` are a table with one line a hop.

    estimates: one for each hop. home_ms: one way, from the last hop to the client. exactness: what stays the same with
    other servers of the same classes.
    """

    hops: tuple[Hop, ...]
    estimates: tuple[HopEstimate, ...]
    home_ms: float
    optimize: Optimize
    exactness: Exactness

    @overload
    def __getitem__(self, index: int) -> Hop: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Hop, ...]: ...

    def __getitem__(self, index: int | slice) -> Hop | tuple[Hop, ...]:
        return self.hops[index]

    def __len__(self) -> int:
        return len(self.hops)

    @property
    def numeric_classes(self) -> tuple[str, ...]:
        """How the hops compute, as "float32+int8": each class once, in order."""
        return tuple(dict.fromkeys(hop.numeric_class for hop in self.hops))

    @property
    def estimate_ms(self) -> float:
        """Estimated time of one token, once around the route."""
        return sum(hop.total_ms for hop in self.estimates) + self.home_ms

    @property
    def cost_ms(self) -> float:
        """The estimate, and the time that plans add to it for hops that no audit has confirmed: the least cost wins."""
        return self.estimate_ms + sum(hop.caution_ms for hop in self.estimates)

    @property
    def slowest_ms(self) -> float:
        """How long the slowest hop is busy with a token."""
        return max(hop.stage_ms for hop in self.estimates)

    def __str__(self) -> str:
        rows = [
            (
                hop.peer_id,
                str(hop.blocks),
                hop.numeric_class,
                "" if hop.latency_ms is None else f"{hop.latency_ms:.1f}",
                *(
                    f"{ms:.1f}"
                    for ms in (cost.trip_ms, cost.compute_ms, cost.queue_ms, cost.software_ms, cost.total_ms)
                ),
                cost.speed,
                "audited" if cost.is_confirmed else "",
            )
            for hop, cost in zip(self.hops, self.estimates, strict=True)
        ]
        times = ("latency ms", "trip", "compute", "queue", "software", "estimate ms")
        return "\n".join(
            [
                f"{len(self)} hops in {', '.join(self.numeric_classes)}, {self.estimate_ms:.1f} ms a token by estimate,"
                f" planned for {self.optimize}",
                f"exactness {self.exactness!r}: {_meaning(self.exactness)}",
                "",
                *table(("hop", "blocks", "class", *times, "speed", "outputs"), rows),
                f"and {self.home_ms:.1f} ms from the last hop to the client",
                *_notes(self.estimates),
            ]
        )

    __repr__ = __str__


def _meaning(exactness: Exactness) -> str:
    """Say for people what an exactness promises."""
    match exactness:
        case "bits":
            return "other servers of this class, on such a processor, compute the same numbers"
        case "tokens":
            return "other servers of these classes choose the same tokens, as far as was measured"
        case "tier":
            return "where two tokens are nearly as likely, other servers may choose the other one"


def _notes(estimates: Sequence[HopEstimate]) -> Iterator[str]:
    """Say for people why speeds count as they do, and what audits change."""
    speeds = {hop.speed for hop in estimates}
    if "shown" in speeds:
        yield "speed shown: a server claims more than an ordinary one, and a session of yours has borne that out"
    if "ordinary" in speeds:
        yield "speed ordinary: a server claims more, and no session of yours has borne that out"
    if any(hop.caution_ms for hop in estimates):
        yield "outputs not audited: such a server counts as slower than those that agreed with others in your audits"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for people, the columns' names first."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows)]
