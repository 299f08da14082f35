"""The models of the health page's API: JSON with the same names, units among them.

    GET /api/v1/state          State          every model in a few lines
    GET /api/v1/models/{root}  ModelDetail    one model: its blocks, its servers, its greatest need
    GET /api/v1/history        History        coverage, throughput and servers over time
    GET /api/v1/events         server-sent events: `event: state`, `id:` the revision, `data:` a State in one line

Every text in them that a stranger wrote (names, versions, devices) is printable and bounded, and is text: a page has to
escape it. No addresses are in them, except the operator's own in `join_command`; of anchors, their networks are.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swarm.blocks import BLOCKS_MAX
from swarm.dht.records import RECORD
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds of the answers, which the schema promises."""

    models_max: int = limit(64, "models", "in one state; those with fewest servers are left out")
    servers_max: int = limit(2048, "servers", "of one model; silent ones are left out first")
    contributors_max: int = limit(100, "names", "in one state; those with fewest blocks are left out")
    reasons_max: int = limit(8, "reasons", "of one model; the rest is left out")
    gateways_max: int = limit(8, "gateways", "that are asked; more are a wrong argument")
    anchors_max: int = limit(32, "anchors", "asked and shown; those that fewest servers name are left out")
    classes_max: int = limit(8, "classes", "of one model's servers; those of fewest servers are left out")
    points_max: int = limit(720, "points", "of one history: hours of 30 days, or 24 h in steps of two minutes")
    command_chars: int = limit(1024, "characters", "of the command to join; a longer one does not name its model")
    text_chars: int = limit(300, "characters", "of one text; the rest is cut off")


API = ApiLimits()

Status = Literal["healthy", "degraded", "broken"]
"""healthy: every block has a server that answers. degraded: it works, and `reasons` says what is wrong. broken: no
complete route exists."""

BlockStatus = Literal["spare", "single", "leaving", "silent", "missing"]
"""spare: two or more servers answer. single: one does. leaving: only servers that drain. silent: announced, and no
server answers. missing: no server announces it."""

Way = Literal["direct", "reverse", "punched", "relayed"]
"""How the monitor reached a server: at its address, or behind a router (docs/reach.md)."""

Finding = Literal["agreed", "doubted", "wrong", "open"]
"""The result of audits. agreed: others compute the same. doubted: this server, or another one of the same audit,
computes something else; later audits tell. wrong: independent holders contradict it. open: none of these holds."""

Window = Literal["24h", "30d"]

Root = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="the digest of the model's manifest")]
Seconds = Annotated[float, Field(ge=0, description="seconds")]
Moment = Annotated[float, Field(ge=0, description="wall seconds since 1970")]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, description="tokens per second")]
Milliseconds = Annotated[float, Field(ge=0)]
Block = Annotated[int, Field(ge=0, lt=BLOCKS_MAX)]
Range = Annotated[tuple[int, int], Field(description="blocks [start, stop)")]


class ApiModel(BaseModel):
    """Base of all of them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Quantiles(ApiModel):
    """Half of the samples are at most p50, 95 % at most p95."""

    p50: Milliseconds
    p95: Milliseconds


class ProbeStats(ApiModel):
    """How synthetic generations fared within a window. Times are of those that succeeded; None without any."""

    window: Window
    attempts: Count
    success_rate: Share | None = Field(description="None: nothing was tried")
    ttft_ms: Quantiles | None = Field(description="time to first token")
    inter_token_ms: Quantiles | None = Field(description="between tokens after the first")


class ModelFacts(ApiModel):
    """Which model it is, as its servers say."""

    root: Root
    name: Annotated[str, Field(max_length=128, description="as its servers call it: a claim, as all names are")]
    n_blocks: Annotated[int, Field(ge=1, le=BLOCKS_MAX)]
    numeric_class: Annotated[str | None, Field(max_length=32, description="the first of numeric_classes")]
    tier: Annotated[
        str | None,
        Field(max_length=40, description="of numeric classes, the one covered best; all figures are about its servers"),
    ]
    numeric_classes: Annotated[
        tuple[Annotated[str, Field(max_length=32)], ...],
        Field(max_length=API.classes_max, description="of these servers, the most frequent first"),
    ]


class ModelSummary(ModelFacts):
    """One model in a few lines: its condition and its capacity."""

    status: Status
    reasons: Annotated[
        tuple[Annotated[str, Field(max_length=API.text_chars)], ...],
        Field(max_length=API.reasons_max, description="why it is not healthy, in words"),
    ]
    missing_blocks: Annotated[tuple[Block, ...], Field(description="blocks without any server that answers, in order")]
    coverage: Share = Field(description="share of blocks with a server that answers")
    servers_online: Count = Field(description="servers that answered a handshake lately, of any tier")
    servers_announced: Count
    decode_tps: Rate | None = Field(description="estimate for one user, without the network; None: not measured")
    prefill_tps: Rate | None = Field(description="of all servers together, at the block that has least")
    free_tokens: Count = Field(description="KV tokens that are free at the block that has fewest")
    servers_audited: Count = Field(default=0, description="servers that this page has audited within 30 days")
    servers_wrong: Count = Field(default=0, description="of them, those that audits have shown as wrong")
    probes: Annotated[tuple[ProbeStats, ...], Field(max_length=2)] = ()


class VersionCount(ApiModel):
    """How many servers run a version of the software."""

    version: Annotated[str, Field(max_length=32)]
    servers: Count


class Contributor(ApiModel):
    """Servers of one public name, over all models: a server may take any name."""

    name: Annotated[str, Field(max_length=RECORD.public_name_chars, description="empty: those without a name")]
    servers_online: Count
    blocks: Count = Field(description="sum over its servers that answer")
    since: Moment = Field(description="when the first of them was first seen")


class Reading(ApiModel):
    """How the last reading of the DHT went."""

    at: Moment | None = Field(description="when the last one that succeeded ended; None: none did yet")
    took_s: Seconds | None
    error: Annotated[str | None, Field(max_length=API.text_chars)] = Field(
        default=None, description="why the last one failed, if it did: then everything else is of the one before"
    )


class GatewayState(ApiModel):
    """One gateway, as it tells of itself without a key. Its names and versions are claims."""

    url: Annotated[str, Field(max_length=API.text_chars, description="as the operator has written it")]
    ready: bool
    reason: Annotated[str, Field(max_length=API.text_chars)] = Field(description="why not, or a problem; else empty")
    routed: Annotated[tuple[Annotated[str, Field(max_length=128)], ...], Field(max_length=API.models_max)] | None = (
        Field(default=None, description="models that have a route now; None: it does not tell")
    )
    unrouted: Annotated[tuple[Annotated[str, Field(max_length=128)], ...], Field(max_length=API.models_max)] | None = (
        Field(default=None, description="models that have none")
    )
    version: Annotated[str, Field(max_length=32)] | None = None


class Ways(ApiModel):
    """How many of the servers that are online the monitor reached by which way."""

    direct: Count = Field(description="at an address of theirs")
    reverse: Count = Field(description="behind a router; the server dialled the monitor")
    punched: Count = Field(description="behind a router, without a relay")
    relayed: Count = Field(description="behind a router, through an anchor's relay")


class AnchorFigures(ApiModel):
    """An anchor's load and its limits, as it says."""

    moored: Count = Field(description="servers behind routers that keep a channel to it")
    moored_max: Count
    meetings: Count = Field(description="that wait for one of the two peers")
    meetings_max: Count
    pairs: Count = Field(description="of peers, relayed now")
    pairs_max: Count = Field(description="0: it relays nothing")
    relayed_bytes_per_s: Count
    relayed_bytes_per_s_max: Count
    refused: Count = Field(description="since its start, because of its limits")


class AnchorState(ApiModel):
    """One anchor, which the records of servers behind routers name."""

    peer_id: Annotated[str, Field(max_length=64)]
    network: Annotated[str, Field(max_length=128, description="roughly, its address")]
    servers: Count = Field(description="that answer, and name it")
    load: AnchorFigures | None = Field(description="claims; None: it did not tell them lately")


class State(ApiModel):
    """The whole swarm in a few lines for each model, the busiest first."""

    revision: Count = Field(description="grows with every change; starts anew with the process")
    generated_at: Moment
    network: str
    software: str = Field(description="version of the monitor itself")
    reading: Reading
    models: Annotated[tuple[ModelSummary, ...], Field(max_length=API.models_max)]
    servers_online: Count
    servers_announced: Count
    versions: Annotated[tuple[VersionCount, ...], Field(max_length=32)]
    other_protocols: Annotated[tuple[int, ...], Field(max_length=32)] = Field(
        description="major protocol versions of servers that cannot be used together with the others"
    )
    contributors: Annotated[tuple[Contributor, ...], Field(max_length=API.contributors_max)]
    gateways: Annotated[tuple[GatewayState, ...], Field(max_length=API.gateways_max)] = ()
    ways: Ways = Field(description="their sum is servers_online")
    anchors: Annotated[tuple[AnchorState, ...], Field(max_length=API.anchors_max)] = ()


class BlockState(ApiModel):
    """One block: the servers that hold it in the summary's tier."""

    block: Block
    status: BlockStatus
    online: Count = Field(description="servers that answer and take sessions")
    announced: Count


class ServerClaims(ApiModel):
    """One announced span of one server, as its record says."""

    peer_id: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(max_length=RECORD.public_name_chars)]
    version: Annotated[str, Field(max_length=32)]
    blocks: Range
    device: Annotated[str, Field(max_length=64)]
    numeric_class: Annotated[str, Field(max_length=32)]
    state: Literal["joining", "online", "draining"] = Field(description="as its record says")
    decode_tps: Rate | None
    prefill_tps: Rate | None
    free_tokens: Count
    load: Annotated[float, Field(ge=0)]


class ServerAudits(ApiModel):
    """This page's own audits of one server within 30 days (docs/audits.md). No other page's are in it."""

    audited: Count = Field(description="audits that said anything of it")
    agreed: Count = Field(description="of them, those in which others computed the same")
    last_at: Moment
    finding: Finding
    wrong_at: Moment | None = Field(default=None, description="when it was last found as wrong; None: it was not")


class ServerState(ServerClaims):
    """The same with the monitor's own observations."""

    online: bool = Field(description="whether it answered a handshake lately")
    answered_s: Seconds | None = Field(description="how long ago it last answered; None: never")
    rtt_ms: Milliseconds | None = Field(description="round trip from the monitor")
    way: Way | None = Field(description="how the monitor reached it last; None: never")
    age_s: Seconds = Field(description="for how long the monitor has known this peer")
    audits: ServerAudits | None = Field(default=None, description="None: this page has audited nothing of it")


class ModelDetail(ApiModel):
    """One model with its blocks and servers, ordered by span."""

    generated_at: Moment
    summary: ModelSummary
    blocks: Annotated[tuple[BlockState, ...], Field(max_length=BLOCKS_MAX)]
    servers: Annotated[tuple[ServerState, ...], Field(max_length=API.servers_max)]
    needed_blocks: Range = Field(description="where one more server helps most")
    join_command: Annotated[str, Field(max_length=API.command_chars)] = Field(
        description="hosts the needed blocks, in a POSIX shell; MODEL takes the place of a name that can be no hub id"
    )


class Point(ApiModel):
    """One moment of a history, or the mean of a longer one."""

    at: Moment
    coverage: Share
    servers_online: Annotated[float, Field(ge=0)]
    decode_tps: Rate | None
    prefill_tps: Rate | None
    free_tokens: Annotated[float, Field(ge=0)]
    healthy: Share = Field(description="share of the time in which it was healthy or degraded, not broken")


class History(ApiModel):
    """How one model fared, or all together: then coverage is their mean, and the figures are sums."""

    root: Root | None
    window: Window
    step_s: Seconds
    points: Annotated[tuple[Point, ...], Field(max_length=API.points_max)]


class Health(ApiModel):
    """`/healthz`: 200 while the page's own figures are fresh, 503 when they are not."""

    ok: bool
    reading_age_s: Seconds | None
    history: Annotated[str, Field(max_length=API.text_chars)] = Field(description='"ok", or why none is being written')
    probe: Annotated[str, Field(max_length=API.text_chars)] = Field(description='"off", "ok", or its problem')
    audit: Annotated[str, Field(max_length=API.text_chars)] = Field(description='"off", "ok", or its problem')
