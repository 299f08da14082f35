"""Streams through the gateway while servers are killed: texts, gaps, statuses, against the same streams undisturbed.

python benchmarks/gateway_faults.py [--streams 32] [--tokens 200] [--every 2] [--check]

Half of the streams are greedy, half sampled with a seed. A swarm of the demo's checkpoint in float32 has two servers of
each span. Every so many seconds a server is killed with SIGKILL, in turn, and another one of its span starts. Each
stream then has the text of the undisturbed run, or two of its likeliest tokens were nearly as likely in that run.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
from common import SEED, Samples, table, write_json

from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalProcess, LocalSwarm
from swarm.identity import Identity
from tests.support import warm

SPANS = ("0:4", "4:8", "8:12")
GAP_S_MAX = 3.0
NEAR = 1e-3  # natural logarithms of probabilities that are no farther apart may come out in either order


@dataclass(slots=True)
class Stream:
    """One answer: pieces and their times, and how near its likeliest tokens ever were."""

    status: int = 0
    text: str = ""
    times: list[float] = field(default_factory=list)
    done: bool = False
    error: str = ""
    margin: float = float("inf")

    @property
    def gap_s(self) -> float:
        """The longest silence between two pieces."""
        return max((b - a for a, b in pairwise(self.times)), default=0.0)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--streams", type=int, default=32, help="of either kind")
    arguments.add_argument("--tokens", type=int, default=200, help="of each stream")
    arguments.add_argument("--every", type=float, default=2.0, help="seconds between kills")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="few and short streams, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.streams, options.tokens = 2, 40
    me = Identity.generate()  # the servers know the gateway: a repair of all streams opens as many sessions at once
    allowed = ("--dtype", "float32", "--gateway", f"{me.peer_id}=512,500,100000")
    served = {"options": allowed, "log_level": "warning", "launch": warm.launch, "identities": {"gateway": me}}
    with LocalSwarm(CHECKPOINT, SPANS * 2, **served) as swarm:
        gateway = swarm.start_gateway("--dtype", "float32", "--threads", "1", "--concurrency", "256").wait_ready()
        url, name = gateway.ready["url"], gateway.ready["models"][0]
        bodies = requests(name, options.streams, options.tokens, options.seed)
        undisturbed = asyncio.run(stream_all(url, bodies))
        killed, disturbed = asyncio.run(with_kills(swarm, url, bodies, options.every))
    report(undisturbed, disturbed, killed, options)


def requests(name: str, streams: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return the bodies: of each pair one is greedy and one has a seed."""
    code = Path(__file__).read_text()
    bodies = []
    for index in range(streams):
        start = 97 * (index + seed)
        prompt = code[start % 3000 : start % 3000 + 120]
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": index}):
            body = {"model": name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 2}
            bodies.append({**body, **sampling, "stream": True})
    return bodies


async def stream_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """Stream all answers at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(stream(client, body) for body in bodies))


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Stream:
    """Stream one answer."""
    answer = Stream()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        answer.status = response.status_code
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                take(answer, json.loads(line[6:]))
    return answer


def take(answer: Stream, told: dict[str, Any]) -> None:
    """Take one event of a stream."""
    if "error" in told:
        answer.error = told["error"]["message"]
        return
    choice = told["choices"][0]
    answer.text += choice["text"]
    answer.times.append(time.monotonic())
    for top in (choice["logprobs"] or {}).get("top_logprobs") or []:
        if top and len(top) > 1:
            first, second = sorted(top.values(), reverse=True)[:2]
            answer.margin = min(answer.margin, first - second)


async def with_kills(
    swarm: LocalSwarm, url: str, bodies: Sequence[dict[str, Any]], every_s: float
) -> tuple[int, list[Stream]]:
    """Stream all answers while servers are killed. Returns how many were."""
    streaming = asyncio.create_task(stream_all(url, bodies))
    alive: list[tuple[str, LocalProcess]] = list(zip(SPANS * 2, swarm.servers, strict=True))
    killed = 0
    while not streaming.done():
        await asyncio.wait({streaming}, timeout=every_s)
        span, victim = alive.pop(0)
        spare = any(other == span and process.is_ready() for other, process in alive)
        if streaming.done() or not spare:
            alive.insert(1, (span, victim))  # no spare stands ready: another one's turn
            continue
        victim.kill()
        killed += 1
        alive.append((span, swarm.start_server(span)))
    return killed, await streaming


def report(undisturbed: list[Stream], disturbed: list[Stream], killed: int, options: argparse.Namespace) -> None:
    """Print, write, and exit with 1 where a promise is not kept."""
    sampled = [index % 2 for index in range(len(disturbed))]
    differ = [
        not after.done or (after.text != before.text and (is_sampled or before.margin > NEAR))
        for before, after, is_sampled in zip(undisturbed, disturbed, sampled, strict=True)
    ]
    gaps = [Samples(name, [1000 * each.gap_s for each in run]) for name, run in
            (("undisturbed", undisturbed), ("disturbed", disturbed))]  # fmt: skip
    rows = [[each.name, f"{each.median:.0f}", f"{max(each.ms):.0f}"] for each in gaps]
    table(f"longest gaps of {len(disturbed)} streams, {killed} kills", ["", "median ms", "most"], rows)
    failed = [each for each in disturbed if each.status != 200 or each.error]
    print(f"{sum(differ)} texts differ, {len(failed)} streams failed")
    write_json(
        options.json, "gateway_faults", options.seed, gaps, killed=killed, differ=sum(differ), failed=len(failed),
        streams=[asdict(each) | {"times": []} for each in disturbed if each.error],
    )  # fmt: skip
    if options.check and (sum(differ) or failed or max(gaps[1].ms) > 1000 * GAP_S_MAX):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
