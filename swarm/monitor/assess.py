"""From announcements and answered handshakes to the page's figures. Pure: no clock, no network, no database."""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from swarm.activations import tier_of
from swarm.dht.records import Announcement
from swarm.limits import limit
from swarm.monitor.anchors import ToldLoad, named, states
from swarm.monitor.state import (
    API,
    BlockState,
    BlockStatus,
    Contributor,
    GatewayState,
    ModelDetail,
    ModelFacts,
    ModelSummary,
    ProbeStats,
    Reading,
    ServerAudits,
    ServerState,
    State,
    Status,
    VersionCount,
    Way,
    Ways,
)
from swarm.runs import runs_text
from swarm.version import __version__


@dataclass(frozen=True, slots=True)
class AssessLimits:
    """When a server counts as gone, and a model as degraded."""

    answer_lives_s: float = limit(75.0, "s", "without an answer make a server silent: two rounds of handshakes")
    failures_max: int = limit(1, "handshakes", "in a row may fail; with more a server is silent")
    probes_min: int = limit(3, "generations", "fewer say nothing about a success rate")
    success_min: float = limit(0.9, "share", "of generations; with fewer a model is degraded")


@dataclass(frozen=True, slots=True)
class Contact:
    """The monitor's own observations of one peer. answered_at: wall seconds; None: it never did.

    failures: handshakes that failed since. first_seen: wall seconds, over restarts of the monitor too. way: of the last
    answer.
    """

    first_seen: float
    answered_at: float | None = None
    failures: int = 0
    rtt_ms: float | None = None
    way: Way | None = None

    def online(self, now: float, limits: AssessLimits = AssessLimits()) -> bool:
        """Whether it answered a handshake lately."""
        lately = self.answered_at is not None and now - self.answered_at <= limits.answer_lives_s
        return lately and self.failures <= limits.failures_max


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that was served lately: it stays on the page, broken, when its last server has gone."""

    name: str
    n_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """All facts at one moment. contacts by public key (hex), known and probes by root, loads by an anchor's peer id.

    audits by root and peer id.
    """

    network: str
    records: Sequence[Announcement]
    contacts: Mapping[str, Contact]
    known: Mapping[str, KnownModel] = field(default_factory=dict)
    probes: Mapping[str, tuple[ProbeStats, ...]] = field(default_factory=dict)
    reading: Reading = field(default_factory=lambda: Reading(at=None, took_s=None))
    other_protocols: tuple[int, ...] = ()
    join_addresses: tuple[str, ...] = ()
    gateways: tuple[GatewayState, ...] = ()
    loads: Mapping[str, ToldLoad] = field(default_factory=dict)
    audits: Mapping[tuple[str, str], ServerAudits] = field(default_factory=dict)
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Assessment:
    """The figures that the API serves. details by root, for exactly the models of the state."""

    state: State
    details: Mapping[str, ModelDetail]


@dataclass(frozen=True, slots=True)
class _Server:
    """One record, and whether its server answers (online) and also takes sessions (serving)."""

    record: Announcement
    contact: Contact
    online: bool
    serving: bool
    audits: ServerAudits | None


def assess(sighting: Sighting, now: float, limits: AssessLimits = AssessLimits()) -> Assessment:
    """Work out the condition of every model. now: wall seconds; records that have expired by then are left out."""
    servers = [_server(record, sighting, now, limits) for record in sighting.records if record.expires > now]
    by_root: dict[str, list[_Server]] = {root: [] for root in sighting.known}
    for server in servers:
        by_root.setdefault(server.record.root, []).append(server)
    details = [_detail(root, members, sighting, now, limits) for root, members in by_root.items()]
    details.sort(key=lambda d: (-d.summary.servers_online, -d.summary.servers_announced, d.summary.root))
    details = details[: API.models_max]
    versions = Counter(record.version for record in _one_per_peer(servers))
    online = {server.record.public_key for server in servers if server.online}
    anchors = named((server.record for server in servers), online)
    state = State(
        revision=sighting.revision,
        generated_at=now,
        network=sighting.network,
        software=__version__,
        reading=sighting.reading,
        models=tuple(detail.summary for detail in details),
        servers_online=sum(server.online for server in servers),
        servers_announced=len(servers),
        versions=tuple(VersionCount(version=name, servers=n) for name, n in versions.most_common(32)),
        other_protocols=sighting.other_protocols[:32],
        contributors=_contributors(servers),
        gateways=sighting.gateways,
        ways=_ways(servers),
        anchors=states(anchors, sighting.loads, now - limits.answer_lives_s),
    )
    return Assessment(state, {detail.summary.root: detail for detail in details})


def _server(record: Announcement, sighting: Sighting, now: float, limits: AssessLimits) -> _Server:
    contact = sighting.contacts.get(record.public_key) or Contact(first_seen=now)
    online, audits = contact.online(now, limits), sighting.audits.get((record.root, record.peer_id))
    return _Server(record, contact, online, online and record.state == "online", audits)


def _ways(servers: Iterable[_Server]) -> Ways:
    count = Counter(server.contact.way for server in servers if server.online)
    return Ways(direct=count["direct"], reverse=count["reverse"], punched=count["punched"], relayed=count["relayed"])


def _one_per_peer(servers: Iterable[_Server]) -> Iterable[Announcement]:
    return {server.record.public_key: server.record for server in servers}.values()


def _contributors(servers: Iterable[_Server]) -> tuple[Contributor, ...]:
    by_name: dict[str, list[_Server]] = defaultdict(list)
    for server in servers:
        by_name[server.record.public_name].append(server)
    contributors = [
        Contributor(
            name=name,
            servers_online=sum(server.online for server in members),
            blocks=sum(len(server.record.span) for server in members if server.online),
            since=min(server.contact.first_seen for server in members),
        )
        for name, members in by_name.items()
    ]
    contributors.sort(key=lambda c: (-c.blocks, c.since, c.name))
    return tuple(contributors[: API.contributors_max])


# --- one model -------------------------------------------------------------------------------------------------------


def _detail(root: str, members: Sequence[_Server], sighting: Sighting, now: float, limits: AssessLimits) -> ModelDetail:
    name, n_blocks = _facts(root, members, sighting)
    members = [server for server in members if server.record.n_blocks == n_blocks]
    tier = _best_tier(members)
    chosen = [server for server in members if tier_of(server.record.numeric_class) == tier]
    count = Counter(server.record.numeric_class for server in chosen)
    classes = tuple(each for each, _ in count.most_common(API.classes_max))
    blocks = tuple(_blocks(n_blocks, chosen))
    facts = ModelFacts(
        root=root,
        name=name,
        n_blocks=n_blocks,
        numeric_class=classes[0] if classes else None,
        tier=tier,
        numeric_classes=classes,
    )
    summary = _summary(facts, blocks, members, chosen, sighting.probes.get(root, ()), limits)
    needed = _needed(blocks)
    shown = sorted(members, key=lambda s: (not s.online, s.record.blocks, s.record.public_key))[: API.servers_max]
    return ModelDetail(
        generated_at=now,
        summary=summary,
        blocks=blocks,
        servers=tuple(
            _server_state(s, now) for s in sorted(shown, key=lambda s: (s.record.blocks, s.record.public_key))
        ),
        needed_blocks=needed,
        join_command=_join_command(name, root, needed, sighting),
    )


def _facts(root: str, members: Sequence[_Server], sighting: Sighting) -> tuple[str, int]:
    """Return a model's name and size as most servers that answer say; without any as remembered, or as announced."""
    votes = Counter((server.record.model, server.record.n_blocks) for server in members if server.online)
    known = sighting.known.get(root)
    if not votes and known is not None:
        return known.name, known.n_blocks
    votes = votes or Counter((server.record.model, server.record.n_blocks) for server in members)
    return max(votes, key=lambda facts: (votes[facts], facts))


def _best_tier(members: Sequence[_Server]) -> str | None:
    """Return the tier whose serving servers cover most blocks: a route lies within one tier."""
    covered: defaultdict[str, set[int]] = defaultdict(set)
    count: Counter[str] = Counter()
    for server in members:
        tier = tier_of(server.record.numeric_class)
        count[tier] += 1
        covered[tier].update(server.record.span if server.serving else ())
    return max(covered, key=lambda tier: (len(covered[tier]), count[tier], tier), default=None)


def _blocks(n_blocks: int, servers: Sequence[_Server]) -> Iterable[BlockState]:
    serving, online, announced = [0] * n_blocks, [0] * n_blocks, [0] * n_blocks
    for server in servers:
        for n in server.record.span:
            announced[n] += 1
            online[n] += server.online
            serving[n] += server.serving
    for n in range(n_blocks):
        status = _block_status(serving[n], online[n], announced[n])
        yield BlockState(block=n, status=status, online=serving[n], announced=announced[n])


def _block_status(serving: int, online: int, announced: int) -> BlockStatus:
    if serving:
        return "spare" if serving > 1 else "single"
    if online:
        return "leaving"
    return "silent" if announced else "missing"


def _summary(
    facts: ModelFacts,
    blocks: Sequence[BlockState],
    members: Sequence[_Server],
    chosen: Sequence[_Server],
    probes: tuple[ProbeStats, ...],
    limits: AssessLimits,
) -> ModelSummary:
    missing = tuple(state.block for state in blocks if not state.online)
    serving = [server.record for server in chosen if server.serving]
    complete = bool(serving) and not missing
    free_tokens = _free_tokens(len(blocks), serving)
    problems = _shortcomings(free_tokens, probes, limits) if complete else _gaps(blocks)
    problems += _elsewhere(facts, members, missing)
    broken_or_degraded: Status = "degraded" if complete else "broken"
    return ModelSummary(
        **facts.model_dump(),
        status=broken_or_degraded if problems or not complete else "healthy",
        reasons=tuple(text[: API.text_chars] for text in problems[: API.reasons_max]),
        missing_blocks=missing,
        coverage=1 - len(missing) / len(blocks),
        servers_online=sum(server.online for server in members),
        servers_announced=len(members),
        decode_tps=_decode_tps(len(blocks), serving),
        prefill_tps=_prefill_tps(len(blocks), serving),
        free_tokens=free_tokens,
        servers_audited=sum(server.audits is not None for server in members),
        servers_wrong=sum(server.audits is not None and server.audits.finding == "wrong" for server in members),
        probes=probes,
    )


def _elsewhere(facts: ModelFacts, members: Sequence[_Server], missing: Sequence[int]) -> list[str]:
    held = {n for server in members if server.serving for n in server.record.span} & set(missing)
    if not held:
        return []
    return [f"{ranges(sorted(held))} have servers of another tier than {facts.tier} only"]


def _gaps(blocks: Sequence[BlockState]) -> list[str]:
    why: dict[BlockStatus, str] = {
        "missing": "no server announces",
        "silent": "no server answers for",
        "leaving": "only servers that come or go, and take no new sessions, hold",
    }
    held = {status: [state.block for state in blocks if state.status == status] for status in why}
    return [f"{text} {ranges(held[status])}" for status, text in why.items() if held[status]]


def _shortcomings(free_tokens: int, probes: Sequence[ProbeStats], limits: AssessLimits) -> list[str]:
    found = []
    if free_tokens == 0:
        found.append("all servers of some block are full")
    for stats in probes:
        rate, enough = stats.success_rate, stats.attempts >= limits.probes_min
        if stats.window == "24h" and enough and rate is not None and rate < limits.success_min:
            found.append(f"{rate:.0%} of {stats.attempts} generations succeeded within 24 h")
    return found


def _per_block(n_blocks: int, serving: Sequence[Announcement]) -> list[list[Announcement]]:
    holders: list[list[Announcement]] = [[] for _ in range(n_blocks)]
    for record in serving:
        for n in record.span:
            holders[n].append(record)
    return holders


def _decode_tps(n_blocks: int, serving: Sequence[Announcement]) -> float | None:
    """Estimate one user's decode: the sum over blocks of the least time that any holder needs for one block."""
    total_s = 0.0
    for holders in _per_block(n_blocks, serving):
        costs = [1 / (record.decode_tps * len(record.span)) for record in holders if record.decode_tps is not None]
        if not costs:
            return None
        total_s += min(costs)
    return round(1 / total_s, 3)


def _prefill_tps(n_blocks: int, serving: Sequence[Announcement]) -> float | None:
    """Return the prefill throughput of all holders of the block that has the least."""
    sums = [
        sum(record.prefill_tps for record in holders if record.prefill_tps is not None)
        for holders in _per_block(n_blocks, serving)
    ]
    return round(min(sums), 3) or None


def _free_tokens(n_blocks: int, serving: Sequence[Announcement]) -> int:
    free = [sum(record.free_tokens for record in holders) for holders in _per_block(n_blocks, serving)]
    return min(*free, 2**53 - 1)  # of claims; databases and readers of JSON have no larger numbers


def _server_state(server: _Server, now: float) -> ServerState:
    record, contact = server.record, server.contact
    assert record.state != "withdrawn", "the directory leaves those out"
    return ServerState(
        peer_id=record.peer_id,
        name=record.public_name,
        version=record.version,
        blocks=(record.blocks.start, record.blocks.stop),
        device=record.device,
        numeric_class=record.numeric_class,
        state=record.state,
        online=server.online,
        answered_s=None if contact.answered_at is None else max(0.0, now - contact.answered_at),
        rtt_ms=contact.rtt_ms,
        way=contact.way,
        decode_tps=record.decode_tps,
        prefill_tps=record.prefill_tps,
        free_tokens=record.free_tokens,
        load=record.load,
        age_s=max(0.0, now - contact.first_seen),
        audits=server.audits,
    )


# --- the need for servers --------------------------------------------------------------------------------------------


def _needed(blocks: Sequence[BlockState]) -> tuple[int, int]:
    """Return the longest run of blocks that the fewest servers hold."""
    least = min(state.online for state in blocks)
    return max(_runs([state.block for state in blocks if state.online == least]), key=lambda run: run[1] - run[0])


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Put numbers in rising order together: [1, 2, 3, 7] -> [(1, 4), (7, 8)]."""
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), start=1) if b != a + 1]
    starts = [0, *breaks] if numbers else []
    stops = [*breaks, len(numbers)] if numbers else []
    return [(numbers[a], numbers[b - 1] + 1) for a, b in zip(starts, stops, strict=True)]


def ranges(numbers: Sequence[int]) -> str:
    """Name blocks: [1, 2, 3, 7] -> "blocks 1:4, 7:8"."""
    return "blocks " + runs_text(tuple(numbers))


def _join_command(name: str, root: str, needed: tuple[int, int], sighting: Sighting) -> str:
    """Return a command for a POSIX shell. The name is a stranger's: only one that can be a hub id gets into it."""
    hub_id = r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?"
    model = name if re.fullmatch(hub_id, name, re.ASCII) else "MODEL"
    words = ["swarm-serve", model, "--root", root, "--blocks", f"{needed[0]}:{needed[1]}"]
    words += ["--network", sighting.network]
    words += [word for address in sighting.join_addresses for word in ("--initial-peers", address)]
    words[1] = model if len(shlex.join(words)) <= API.command_chars else "MODEL"
    return shlex.join(words)
