"""Bounds on what a client's session waits for, tries and remembers."""

from dataclasses import dataclass, field

from swarm.client.session.transcript import TranscriptLimits
from swarm.limits import limit
from swarm.protocol.journal import JournalLimits
from swarm.protocol.outbox import OutboxLimits
from swarm.protocol.replay import ReplayLimits


@dataclass(frozen=True, slots=True)
class ConnectLimits:
    """How long a session waits for the hops that it connects to."""

    connect_s: tuple[float, float, float] = limit(
        (0.5, 1.0, 2.5), "s", "a dial that takes longer fails: the least, the first, and the most, for a second try"
    )
    ping_s: float = limit(5.0, "s", "a new hop that answers no ping for so long has failed")
    reply_s: float = limit(15.0, "s", "a hop that answers no Open or Reroute for so long has failed")
    rebuild_s: float = limit(120.0, "s", "hops that rebuild one window of the past for longer have failed")
    open_s: float = limit(30.0, "s", "the least time that opening a session may take")


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """When a session that lacks hops waits, tries again, and gives up."""

    holders_s: float = limit(15.0, "s", "failed holders of missing blocks are asked again for so long")
    declined_s: float = limit(10.0, "s", "a hop that refuses without a time, or leaves, is left out for so long")
    room_s: float = limit(1.0, "s", "a hop without room is asked once more after at most so long, then replaced")
    held_s: float = limit(5.0, "s", "a session that waits for room gives its own back after once to twice so long")
    late_s: float = limit(1.0, "s", "`too_late` is believed so long before the step's deadline")
    blame_share: float = limit(0.5, "", "a hop that held a timed-out step for this share of the timeout has failed")
    ask_s: float = limit(0.5, "s", "a full hop is asked again no sooner")
    busy_max: int = limit(10, "waits", "of one repair for hops with the past that are busy; then these are replaced")
    wait_first_s: float = limit(0.05, "s", "the first pause before the directory is read again; each next one doubles")
    wait_most_s: float = limit(1.0, "s", "no pause before another attempt is longer")
    regained_max: int = limit(3, "times", "hops that fall silent again after so many lost connections are to blame")
    idle_s: float = limit(600.0, "s", "a hop that ends a session without steps for so long has not failed")
    turns: int = limit(4, "sessions", "so many new sessions of a client ask full hops again; others queue")


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """When hops are asked how far they are, and what their silence means."""

    patience_s: tuple[float, float, float] = limit(
        (0.15, 0.5, 1.0), "s", "a step that takes longer makes the client ask: the least, the first, and the most"
    )
    answer_s: tuple[float, float, float] = limit(
        (0.5, 1.0, 2.0), "s", "a hop that does not answer in time has failed: the least, the first, and the most"
    )
    line_bytes_s: int = limit(1 << 20, "bytes/s", "a line this quick carries the question behind a step's activations")
    line_s_max: float = limit(10.0, "s", "activations before a question give its answer no more time than that")
    pause_s: float = limit(0.25, "s", "the least time between two rounds of questions: networks resend within it")
    quiet_s: float = limit(0.2, "s", "a hop that received bytes so lately still receives")
    wedged_s: float = limit(30.0, "s", "a hop that computes, but finishes nothing for so long, has failed")
    overdue_s: float = limit(60.0, "s", "a hop that finishes nothing of this session for so long is replaced")
    receives_s: float = limit(90.0, "s", "a hop to which bytes come for so long, and nothing whole, is as if none came")
    resend_rounds: int = limit(2, "rounds", "after so many rounds without progress the steps are retransmitted")
    give_up_rounds: int = limit(4, "rounds", "after so many rounds without progress the edge or the hop has failed")


@dataclass(frozen=True, slots=True)
class AvoidanceLimits:
    """How long failed peers are left out of routes."""

    avoid_s: float = limit(5.0, "s", "a process is left out for so long after its first failure, then twice as long")
    avoid_s_max: float = limit(600.0, "s", "no process is left out for longer")
    forget_s: float = limit(900.0, "s", "a failure is forgotten if no other follows within it")
    relay_s: float = limit(60.0, "s", "the client relays a blocked edge for so long, then twice as long")
    entries_max: int = limit(4096, "entries", "the oldest are forgotten first")
    cut_off_lost: int = limit(2, "hops", "if so many fall silent and no peer is heard, the client is cut off")


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """How a long step is cut into messages."""

    chunk_bytes: int = limit(1 << 20, "bytes", "a message carries no more activations, so that others need not wait")
    chunk_s: float = limit(0.05, "s", "a chunk keeps the slowest hop busy for about so long")
    chunk_tokens_min: int = limit(64, "tokens", "smaller chunks would read all weights for too little")
    chunks_ahead: int = limit(6, "chunks", "in flight beyond one for each hop; more would only be in others' way")
    positions_to_come: int = limit(128, "positions", "of each row beyond a step, which hops are to have room for")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """All bounds of a client's sessions."""

    connect: ConnectLimits = field(default_factory=ConnectLimits)
    recovery: RecoveryLimits = field(default_factory=RecoveryLimits)
    watch: WatchLimits = field(default_factory=WatchLimits)
    avoidance: AvoidanceLimits = field(default_factory=AvoidanceLimits)
    chunks: ChunkLimits = field(default_factory=ChunkLimits)
    outbox: OutboxLimits = field(default_factory=OutboxLimits)
    replay: ReplayLimits = field(default_factory=ReplayLimits)
    journal: JournalLimits = field(default_factory=JournalLimits)
    transcript: TranscriptLimits = field(default_factory=TranscriptLimits)
