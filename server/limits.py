"""Bounds on the load of peers, as values: each is passed to the part that it bounds, and a test passes another one.

Where several peers bring a pool or a bucket to its bound, each is held to its share (`pool`, `accounts`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.compute.limits import BatchLimits
from swarm.limits import limit
from swarm.protocol.inbox import InboxLimits
from swarm.protocol.journal import JournalLimits
from swarm.protocol.receipts import ReceiptLimits
from swarm.protocol.replay import ReplayLimits
from swarm.protocol.tensors import CHUNK_BYTES
from swarm.server.gateways import GatewayAllowance


@dataclass(frozen=True, slots=True)
class HostedLimits:
    """Bounds on one session at one hop."""

    retry_after_s: float = limit(1.0, "s", "a client that found no room is told to come back so much later")
    unread_bytes_max: int = limit(1 << 20, "bytes", "of outputs that the owner has not read; then steps are refused")
    next_unread_bytes_max: int = limit(32 << 20, "bytes", "that the next hop has not read; then steps are refused")
    replay_unread_bytes_max: int = limit(8 << 20, "bytes", "that the next hop has not read; then a replay pauses")
    replay_poll_s: float = limit(0.01, "s", "between looks whether the next hop reads a replay again")
    step_bytes_max: int = limit(4 * CHUNK_BYTES, "bytes", "of one step's activations, if it has more than one token")
    idle_s: float = limit(900.0, "s", "a session without steps for so long ends")
    next_record_late_s: float = limit(24 * 3600.0, "s", "a route outlives the records it was planned with by so much")
    inbox: InboxLimits = field(default_factory=InboxLimits)
    replay: ReplayLimits = field(default_factory=ReplayLimits)
    journal: JournalLimits = field(default_factory=JournalLimits)
    receipts: ReceiptLimits = field(default_factory=ReceiptLimits)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds on sessions that are open at once."""

    sessions_max: int = limit(1024, "sessions", "of all peers; then openings are refused")
    sessions_share: int = limit(16, "free sessions", "for each that a peer may have: it gets 60 where it is alone")


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """Bounds on the use of peers per second. Each bucket refuses the excess and says when to come back."""

    steps_per_s: float = limit(2000.0, "steps/s", "of one owner, pieces of a past included")
    steps_burst: float = limit(4000.0, "steps", "of them at once")
    tokens_per_s: float = limit(
        16384.0, "tokens/s", "of one owner, of all rows, that are computed; skipped ones are not"
    )
    tokens_burst: float = limit(65536.0, "tokens", "of them at once")
    bytes_per_s: float = limit(128.0 * 2**20, "bytes/s", "of one owner's activations")
    bytes_burst: float = limit(512.0 * 2**20, "bytes", "of them at once")
    debt_s_max: float = limit(
        0.5, "s", "of debt for a past; then pieces are refused. After longer the client doubts the hop"
    )
    openings_per_s: float = limit(8.0, "openings/s", "of one peer, reroutes included: they make caches and connections")
    openings_burst: float = limit(64.0, "openings", "of them at once")
    all_openings_per_s: float = limit(100.0, "openings/s", "of all peers together but gateways")
    all_openings_burst: float = limit(96.0, "openings", "of them at once")
    opening_messages: float = limit(
        4.0, "messages", "of a gateway for each opening, which are read at once: a repair's"
    )


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bounds on the host memory of all sessions together, besides cache and journals, which the operator sets."""

    input_bytes_max: int = limit(96 << 20, "bytes", "of activations that wait to be computed; one step may have 64 MiB")
    window_bytes_max: int = limit(96 << 20, "bytes", "of pasts that may arrive at once; later ones wait")
    output_bytes_max: int = limit(64 << 20, "bytes", "of answers kept in case their steps come again; the oldest go")
    window_use_bytes_min: int = limit(CHUNK_BYTES // 2, "bytes", "of a past in a sweep; less gives its window back")


@dataclass(frozen=True, slots=True)
class PrefixLimits:
    """Bounds on the beginnings of prompts that are kept for their owners' next sessions."""

    pool_share: float = limit(0.25, "of the KV pool", "is lent to them while no session needs it; then the oldest go")
    idle_s: float = limit(900.0, "s", "a beginning that no session has used for so long is dropped")


@dataclass(frozen=True, slots=True)
class HandlerLimits:
    """All bounds on the requests of peers. gateways: by peer id, those that may have more. batch: of the scheduler."""

    session: HostedLimits = field(default_factory=HostedLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    accounts: AccountLimits = field(default_factory=AccountLimits)
    gateways: Mapping[str, GatewayAllowance] = field(default_factory=dict)
    prefixes: PrefixLimits = field(default_factory=PrefixLimits)
    batch: BatchLimits = field(default_factory=BatchLimits)
    sweep_s: float = limit(15.0, "s", "between looks for idle sessions and unused replay windows")
