"""The input of a plan: announcements, measured round trips, and the user's wishes. Values only."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from swarm.blocks import Blocks
from swarm.client.planning.evidence import Evidence
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.promise import Held
from swarm.dht.records import Announcement, SignedAnnouncement
from swarm.identity import public_key_of
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class PlanningLimits:
    """Assumptions about servers that have not measured themselves, and where the planner stops to improve a route."""

    unknown_rtt_ms: float = limit(40.0, "ms", "a round trip that neither peer has measured: half-way round a continent")
    unmeasured_tps: float = limit(20.0, "tokens/s", "the decode rate of a server that has not measured itself yet")
    ring_slack: float = limit(1.25, "factor", "a token may take so much longer than servers claim; the rest counts")
    unaudited_share: float = limit(
        0.25, "of its time", "that a hop without an agreed audit counts as slower, where others have one"
    )
    no_room_ms: float = limit(1e6, "ms/block", "penalty of a server without room: more than any route, a last resort")
    hop_ms: float = limit(0.5, "ms", "the software of one more hop")
    stage_floor_ms: float = limit(20.0, "ms", "a faster stage waits for the network: splitting it gains nothing")
    stage_slack: float = limit(1.05, "factor", "the slowest stage may exceed the best possible one by so much")
    return_slack: float = limit(1.05, "factor", "a route within this of one that returns to a peer is good enough")
    revisits_max: int = limit(3, "searches", "tried where the cheapest way leaves a peer and comes back to it")


@dataclass(frozen=True)
class Request:
    """The input of a plan.

    dtype: only classes that compute in it, as "float32". held: the numeric class of each block in the route that is to
    be repaired. A repair stays in its tier, and takes the same classes if their servers have room.
    coding: of activations; only servers that take them so.
    avoid: peer ids, or processes as in `Hop.process`. client_rtts: round trips in ms that the client has measured, by
    public key (hex). positions_needed: cached tokens; servers with less room are taken only where others leave blocks
    uncovered. evidence: how far claims are believed.
    """

    model: str
    wanted: Blocks
    servers: tuple[SignedAnnouncement, ...]
    dtype: str | None = None
    coding: str | None = None
    held: Held = ()
    avoid: Collection[str] = ()
    preferences: Preferences = field(default_factory=Preferences)
    client_rtts: Mapping[str, float] = field(default_factory=dict)
    positions_needed: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    limits: PlanningLimits = field(default_factory=PlanningLimits)

    @cached_property
    def pins(self) -> tuple[tuple[Blocks, set[str]], ...]:
        """The trusted peers by their public keys."""
        return tuple((blocks, keys_of(peers)) for blocks, peers in self.preferences.trusted_peers)

    @cached_property
    def client_rtt_ms(self) -> float:
        """A round trip to a peer that the client has not measured: the median of the others.

        The client's own connection to the world is a part of every round trip.
        """
        return median(self.client_rtts.values()) if self.client_rtts else self.limits.unknown_rtt_ms

    def claimed_ms(self, announcement: Announcement) -> float:
        """Return the time of a token in one block of a server by its claim, where it has nothing else to do."""
        tokens_per_s = announcement.decode_tps or self.limits.unmeasured_tps
        return 1000.0 / tokens_per_s / (announcement.blocks.stop - announcement.blocks.start)

    @cached_property
    def ordinary_ms(self) -> float:
        """The time of a token in one block of an ordinary server: the median over peers of the most that each claims.

        A peer has one vote, however many spans it announces: else one that boasts says what is ordinary.
        """
        claimed: dict[str, float] = {}
        for server in (signed.announcement for signed in self.servers):
            claimed[server.public_key] = max(claimed.get(server.public_key, 0.0), self.claimed_ms(server))
        return median(claimed.values()) if claimed else 0.0

    @cached_property
    def ordinary_rtt_ms(self) -> float:
        """An ordinary announced round trip: the median over the peers of the median that each announces.

        Of a server that announces none it is `unknown_rtt_ms`, so a few long lists do not shift it; and it is no more.
        Of a peer with several records the longest counts.
        """
        unknown_ms, typical = self.limits.unknown_rtt_ms, dict[str, float]()
        for server in (signed.announcement for signed in self.servers):
            rtts = sorted(ms for _, ms in server.rtts)
            ms = rtts[len(rtts) // 2] if rtts else unknown_ms
            typical[server.public_key] = max(typical.get(server.public_key, 0.0), ms)
        return min(unknown_ms, median(typical.values())) if typical else unknown_ms


def keys_of(peer_ids: Iterable[str]) -> set[str]:
    """Return the public keys of peers."""
    return {key_and_process(peer_id)[0] for peer_id in peer_ids}


def key_and_process(avoided: str) -> tuple[str, str]:
    """Split a peer id or a process into public key and channel key, "" where it is any process."""
    peer_id, _, channel_key = avoided.partition("/")
    try:
        return public_key_of(peer_id).hex(), channel_key
    except ValueError:  # no peer has it
        return "", channel_key
