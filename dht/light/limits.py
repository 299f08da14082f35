"""How much a light reader asks and remembers. Apart from py-libp2p, so that the limits can be printed without it."""

from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How much a light reader asks of py-libp2p."""

    calls_max: int = limit(32, "calls", "at one time; more wait")
    waiting_max: int = limit(4096, "calls", "that wait for their turn; more raise Unreachable")
    answer_bytes_max: int = limit(4 << 20, "bytes", "of one call: p2pd's own largest message; a longer one is rejected")
    addresses_max: int = limit(8, "addresses", "of one peer; the rest is ignored")
    addresses_live_s: int = limit(600, "s", "that py-libp2p keeps a peer's addresses")
    close_timeout_s: float = limit(1.0, "s", "for all connections to be closed; the rest is left to the system")
    start_timeout_s: float = limit(20.0, "s", "a thread that has not started by then raises Unreachable")


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """How much a light reader asks and remembers."""

    connect_timeout_s: float = limit(7.0, "s", "an initial peer that has not answered by then counts as unreachable")
    explore_timeout_s: float = limit(3.0, "s", "for measuring distances while joining; the first look-up goes on")
    get_timeout_s: float = limit(20.0, "s", "a look-up that takes longer raises Unreachable")
    places: int = limit(3, "places", "random ones at which a reader measures the distance of nodes")
    nodes_max: int = limit(1024, "nodes", "remembered; the one unseen for longest is forgotten")
    initial_peers_max: int = limit(32, "peers", "the rest of the list is ignored")
    pace: float = limit(0.9, "share", "of the calls that a node grants to one asker; more wait")
    pace_s: float = limit(0.1, "s", "a call that waits for its turn tries again this often")
