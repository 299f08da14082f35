"""An honest client's steps while fifty hostile peers attack its server, against the same without; and what is left.

    python benchmarks/hostile.py [--rounds 4] [--seconds 10] [--model llama|tiny] [--kinds NAME,...] [--check] [--quick]

One server of a llama with 100 million parameters and grouped-query attention (2 of 12 heads are keys' and values', as
in today's models), or of a tiny one, and the honest client, on the first core; fifty attackers of seven kinds on the
second (`hostile_peers.py` says what each kind does). A loop that never waits fills the second core all the time with
the lowest priority, so that its load is the same with and without them. Stretches with and without attackers take
turns.

Afterwards all accounts must be back at zero: every session that was opened has ended (the server's log), no connection
is left (the kernel), and the server announces as much free cache as before (the directory).
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from common import SEED, ByHand, Samples, table, tiny_llama, write_json
from hostile_peers import KINDS, Target
from load import Bench, Flow, save_checkpoint

from swarm.blocks import Blocks
from swarm.client import AutoDistributedModel
from swarm.demo.local import LocalSwarm
from swarm.dht.records import Announcement

CACHE_TOKENS = 32768
JOURNAL_MB = 32
PROMPT = 64
# Twenty-one attackers leave room for a session of so many positions in a full pool, but not for thousands.
POSITIONS_MAX, STEPS_MAX = 480, 400
P99_FACTOR_MAX = 2.0
MEMORY_MIB_MAX = 256
SETTLE_S = 60.0  # an announcement is renewed every 20 s
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    blocks: int
    save: Callable[[Path, int], object]


MODELS = {
    "llama": Model(
        12, lambda folder, seed: save_checkpoint(folder, "llama", torch.float32, seed, num_key_value_heads=2)
    ),
    "tiny": Model(4, lambda folder, seed: tiny_llama(folder, 4, seed)),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=4, help="stretches of either kind")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of one stretch")
    arguments.add_argument("--model", choices=MODELS, default="llama", help="what is served")
    arguments.add_argument("--kinds", default=",".join(KINDS), help="of attackers")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="short stretches, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    rounds, seconds = (1, 2.0) if options.quick else (options.rounds, options.seconds)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})  # what is started from here inherits it
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        model = MODELS[options.model]
        model.save(Path(folder), options.seed)
        run = measure(Path(folder), model, cores, rounds, seconds, options.kinds)
    run.show()
    samples = [run.alone, run.attacked]
    broken = run.broken_promises()
    more = {"model": options.model, "memory_mib": run.memory, "did": run.did}
    write_json(options.json, "hostile", options.seed, samples, **more, broken=broken)
    for promise in broken:
        print(f"BROKEN: {promise}")
    sys.exit(1 if options.check and broken else 0)


class Run:
    """What happened."""

    def __init__(self) -> None:
        self.alone, self.attacked = Samples("step, no attack"), Samples("step, attacked")
        self.memory: dict[str, float] = {}
        self.did: list[dict[str, dict[str, int]]] = []
        self.left: dict[str, int] = {}
        self.alive = True

    @property
    def factor(self) -> float:
        """How many times as long the slowest hundredth of steps takes."""
        return self.attacked.percentile(0.99) / self.alone.percentile(0.99)

    def broken_promises(self) -> list[str]:
        """What the project promises and this run does not keep."""
        broken = [f"left afterwards: {count} {what}" for what, count in self.left.items() if count]
        if not self.alive:
            broken.append("the server has ended")
        if self.factor > P99_FACTOR_MAX:
            broken.append(f"p99 is {self.factor:.2f} times what it was")
        if (more := self.memory["most"] - self.memory["before"]) > MEMORY_MIB_MAX:
            broken.append(f"{more:.0f} MiB more than before")
        return broken

    def show(self) -> None:
        """Print the tables."""
        did: dict[str, dict[str, int]] = {}
        for stretch in self.did:
            for kind, counts in stretch.items():
                for what, count in counts.items():
                    did.setdefault(kind, {})[what] = did.get(kind, {}).get(what, 0) + count
        for kind, counts in did.items():
            print(f"{kind}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
        rows = [
            [s.name, f"{len(s.ms)}", f"{s.median:.2f}", f"{s.percentile(0.99):.2f}", f"{max(s.ms):.0f}"]
            for s in (self.alone, self.attacked)
        ]
        ratio = self.attacked.median / self.alone.median
        rows.append(["attacked / no attack", "", f"{ratio:.2f}", f"{self.factor:.2f}", ""])
        table("an honest client's steps, ms", ["", "count", "median", "p99", "longest"], rows)
        sizes = [[name, f"{mib:.0f}", f"{mib - self.memory['before']:.0f}"] for name, mib in self.memory.items()]
        table("the server and its p2pd, resident MiB", ["", "MiB", "more than before"], sizes)
        table("left afterwards", ["", "count"], [[what, str(count)] for what, count in self.left.items()])


def measure(folder: Path, what: Model, cores: list[int], rounds: int, seconds: float, kinds: str) -> Run:
    """Run everything."""
    run = Run()
    options = ("--dtype", "float32", "--cache-tokens", str(CACHE_TOKENS), "--journal-memory", f"{JOURNAL_MB}MB")
    with LocalSwarm(folder, [f"0:{what.blocks}"], options=options) as swarm:
        server = swarm.servers[0]
        model = AutoDistributedModel.from_pretrained(
            swarm.model, initial_peers=swarm.initial_peers, network=swarm.network, dtype=torch.float32
        )
        with model:
            client = Bench(model, torch.float32, [server.ready["pid"]])
            for process in psutil.Process().children(recursive=True):
                if process.name() == "p2pd":  # of client and directory, too: not what is measured
                    process.cpu_affinity(cores)
            free = announced_free(client)
            router = ByHand.take_over(client.client)  # p2pd and the directory's nodes may get too little of the core
            record = client.run(router.surveys.read()).servers[0].announcement
            router.by_hand = client.run(router.servers_in_turn([record.peer_id], [Blocks(0, what.blocks)]))
            with attackers(
                cores[-1], target_of(record, server.ready, swarm.network, client.width, what.blocks), kinds
            ) as hostile:
                client.run(stretch(client, what.blocks, seconds / 2))  # warm
                tree = Tree(server.ready["pid"])
                run.memory["before"] = tree.resident()
                for _ in range(rounds):
                    run.alone.ms += client.run(stretch(client, what.blocks, seconds))
                    run.attacked.ms += client.run(stretch(client, what.blocks, seconds, hostile))
                    run.did.append(json.loads(hostile.readline()))
                run.memory["most"] = tree.most()
            run.alive = server.process.poll() is None
            run.left = settled(client, server.log, server.ready, free)
            run.memory["after"] = tree.resident()
    return run


class Hostile:
    """The attackers' process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def go(self, seconds: float, victim: str) -> None:
        """Let them loose."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds} {victim}\n")
        self._process.stdin.flush()

    def readline(self) -> str:
        """What they say."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def attackers(core: int, target: Target, kinds: str) -> Iterator[Hostile]:
    """The attackers, and what fills their core."""
    pinned = ("taskset", "-c", str(core))
    line = (*pinned, sys.executable, str(HERE / "hostile_peers.py"), json.dumps(asdict(target)), kinds)
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    filling = subprocess.Popen((*pinned, "nice", "-n", "19", sys.executable, "-c", "while True: pass"))
    try:
        hostile = Hostile(process)
        assert hostile.readline() == "ready\n"
        yield hostile
    finally:
        for each in (process, filling):
            each.kill()
            each.wait()


def target_of(record: Announcement, ready: dict[str, str], network: str, width: int, blocks: int) -> Target:
    """What anybody can read in the directory."""
    host, _, port = ready["data_address"].rpartition(":")
    return Target(
        host=host,
        port=int(port),
        peer=record.peer_id,
        channel_key=record.channel_key,
        network=network,
        root=record.root,
        numeric_class=record.numeric_class,
        blocks=blocks,
        width=width,
    )


async def stretch(client: Bench, blocks: int, seconds: float, hostile: Hostile | None = None) -> list[float]:
    """Decode for a while, attacked from the first step on or not. Returns ms per step."""
    ms: list[float] = []
    until = math.inf  # a busy machine may open the first session slowly; only steps are measured
    while time.perf_counter() < until:
        (flow,) = await client.open(1, positions_max=POSITIONS_MAX, blocks=blocks)
        await flow.prefill(PROMPT)
        if until == math.inf:
            until = time.perf_counter() + seconds
            if hostile is not None:
                hostile.go(seconds, flow.session.id)
        await decode(flow, until)
        await client.close([flow])
        ms += flow.ms
    return ms


async def decode(flow: Flow, until: float) -> None:
    for _ in range(STEPS_MAX):
        if time.perf_counter() >= until:
            return
        await flow.decode(1)


class Tree:
    """A process and its children."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self._pids = [pid, *(child.pid for child in process.children(recursive=True))]
        for each in self._pids:
            Path(f"/proc/{each}/clear_refs").write_text("5")  # the most so far is now

    def resident(self) -> float:
        """MiB, now."""
        return self._sum("VmRSS")

    def most(self) -> float:
        """The sum of what each had at most, even if at different times."""
        return self._sum("VmHWM")

    def _sum(self, field: str) -> float:
        total = 0
        for pid in self._pids:
            with suppress(FileNotFoundError, ProcessLookupError):  # a child that has ended holds nothing
                if match := re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
                    total += int(match[1])
        return total / 1024


def announced_free(client: Bench) -> int:
    """Free tokens, as the server last announced them."""
    survey = client.run(client.client.membership.router.surveys.read())
    return sum(signed.announcement.free_tokens or 0 for signed in survey.servers)


def settled(client: Bench, log: Path, ready: dict[str, object], free: int) -> dict[str, int]:
    """What is left of sessions, connections and cache when all have gone; waits a while for it to be nothing."""
    port, pid = int(str(ready["data_address"]).rpartition(":")[2]), int(str(ready["pid"]))
    ours = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port}
    deadline = time.monotonic() + SETTLE_S
    while True:
        text = log.read_text(errors="replace")
        theirs = [
            c
            for c in psutil.Process(pid).net_connections("tcp")
            if c.laddr.port == port and c.raddr and c.raddr.port not in ours
        ]
        left = {
            "sessions": text.count("session opened") - text.count("session ended"),
            "connections": len(theirs),
            "cached tokens": free - announced_free(client),
            "tracebacks in the log": text.count("Traceback"),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(1)


if __name__ == "__main__":
    main()
