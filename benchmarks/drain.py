"""Servers are asked to stop in the middle of generations: do sessions notice, and what does the slowest step take?

    python benchmarks/drain.py [--drains 20] [--sessions 2] [--check]

Six servers of the demo checkpoint, two for each third of it. Clients generate without a pause, in float32, from prompts
of 512 tokens, and every token is compared with the local model's. One after another, a server that a session uses gets
SIGTERM; it hands its sessions on, ends, and another is started in its place. What is printed: how the servers ended,
how many generations completed with how many wrong tokens, and what a step takes, with and without a move in it.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from chaos_sessions import Case, Client, Step, make_cases
from common import SEED, Samples, table, write_json
from transformers import AutoModelForCausalLM

from swarm.client import AutoDistributedModel
from swarm.demo.local import LocalProcess, LocalSwarm

CHECKPOINT = Path(__file__).resolve().parent.parent / "swarm" / "demo" / "checkpoint"
SPANS = ("0:4", "4:8", "8:12") * 2
STEP_S_MAX = 1.0
SETTLE_S = 2.0
END_TIMEOUT_S = 60.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--drains", type=int, default=20, help="servers that are asked to stop")
    arguments.add_argument("--sessions", type=int, default=2, help="generations at once, each by a client of its own")
    arguments.add_argument("--prompt-tokens", type=int, default=512)
    arguments.add_argument("--new-tokens", type=int, default=100, help="of one generation")
    arguments.add_argument("--seed", type=int, default=SEED)
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    full = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    cases = make_cases(full, 4, options.prompt_tokens, options.new_tokens, options.seed)
    with LocalSwarm(CHECKPOINT, SPANS, options=("--dtype", "float32")) as swarm, ExitStack() as stack:
        running = []
        for number in range(options.sessions):
            model = AutoDistributedModel.from_pretrained(
                CHECKPOINT, initial_peers=swarm.initial_peers, network=swarm.network, dtype=torch.float32
            )
            running.append(Client(number, stack.enter_context(model), _from(cases, number), 0.0))
        codes = drain(swarm, running, options.drains, random.Random(options.seed))
    made = [generation for client in running for generation in client.generations]
    failed = [generation.error for generation in made if not generation.completed]
    wrong = sum(generation.wrong for generation in made)
    steps = [step for generation in made for step in generation.steps]
    samples = [
        _samples("no move", [s for s in steps if s.before == s.after]),
        _samples("a move", [s for s in steps if s.before != s.after]),
    ]
    print(f"{len(codes)} servers ended, with codes {sorted(set(codes))}")
    print(f"{len(made)} generations, {len(failed)} failed, {wrong} wrong tokens of {len(steps)}")
    rows = [
        [each.name, str(len(each.ms)), *(f"{ms:.1f}" for ms in (each.median, each.percentile(0.99), max(each.ms)))]
        for each in samples
        if each.ms
    ]
    table("a step, ms", ["", "count", "median", "p99", "longest"], rows)
    broken = [f"a generation failed: {why}" for why in failed]
    broken += [f"{wrong} wrong tokens"] if wrong else []
    broken += [f"a server ended with code {code}" for code in codes if code]
    if (slowest := max(max(each.ms, default=0.0) for each in samples) / 1000) > STEP_S_MAX:
        broken.append(f"a step took {slowest:.2f} s")
    write_json(options.json, "drain", options.seed, samples, codes=codes, broken=broken)
    for promise in broken:
        print(f"NOT KEPT: {promise}")
    sys.exit(1 if options.check and broken else 0)


def _from(cases: Sequence[Case], number: int) -> list[Case]:
    first = number % len(cases)
    return [*cases[first:], *cases[:first]]


def drain(swarm: LocalSwarm, clients: Sequence[Client], count: int, rng: random.Random) -> list[int]:
    """Ask servers that sessions use to stop, one after another. Returns their exit codes."""
    servers: dict[str, tuple[LocalProcess, str]] = {
        server.ready["peer_id"]: (server, blocks) for server, blocks in zip(swarm.servers, SPANS, strict=True)
    }
    for client in clients:
        client.start()
    codes: list[int] = []
    while len(codes) < count:
        time.sleep(rng.uniform(0.5, 1.0) * SETTLE_S)
        used = sorted({peer for client in clients for peer in client.peers()} & servers.keys())
        if not used:
            continue
        process, blocks = servers.pop(rng.choice(used))
        codes.append(process.stop())
        new = swarm.start_server(blocks).wait_ready()
        servers[new.ready["peer_id"]] = (new, blocks)
    time.sleep(SETTLE_S)
    for client in clients:
        client.stop()
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(client.alive for client in clients) and time.monotonic() < deadline:
        time.sleep(0.05)
    for client in clients:
        if client.crash is not None:
            raise client.crash
        assert not client.alive, "a generation does not end"
    return codes


def _samples(name: str, steps: Sequence[Step]) -> Samples:
    return Samples(name, [1000 * step.took_s for step in steps])


if __name__ == "__main__":
    main()
