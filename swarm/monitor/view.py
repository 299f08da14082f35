"""The page's view of one model, worked out for the templates. Pure."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from swarm.monitor.assess import ranges
from swarm.monitor.state import BlockState, BlockStatus, History, ModelDetail, Point, ServerAudits, ServerState, Way
from swarm.monitor.wording import NOT_KNOWN, lasting, plural

MEANINGS: dict[BlockStatus, str] = {  # the worst first
    "missing": "no server announces it",
    "silent": "announced, but no server answers",
    "leaving": "only servers that come or go",
    "single": "one server",
    "spare": "two or more servers",
}

REACHES: dict[Way, str] = {  # in the order in which they are tried
    "direct": "at an address",
    "reverse": "behind a router; it dialled back",
    "punched": "behind a router, straight",
    "relayed": "behind a router, through an anchor",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the block map: blocks [start, stop), the worst status among them and the fewest servers."""

    start: int
    stop: int
    status: BlockStatus
    online: int

    @property
    def label(self) -> str:
        """Name its blocks."""
        return str(self.start) if self.stop == self.start + 1 else f"{self.start}:{self.stop}"


@dataclass(frozen=True, slots=True)
class Held:
    """A line of the block map's legend: how many blocks have a status, and which."""

    status: BlockStatus
    meaning: str
    count: int
    blocks: str


@dataclass(frozen=True, slots=True)
class ServerRow:
    """One line of the servers' table: condition is a word, and detail explains it. audits: this page's, in words."""

    server: ServerState
    condition: str
    detail: str
    audits: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Servers:
    """The lines that are shown, of how many that match, of how many at all."""

    rows: tuple[ServerRow, ...]
    matching: int
    total: int


@dataclass(frozen=True, slots=True)
class Use:
    """How to use a model: Python and a command, to copy."""

    python: str
    command: str


@dataclass(frozen=True, slots=True)
class Past:
    """A history in a few lines. working: share of the window; broken_since: wall seconds, None unless it is now."""

    working: float | None
    broken_since: float | None
    rows: tuple[Point, ...]


def cells(blocks: Sequence[BlockState], count_max: int = 256) -> tuple[Cell, ...]:
    """Put blocks into at most `count_max` cells of equal size."""
    size = -(-len(blocks) // count_max)
    groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    return tuple(
        Cell(
            start=group[0].block,
            stop=group[-1].block + 1,
            status=min((state.status for state in group), key=list(MEANINGS).index),
            online=min(state.online for state in group),
        )
        for group in groups
    )


def held(blocks: Sequence[BlockState]) -> tuple[Held, ...]:
    """Sort blocks by their status, the worst first. Statuses that no block has are left out."""
    lines = []
    for status, meaning in MEANINGS.items():
        numbers = [state.block for state in blocks if state.status == status]
        if numbers:
            lines.append(Held(status, meaning, len(numbers), ranges(numbers).removeprefix("blocks ")))
    return tuple(lines)


def servers(
    detail: ModelDetail, *, text: str = "", block: int | None = None, everything: bool = False, rows_max: int = 100
) -> Servers:
    """Choose the lines of the table. text: part of a name or of a peer id; block: only those that hold it.

    rows_max: unless `everything` is wanted; a thousand rows would be most of the page's weight.
    """
    wanted = text.strip().casefold()
    matching = [
        server
        for server in detail.servers
        if (not wanted or wanted in server.name.casefold() or wanted in server.peer_id.casefold())
        and (block is None or server.blocks[0] <= block < server.blocks[1])
    ]
    shown = matching if everything else matching[:rows_max]
    now = detail.generated_at
    return Servers(tuple(_row(server, now) for server in shown), len(matching), len(detail.servers))


def _row(server: ServerState, now: float) -> ServerRow:
    answered = "never answered" if server.answered_s is None else f"answered {lasting(server.answered_s)} ago"
    if server.online and server.way not in (None, "direct"):
        answered += f", {server.way}"
    details = {"online": answered, "joining": "not serving yet", "draining": "takes no new sessions"}
    if not server.online:
        return ServerRow(server, "silent", answered, audited(server.audits, now))
    return ServerRow(server, server.state, details[server.state], audited(server.audits, now))


def audited(audits: ServerAudits | None, now: float) -> tuple[str, str]:
    """Say what this page's audits have shown of a server: in a word or two, and in detail. now: wall seconds."""
    if audits is None:
        return NOT_KNOWN, "not audited here"
    words = {"agreed": "agrees", "doubted": "in doubt", "wrong": "differs", "open": "open"}
    at = audits.last_at
    detail = f"{audits.agreed:,} of {plural(audits.audited, 'audit')} agreed"
    if audits.finding == "wrong" and audits.wrong_at is not None:
        at = audits.wrong_at
        detail += ", others compute something else"
    elif audits.finding == "doubted":
        detail += ", it or another server differs"
    return words[audits.finding], f"{detail}; {lasting(max(0.0, now - at))} ago"


def use(detail: ModelDetail, network: str) -> Use:
    """Write code for a user to copy. Model and addresses are the join command's: no stranger's text gets into it."""
    joining = shlex.split(detail.join_command)
    model = joining[1]
    addresses = [word for option, word in pairwise(joining) if option == "--initial-peers"]
    addresses = addresses or ["/dns4/HOST/tcp/31337/p2p/PEER"]  # to be filled in, where the operator gave none
    python = f"""from swarm import AutoDistributedModel
from transformers import AutoTokenizer

model = AutoDistributedModel.from_pretrained(
    {json.dumps(model)},
    initial_peers={json.dumps(addresses)},
    network={json.dumps(network)},
)
tokenizer = AutoTokenizer.from_pretrained({json.dumps(model)})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"""
    words = ["swarm-generate", model, "--prompt", "Once upon a time", "--network", network]
    for address in addresses:
        words += ["--initial-peers", address]
    return Use(python, shlex.join(words))


def past(history: History | None, *, broken: bool, rows_max: int = 12) -> Past:
    """Sum up a history; None cannot be read. broken: whether the model is broken now."""
    points = history.points if history is not None else ()
    return Past(
        working=fmean(point.healthy for point in points) if points else None,
        broken_since=_broken_since(points) if broken else None,
        rows=tuple(reversed(condense(points, rows_max))),
    )


def _broken_since(points: Sequence[Point]) -> float | None:
    """Return when the run of points began, at the end, in which it did not work; None where that is not known."""
    since = None
    for point in reversed(points):
        if point.healthy > 0:
            return since if since is not None else point.at
        since = point.at
    return None


def condense(points: Sequence[Point], count: int) -> tuple[Point, ...]:
    """Average neighbours until at most count points are left, in order; each is of the moment at which it begins."""
    size = max(1, -(-len(points) // count))
    return tuple(_mean(points[i : i + size]) for i in range(0, len(points), size))


def _mean(points: Sequence[Point]) -> Point:
    def over(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    return Point(
        at=points[0].at,
        coverage=fmean(point.coverage for point in points),
        servers_online=fmean(point.servers_online for point in points),
        decode_tps=over([point.decode_tps for point in points]),
        prefill_tps=over([point.prefill_tps for point in points]),
        free_tokens=fmean(point.free_tokens for point in points),
        healthy=fmean(point.healthy for point in points),
    )
