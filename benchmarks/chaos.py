"""Faults at random moments in a real swarm, while many generations run: do all of them complete, with the right tokens?

    python benchmarks/chaos.py [--faults 1000] [--servers 10] [--sessions 4] [--kinds kill,stop,p2pd,blackhole,disk]

Servers of the demo checkpoint are killed, stopped for a while, robbed of their p2pd, cut off behind a router that drops
every packet, and given a full disk; but never so that a block is left without a live holder. Meanwhile clients generate
in float32 from 512-token prompts, and every token is compared with what the local model says. What is printed: by kind
of fault, how long the steps took longer in which a session was repaired; how many generations completed, with how many
wrong tokens; and what failed. Ctrl-C ends it early, with what there is. Cutting off and full disks need Linux
namespaces (`unshare`); no root is needed.

Servers start as forks of a process that has imported everything: those of volunteers do not import on one processor.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click
import psutil
import structlog
import torch
from chaos_faults import KINDS, Faults, Kind, Slot, choose, start
from chaos_places import Machines, enter_namespaces, machines, namespaces_available, plain_place
from chaos_report import Run, report
from chaos_sessions import Case, Client, make_cases
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from swarm.blocks import Blocks
from swarm.client import AutoDistributedModel
from swarm.demo.local import LocalSwarm
from tests.support import warm

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "swarm" / "demo" / "checkpoint"
N_BLOCKS = 12
SPANS = ("0:4", "4:8", "8:12", "0:6", "6:12", "3:9")  # in turn: with eight servers every block has three holders
IN_NAMESPACES: frozenset[Kind] = frozenset({"blackhole", "disk"})
CASES = 8
TICK_S = 0.02
SETTLE_S = 2.0  # before the first fault
END_TIMEOUT_S = 150.0  # for the generations under way at the end: more than a step may take
EVENTS_MAX = 20_000  # the latest events of all clients that are kept


@dataclass(frozen=True, slots=True)
class Options:
    """The command's."""

    faults: int
    servers: int
    sessions: int
    kinds: tuple[Kind, ...]
    seed: int
    every_s: float
    down_max: float
    prompt_tokens: int
    new_tokens: int
    token_s: float
    wait_for_blocks_s: float
    logs: Path | None


def parse_kinds(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[Kind, ...]:
    kinds = tuple(kind for kind in KINDS if kind in text.split(","))
    if len(kinds) != len(text.split(",")):
        raise click.BadParameter(f"{text}: some of {','.join(KINDS)}, each once")
    return kinds


@click.command(context_settings={"show_default": True}, help=__doc__.replace("\n\n", "\n\n\b\n", 1))
@click.option("--faults", type=click.IntRange(1), default=1000, help="how many")
@click.option("--servers", type=click.IntRange(6, 60), default=10, help="processes that hold blocks")
@click.option("--sessions", type=click.IntRange(1), default=4, help="generations at once, each by a client of its own")
@click.option("--kinds", callback=parse_kinds, default=",".join(KINDS), help="of faults")
@click.option("--seed", default=0, help="of prompts, moments, kinds and servers")
@click.option("--every", "every_s", type=click.FloatRange(0.1), default=1.6, help="mean seconds between faults")
@click.option(
    "--down-max", type=click.FloatRange(0, 1), default=0.4, help="share of the servers that may be down; others wait"
)
@click.option("--prompt-tokens", type=click.IntRange(1, 900), default=512)
@click.option("--new-tokens", type=click.IntRange(2, 100), default=64, help="of one generation")
@click.option("--token-ms", type=click.FloatRange(0), default=25.0, help="a client's pause after each token")
@click.option(
    "--wait-for-blocks", "wait_for_blocks_s", type=click.FloatRange(0), default=0.0, help="the clients' option"
)
@click.option("--logs", type=click.Path(path_type=Path), help="where all processes' logs are copied")
@click.option("--json", "path", type=click.Path(path_type=Path), help="where the raw figures go")
@click.option("--check", is_flag=True, help="exit 1 unless the project's promises are kept")
def main(path: Path | None, check: bool, token_ms: float, **options: Any) -> None:  # noqa: ANN401 - click's own
    chosen = Options(token_s=token_ms / 1000, **options)
    if IN_NAMESPACES & set(chosen.kinds):
        if not namespaces_available():
            raise click.UsageError(f"no namespaces here; leave out {' and '.join(sorted(IN_NAMESPACES))}: --kinds")
        enter_namespaces()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything below is cleaned up
    os.environ["PYTHONPATH"] = str(ROOT)  # for the process that servers are forked from
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # which cleans up behind servers that were killed
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    run = unleash(chosen)
    broken_promises = report(run, path, {name: str(getattr(chosen, name)) for name in Options.__slots__})
    whole = len(run.faults) == chosen.faults
    sys.exit(1 if check and (broken_promises or not whole) else 0)


def unleash(options: Options) -> Run:
    """Start everything, do the faults, and return what happened."""
    events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
    configure_events(events)
    full = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    cases = make_cases(full, CASES, options.prompt_tokens, options.new_tokens, options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-chaos-")))
        network = stack.enter_context(machines()) if IN_NAMESPACES & set(options.kinds) else None
        swarm = stack.enter_context(
            LocalSwarm(
                CHECKPOINT,
                options=("--dtype", "float32"),
                env=environment(folder / "bootstrap"),
                host=network.host if network else "127.0.0.1",
                launch=warm.launch,
            )
        )
        slots = start_servers(swarm, options.servers, folder, network)
        clients = [stack.enter_context(joined(swarm, i, cases, options)) for i in range(options.sessions)]
        faults = Faults(swarm, slots, network, random.Random(options.seed))
        try:
            began, cpu = time.time(), psutil.cpu_times()
            hung = rage(faults, clients, options)
            generations = [made for client in clients for made in client.generations]
            stolen = stolen_share(cpu, psutil.cpu_times())
            return Run(time.time() - began, faults.done, faults.died, generations, hung, list(events), stolen)
        finally:
            faults.end()
            if options.logs is not None:
                keep_logs(folder, swarm, events, options.logs)


def stolen_share(before: Any, after: Any) -> float:  # noqa: ANN401 - psutil's, of this platform
    """Return which share of processor time the host gave to others meanwhile. before, after: `psutil.cpu_times()`."""
    passed = [b - a for a, b in zip(before, after, strict=True)]
    return (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / max(1e-9, sum(passed))


def start_servers(swarm: LocalSwarm, count: int, folder: Path, network: Machines | None) -> list[Slot]:
    """Start all servers, each at a place of its own, and wait until they are online."""
    slots = []
    for number in range(1, count + 1):
        blocks = Blocks.parse(SPANS[(number - 1) % len(SPANS)], N_BLOCKS)
        home = folder / f"server-{number}"
        place = network.place(number, home, environment(home)) if network else plain_place(home, environment(home))
        (home / "tmp").mkdir()
        slots.append(Slot(number, blocks, place, start(swarm, blocks, place)))
    for slot in slots:
        slot.peer_id = slot.process.wait_ready().ready["peer_id"]
    return slots


@contextmanager
def joined(swarm: LocalSwarm, number: int, cases: Sequence[Case], options: Options) -> Iterator[Client]:
    """A client that has joined and not begun."""
    with AutoDistributedModel.from_pretrained(
        CHECKPOINT,
        initial_peers=swarm.initial_peers,
        network=swarm.network,
        dtype=torch.float32,
        wait_for_blocks_s=options.wait_for_blocks_s,
    ) as model:
        first = number % len(cases)
        yield Client(number, model, cases[first:] + cases[:first], options.token_s)


def rage(faults: Faults, clients: Sequence[Client], options: Options) -> int:
    """Do all faults, or until Ctrl-C, while the clients generate. Returns how many generations never ended."""
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    for client in clients:
        client.start()
    next_at = time.time() + SETTLE_S
    while len(faults.done) < options.faults and not interrupted.is_set():
        time.sleep(TICK_S)
        faults.tick()
        raise_crashes(clients)
        if time.time() >= next_at and strike(faults, clients, options):
            next_at = time.time() + faults.rng.expovariate(1 / options.every_s)
            progress(len(faults.done), options.faults, clients)
    deadline = time.time() + END_TIMEOUT_S
    for client in clients:
        client.stop()
    while any(client.alive for client in clients) and time.time() < deadline:
        time.sleep(TICK_S)
        faults.tick()
    raise_crashes(clients)
    return sum(client.alive for client in clients)


def strike(faults: Faults, clients: Sequence[Client], options: Options) -> bool:
    """Do one fault, to a server that sessions use if possible. Returns False where nothing may be done now."""
    if sum(not slot.live for slot in faults.slots) >= options.down_max * len(faults.slots):
        return False  # a machine that does little but start servers shows how busy it is, and nothing else
    routes = [client.peers() for client in clients]
    chosen = choose(faults.slots, options.kinds, {peer for route in routes for peer in route}, faults.rng)
    if chosen is None:
        return False
    kind, slot = chosen
    return faults.begin(kind, slot, sum(slot.peer_id in route for route in routes))


def raise_crashes(clients: Sequence[Client]) -> None:
    """Raise what ended a client for another reason than the swarm."""
    for client in clients:
        if client.crash is not None:
            raise client.crash


def progress(done: int, wanted: int, clients: Sequence[Client]) -> None:
    if done % max(1, wanted // 20) == 0:
        made = [generation for client in clients for generation in list(client.generations)]
        failed = sum(not generation.completed for generation in made)
        print(
            f"{done} faults, {len(made)} generations, {failed} failed, {sum(m.wrong for m in made)} wrong", flush=True
        )


def environment(home: Path) -> dict[str, str]:
    """Variables for a process: its caches, its settings and its temporary files are at home."""
    names = {"XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data", "TMPDIR": "tmp"}
    return {"PYTHONPATH": str(ROOT), **{name: str(home / folder) for name, folder in names.items()}}


def configure_events(events: "deque[dict[str, Any]]") -> None:
    """Keep the clients' events instead of printing them."""

    def keep(_logger: object, level: str, event: dict[str, Any]) -> dict[str, Any]:
        events.append({"at": time.time(), "level": level, **event})
        raise structlog.DropEvent

    structlog.configure(processors=[keep])


def keep_logs(folder: Path, swarm: LocalSwarm, events: "deque[dict[str, Any]]", target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in (*folder.rglob("*.log"), *swarm.folder.glob("*.log")):
        shutil.copy(log, target / log.name)
    (target / "clients.log").write_text("".join(f"{event}\n" for event in events))


if __name__ == "__main__":
    main()
