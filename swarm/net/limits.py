"""The bounds on the cost of channels, as values: each is passed to the part that it bounds, and tests pass others."""

from dataclasses import dataclass, field

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Of a channel's frames, and of the bytes that channels hold."""

    hello_bytes_max: int = limit(1024, "bytes", "of a frame from an unproven peer; a longer one ends the channel")
    timeout_s: float = limit(30.0, "s of reading", "a frame whose rest does not come in time ends the channel")
    turn: float = limit(16.0, "frames", "then other channels are read; each 64 KiB of a frame count as one more")
    held_bytes_max: int = limit(80 * 2**20, "bytes", "held for slow peers; then the oldest holder's channel ends")
    held_bytes_small: int = limit(256 * 1024, "bytes", "a channel that holds no more is not counted")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Of reading. A peer's own allowance is free; the rest comes from budgets that all peers share, in turn."""

    bytes_per_s: float = limit(64.0 * 1024, "bytes/s", "a peer's own")
    bytes_burst: float = limit(256.0 * 1024, "bytes", "a peer's own, at once")
    step_bytes_free: int = limit(64 * 1024, "bytes", "of an accepted decode step that are not counted")
    all_bytes_per_s: float = limit(128.0 * 2**20, "bytes/s", "shared")
    all_bytes_burst: float = limit(1.0 * 2**20, "bytes", "shared, at once")
    idle_per_s: float = limit(4.0, "messages/s", "that move no session forward: a peer's own")
    idle_burst: float = limit(32.0, "messages", "of them at once: a peer's own")
    idle_bytes: int = limit(64 * 1024, "bytes", "of tensors that count as one more of them")
    all_idle_per_s: float = limit(300.0, "messages/s", "of them, shared")
    all_idle_burst: float = limit(32.0, "messages", "of them at once, shared")
    pause_s_max: float = limit(5.0, "s", "then a channel that is not read looks again whether its debt is paid")


@dataclass(frozen=True, slots=True)
class KeepaliveLimits:
    """Of keepalives to peers whose reads are throttled."""

    every_s: float = limit(0.3, "s", "between two to the same peer")
    burst: float = limit(8.0, "keepalives", "that a slow path may deliver together; more count as idle messages")
    all_per_s: float = limit(1000.0, "keepalives/s", "to all peers; more are left out")
    all_burst: float = limit(64.0, "keepalives", "to all peers at once")


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Of a channel, of a peer's channels together, and of all channels that share one `FlowControl`."""

    frames: FrameLimits = field(default_factory=FrameLimits)
    reading: ReadLimits = field(default_factory=ReadLimits)
    keepalives: KeepaliveLimits = field(default_factory=KeepaliveLimits)


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """Of connections that have proven nothing."""

    timeout_s: float = limit(10.0, "s", "a connection that has proven nothing by then ends")
    unproven_max: int = limit(256, "connections", "that have proven nothing; the oldest ends for a new one")
    per_s: float = limit(4.0, "handshakes/s", "from one source; each takes 1 to 2 ms of computing")
    burst: float = limit(32.0, "handshakes", "from one source at once")
    all_per_s: float = limit(30.0, "handshakes/s", "from all sources")
    all_burst: float = limit(16.0, "handshakes", "from all sources at once")
    turn_wait_s: float = limit(2.0, "s", "a connection whose turn to shake hands is later is refused")
    sources_max: int = limit(4096, "sources", "that are remembered; a new one is refused while all are in debt")


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Of connections that others open."""

    handshakes: HandshakeLimits = field(default_factory=HandshakeLimits)
    accepts_per_s: float = limit(200.0, "connections/s", "taken from the kernel, two for a meeting; others wait there")
    accepts_burst: float = limit(64.0, "connections", "taken at once")
    backlog: int = limit(128, "connections", "that wait in the kernel: those of more than half a second")
    first_byte_s: float = limit(3.0, "s", "a connection that has said nothing by then is closed")
    no_descriptors_s: float = limit(1.0, "s", "until accepting is tried again where no descriptor was free")
    channels_max: int = limit(4096, "channels", "or half of the process's descriptors; then one ends for a new one")
    channels_per_process_max: int = limit(4, "channels", "of one channel key; a silent one ends for a new one")
    channels_per_peer_max: int = limit(64, "channels", "of one identity, which may run many processes")
    silent_s: float = limit(10.0, "s", "a channel that was used since does not end for a new one of its peer")
    idle_s: float = limit(120.0, "s", "a channel without a session that is silent for longer ends")
    sweep_s: float = limit(30.0, "s", "a channel whose peer takes no queued byte for so long ends")


@dataclass(frozen=True, slots=True)
class DialerLimits:
    """Of connections that this side opens."""

    timeout_s: float = limit(4.0, "s", "for connection and handshake: three round trips and one lost packet")
    addresses_max: int = limit(4, "addresses", "of one peer that are tried")
    peers_max: int = limit(1024, "peers", "then an unused channel ends for a new one, or connecting fails")
    opening_max: int = limit(512, "peers", "that have not answered yet; the oldest attempt ends for a new one")
    idle_s: float = limit(90.0, "s", "an unused channel waits for its next user: longer than round trips are apart")
    address_after_s: float = limit(0.25, "s", "the next address is tried beside one that is silent for so long")
    anchor_after_s: float = limit(0.6, "s", "the next anchor is asked beside the way before it")
    answer_s: float = limit(0.5, "s", "a doubted channel may answer a ping when no new one could be opened")


@dataclass(frozen=True, slots=True)
class DaemonLimits:
    """Of p2pd and its supervisor."""

    start_timeout_s: float = limit(15.0, "s", "p2pd that serves no socket by then has failed")
    stop_timeout_s: float = limit(3.0, "s", "after SIGTERM; then SIGKILL")
    poll_s: float = limit(0.2, "s", "between looks whether it runs")
    probe_s: float = limit(10.0, "s", "between probes of a running one, and for the answer to one")
    find_s: float = limit(1.0, "s", "to say which addresses a connected peer has told")
    restarts_max: int = limit(6, "restarts", "in a row; then the node fails")
    backoff_s: tuple[float, ...] = limit((0.1, 0.5, 1.0, 2.0, 5.0, 10.0), "s", "before each restart of a row")
    restart_forget_s: float = limit(60.0, "s", "of running after which earlier failures count no more")
    descriptors_max: int = limit(4096, "descriptors", "RLIMIT_NOFILE")
    data_bytes_max: int = limit(2 << 30, "bytes", "RLIMIT_DATA: a flooded p2pd dies and is replaced")
    connections_low: int = limit(192, "connections", "to which its connection manager trims")
    connections_high: int = limit(384, "connections", "at which it trims")
