"""An hour of a whole swarm under streams that come and go: what grows, what stays open, and what is left at the end.

    python benchmarks/soak.py [--seconds 3600] [--streams 32] [--every 20] [--check] [--quick] [--json PATH]

A bootstrap node, six servers of the demo's checkpoint (three are killed in turn, one each `--every` seconds, and
another one of the span takes its place), a gateway, the health page, and a client in a process of its own, whose every
text is compared with the whole model's. Streams ask the gateway for short and long answers to prompts of up to 20,000
tokens; three of ten are cut off at a random moment. For that the checkpoint's config allows 32,768 positions, which is
more than it was trained for and changes no cost.

All processes that are not killed are watched, their children too. Eight times the load rests, and that time comes on
top: answers under way and kept conversations end, and memory goes back to the system. What a process has of its own
then grows by so much per 1,000 generations: a least-squares fit of the rests without the first two, when caches are not
yet as large as they get, with twice its standard error. A server's fit has the tokens of its pool beside generations.
A generation is an answer of the gateway's, whole or cut off, or a text of the client's. Descriptors are compared
between the third and the last quarter of all samples. A minute after the end no server may have a session.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event as EventOfProcesses
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import numpy
import psutil
import torch
from common import SEED, table, write_json
from transformers import AutoModelForCausalLM

from swarm.client import AutoDistributedModel
from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalProcess, LocalSwarm, Place
from swarm.identity import Identity
from tests.support import warm

SPANS = ("0:4", "4:8", "8:12")
POSITIONS, LONG_PROMPT, LONG_SHARE = 32768, 20000, 0.005
CUT_SHARE = 0.3
GROWTH_MIB_MAX, GENERATIONS_MIN = 1.0, 500  # per 1,000 generations; between rests, for growth to tell anything
DESCRIPTORS_MAX = 8  # more than before: connections come and go
CACHE = "512MiB"  # of each server: soon as full of kept prompts as it gets
KEPT_MB_MAX = 1.0  # of the gateway's memory for each conversation that it keeps
KEPT_S, PATIENCE_S = 60.0, 600.0  # idle conversations end in a rest, which waits for them and for answers
QUIET_S = 60.0
TEXTS, TEXT_TOKENS = 8, 24  # the client's texts
SAMPLES = 240
RESTS, REST_S, WARM_RESTS = 8, 75.0, 2  # a rest is long enough for the gateway and the servers to give memory back
PEER = re.compile(r"12D3KooW\w+")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process has. generations: of the whole swarm until then. own: bytes of memory that no other shares.

    pool: of a server, the tokens that sessions hold, and those that are lent to beginnings of prompts.
    """

    generations: int
    own: int
    descriptors: int
    pool: tuple[float, float] | None = None


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=3600.0)
    arguments.add_argument("--streams", type=int, default=32, help="at once")
    arguments.add_argument("--every", type=float, default=20.0, help="seconds between kills; 0 kills none")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="a few requests, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.seconds, options.streams, options.every = 12.0, 3, 5.0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-soak-")))
        running = stack.enter_context(swarm_of(roomy(folder), folder, min(KEPT_S, options.seconds / RESTS)))
        soak = Soak(running, options)
        asyncio.run(soak.run())
        broken = report(soak, asyncio.run(soak.left()), options)
    for promise in broken:
        print(f"NOT KEPT: {promise}")
    if options.check and broken:
        raise SystemExit(1)


# The swarm


@dataclass(frozen=True, slots=True)
class Running:
    """The processes. texts, wrong: of the client's. rests: it pauses while that is set."""

    swarm: LocalSwarm
    gateway: LocalProcess
    page: LocalProcess
    client: multiprocessing.process.BaseProcess
    texts: "Synchronized[int]"
    wrong: "Synchronized[int]"
    stop: Callable[[], None]
    rests: EventOfProcesses
    metrics: dict[str, int]  # the ports of those servers that are watched

    @property
    def watched(self) -> dict[str, int]:
        """The processes that are not killed, by name: their ids."""
        lasting = [self.swarm.bootstrap, *self.swarm.servers[: len(SPANS)], self.gateway, self.page]
        pids = {each.name: int(each.process.pid) for each in lasting}
        assert self.client.pid is not None
        return {**pids, "client": self.client.pid}


def roomy(folder: Path) -> Path:
    """Copy the demo's checkpoint, with room for long prompts. Its manifest would be another one's."""
    path = folder / "long"
    shutil.copytree(CHECKPOINT, path, ignore=shutil.ignore_patterns("*manifest.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    return path


@contextmanager
def swarm_of(model: Path, folder: Path, kept_s: float) -> Iterator[Running]:
    """Start everything. The servers know the gateway, which keeps conversations for so long."""
    me = Identity.generate()
    options = ("--dtype", "float32", "--gateway", f"{me.peer_id}=512,500,100000", "--cache-memory", CACHE)
    spawn = multiprocessing.get_context("spawn")
    stop, rests, texts, wrong = spawn.Event(), spawn.Event(), spawn.Value("q", 0), spawn.Value("q", 0)
    with LocalSwarm(model, (), options=options, identities={"gateway": me}, launch=warm.launch) as swarm:
        ports = [free_port() for _ in SPANS]
        for span, port in zip(SPANS, ports, strict=True):
            swarm.start_server(span, "--metrics", f"127.0.0.1:{port}")
        for span in SPANS:
            swarm.start_server(span)
        for server in swarm.servers:
            server.wait_ready()
        peers = ("--initial-peers", ",".join(swarm.initial_peers), "--network", swarm.network)
        kept = ("--database", str(folder / "health.sqlite"), "--log-level", "warning")
        place = Place(folder)
        arguments = ("--listen", "127.0.0.1:0", *peers, *kept)
        page = LocalProcess("page", "swarm.monitor.cli", arguments, place, dict(os.environ)).wait_ready()
        common = ("--dtype", "float32", "--threads", "1", "--concurrency", "128", "--log-level", "warning")
        gateway = swarm.start_gateway(*common, "--keep-conversations", str(kept_s)).wait_ready()
        given = (str(model), swarm.initial_peers, swarm.network, stop, rests, texts, wrong)
        client = spawn.Process(target=generate, args=given, name="client", daemon=True)
        client.start()
        try:
            while not texts.value and client.is_alive():
                time.sleep(0.1)
            metrics = {server.name: port for server, port in zip(swarm.servers, ports, strict=False)}
            yield Running(swarm, gateway, page, client, texts, wrong, stop.set, rests, metrics)
        finally:
            stop.set()
            client.join(60.0)
            page.stop()


def generate(
    model: str,
    initial_peers: Sequence[str],
    network: str,
    stop: EventOfProcesses,
    rests: EventOfProcesses,
    texts: "Synchronized[int]",
    wrong: "Synchronized[int]",
) -> None:
    """Generate text after text, in the client's process."""
    torch.set_num_threads(1)
    join = {"initial_peers": initial_peers, "network": network, "dtype": torch.float32}
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    drawn = torch.Generator().manual_seed(SEED)
    prompts = [torch.randint(3, 2000, (1, 24), generator=drawn) for _ in range(TEXTS)]
    settings = {"max_new_tokens": TEXT_TOKENS, "min_new_tokens": TEXT_TOKENS, "do_sample": False}
    expected = [whole.generate(prompt, **settings) for prompt in prompts]
    del whole
    with AutoDistributedModel.from_pretrained(model, **join) as distributed:
        while not stop.is_set():
            for prompt, right in zip(prompts, expected, strict=True):
                while rests.is_set() and not stop.is_set():
                    time.sleep(0.1)
                if stop.is_set():
                    break
                wrong.value += not torch.equal(distributed.generate(prompt, **settings), right)
                texts.value += 1


# The load


class Soak:
    """Load on a swarm, and samples of its processes. ends: how many answers ended in which way. rested: at rests.

    kept: the most conversations that the gateway kept.
    """

    def __init__(self, running: Running, options: argparse.Namespace) -> None:
        self.running = running
        self.ends: Counter[str] = Counter()
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self.rested: defaultdict[str, list[Sample]] = defaultdict(list)
        self.kept = 0.0
        self.kills = 0
        self._options = options
        self._under_way = 0
        self._going = asyncio.Event()
        self._going.set()
        self._until = time.monotonic() + options.seconds

    @property
    def generations(self) -> int:
        """Answers and texts until now."""
        return self.ends.total() + self.running.texts.value

    async def run(self) -> None:
        """Load the swarm until time is over."""
        gateway, rng = self.running.gateway, random.Random(self._options.seed)
        limits = httpx.Limits(max_connections=None)
        asking = httpx.AsyncClient(base_url=gateway.ready["url"], timeout=600, limits=limits)
        async with asking as http, asyncio.TaskGroup() as group:
            for _ in range(self._options.streams):
                group.create_task(self._come_and_go(http, random.Random(rng.random())))
            group.create_task(self._kill())
            group.create_task(self._rest())
            while time.monotonic() < self._until:
                await asyncio.to_thread(self._sample, self.samples)
                await asyncio.sleep(self._options.seconds / SAMPLES)

    async def left(self) -> int:
        """End the gateway and the client. Returns the sessions that servers have a minute later, by their logs."""
        self.running.stop()
        self.running.client.join(60.0)
        self.running.gateway.stop()
        deadline = time.monotonic() + QUIET_S
        while True:
            left = 0
            for server in self.running.swarm.servers:
                if server.process.poll() is None:
                    counts = re.findall(r"sessions\W+(\d+)", server.log.read_text(errors="replace"))
                    left += int(counts[-1]) if counts else 0
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(1.0)

    async def _rest(self) -> None:
        """Let the load rest from time to time, and sample what processes have then."""
        for _ in range(RESTS):
            await asyncio.sleep(self._options.seconds / RESTS)
            began = time.monotonic()
            self._going.clear()
            self.running.rests.set()
            kept = await asyncio.to_thread(self._kept_now)
            self.kept = max(self.kept, kept)
            while (self._under_way or kept) and time.monotonic() < began + PATIENCE_S:
                await asyncio.sleep(1.0)
                kept = await asyncio.to_thread(self._kept_now)
            await asyncio.sleep(min(REST_S, self._options.seconds / RESTS))
            await asyncio.to_thread(self._sample, self.rested)
            self._until += time.monotonic() - began
            self.running.rests.clear()
            self._going.set()

    def _kept_now(self) -> float:
        url = self.running.gateway.ready["url"]
        return gauge(httpx.get(f"{url}/metrics").text, "conversations_idle")

    def _sample(self, samples: defaultdict[str, list[Sample]]) -> None:
        for name, pid in self.running.watched.items():
            process, port = psutil.Process(pid), self.running.metrics.get(name)
            pool = None if port is None else pool_of(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
            with suppress(psutil.NoSuchProcess):
                for each in (process, *process.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        known = name if each is process else f"{name}: {each.name()} {each.pid}"
                        own = each.memory_full_info().uss
                        mine = pool if each is process else None
                        samples[known].append(Sample(self.generations, own, each.num_fds(), mine))

    async def _come_and_go(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Ask again and again: short and long prompts, some answers cut off at a random moment."""
        name = self.running.gateway.ready["models"][0]
        while time.monotonic() < self._until:
            length = LONG_PROMPT if rng.random() < LONG_SHARE else rng.choice((40, 200, 800))
            ids = [3 + rng.randrange(2000) for _ in range(length)]
            body = {"model": name, "prompt": ids, "max_tokens": rng.choice((8, 40, 120)), "ignore_eos": True}
            patience_s = rng.uniform(0.0, 2.0) if rng.random() < CUT_SHARE else 600.0
            await self._going.wait()
            self._under_way += 1
            try:
                async with asyncio.timeout(patience_s):
                    response = await http.post("/v1/completions", json=body)
                whole, why = response.status_code == 200, f"{response.status_code}, {length} tokens: {response.text}"
                self.ends["whole" if whole else PEER.sub("...", why)[:120]] += 1
            except TimeoutError:
                self.ends["cut off by the client"] += 1
            except httpx.HTTPError as error:
                self.ends[f"failed: {type(error).__name__}"] += 1
            finally:
                self._under_way -= 1

    async def _kill(self) -> None:
        """Kill one server after the other, of those that are not watched."""
        every_s, swarm = self._options.every, self.running.swarm
        alive = list(zip(SPANS, swarm.servers[len(SPANS) :], strict=True))
        while every_s and time.monotonic() + every_s < self._until:
            await asyncio.sleep(every_s)
            span, victim = alive.pop(0)
            await asyncio.to_thread(victim.kill)
            self.kills += 1
            alive.append((span, await asyncio.to_thread(swarm.start_server, span)))


def gauge(metrics: str, name: str) -> float:
    """Return a figure of `/metrics`."""
    found = re.search(rf"^\S*{name} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def pool_of(metrics: str) -> tuple[float, float]:
    """Return the tokens of a server's pool that are used, and those that are lent."""
    return gauge(metrics, "server_cache_tokens_used"), gauge(metrics, "server_prefix_tokens_held")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# What grew


def growth_mib(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return how many MiB of its own a process has more after 1,000 generations, and twice the standard error."""
    own = numpy.array([each.own / 2**20 for each in samples])
    columns = numpy.array([(1.0, each.generations / 1000, sum(each.pool or ()) / 1000) for each in samples])
    columns = columns[:, [True, True, bool(columns[:, 2].std())]]  # a pool that was the same at all rests tells nothing
    fit, *_ = numpy.linalg.lstsq(columns, own, rcond=None)
    left = own - columns @ fit
    variance = left @ left / max(1, len(own) - columns.shape[1]) * numpy.linalg.pinv(columns.T @ columns)[1, 1]
    return float(fit[1]), 2 * float(variance) ** 0.5


def tells(rests: Sequence[Sample]) -> bool:
    """Whether enough was generated between rests for growth to tell anything."""
    return rests[-1].generations - rests[0].generations >= GENERATIONS_MIN


def opened(samples: Sequence[Sample]) -> float:
    """Return how many descriptors more a process has in the later half of samples, in the median."""
    half = len(samples) // 2
    return statistics.median(s.descriptors for s in samples[half:]) - statistics.median(
        s.descriptors for s in samples[:half]
    )


def errors_of(running: Running) -> Counter[str]:
    """Return the errors and tracebacks in the logs of all processes, those that were killed too."""
    found: Counter[str] = Counter()
    for process in (running.swarm.bootstrap, *running.swarm.servers, running.gateway, running.page):
        for line in process.log.read_text(errors="replace").splitlines():
            if "Traceback" in line or re.search(r'"level": "(error|critical)"|\b(error|critical)\s*\]', line):
                found[f"{process.name.partition('-')[0]}: {line[:200]}"] += 1
    return found


def report(soak: Soak, left: int, options: argparse.Namespace) -> list[str]:
    """Print and write everything. Returns the promises that were not kept."""
    rows, broken = [], []
    for name, samples in soak.samples.items():
        later = samples[len(samples) // 2 :]
        if len(soak.rested[name]) < RESTS or len(later) < 4:
            continue  # a child that came and went
        rests = soak.rested[name][WARM_RESTS:]
        (grown, error), more = growth_mib(rests), opened(later)
        mib = [f"{each.own / 2**20:.0f}" for each in (samples[0], rests[0], rests[-1])]
        slope = f"{grown:+.2f} ± {error:.2f}"
        rows.append([name, *mib, slope, str(later[0].descriptors), f"{more:+.0f}"])
        if grown - error > GROWTH_MIB_MAX and tells(rests):
            broken.append(f"{name} grows by {grown:.2f} MiB per 1,000 generations")
        if more > DESCRIPTORS_MAX and tells(rests):
            broken.append(f"{name} has {more:.0f} descriptors more")
    columns = ["process", "MiB at first", "third rest", "last rest", "per 1,000", "descriptors", "more"]
    table(f"{soak.generations} generations in {options.seconds:.0f} s, {soak.kills} kills", columns, rows)
    errors = errors_of(soak.running)
    texts, wrong = soak.running.texts.value, soak.running.wrong.value
    facts = [["the client's texts", str(texts)], ["of them wrong", str(wrong)], ["sessions left", str(left)],
             ["conversations kept", f"{soak.kept:.0f}"],
             *([end, str(count)] for end, count in sorted(soak.ends.items())),
             *([f"logged: {line}", str(count)] for line, count in errors.most_common(20))]  # fmt: skip
    table("beside", ["", ""], facts)
    rests = soak.rested["gateway"][WARM_RESTS:]
    grown_mb = (rests[-1].own - rests[0].own) / 2**20
    failed = [end for end in soak.ends if not end.startswith(("whole", "cut", "429"))]
    grows = tells(rests) and grown_mb > KEPT_MB_MAX * max(soak.kept, 1)
    broken += [f"the gateway's memory grew by {grown_mb:.1f} MB"] * grows
    broken += [f"{left} sessions are left"] * (left > 0) + [f"{wrong} texts are wrong"] * (wrong > 0)
    broken += [f"answers failed: {failed}"] * bool(failed) + ["errors were logged"] * bool(errors)
    broken += ["the client failed"] * (soak.running.client.exitcode != 0)
    write_json(
        options.json, "soak", options.seed, [], seconds=options.seconds, kills=soak.kills, columns=columns, rows=rows,
        ends=dict(soak.ends), texts=texts, wrong=wrong, left=left, kept=soak.kept, errors=dict(errors), broken=broken,
        rests={name: [asdict(each) for each in samples] for name, samples in soak.rested.items()},
    )  # fmt: skip
    return broken


if __name__ == "__main__":
    main()
