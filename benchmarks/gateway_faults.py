"""Streams through the gateway while servers are killed: texts, gaps, statuses, against the same streams undisturbed.

python benchmarks/gateway_faults.py [--streams 32] [--tokens 200] [--every 2] [--check]

Half of the streams are greedy, half sampled with a seed. A swarm of the demo's checkpoint in float32 has two servers of
each span. Every so many seconds a server is killed with SIGKILL, in turn, and another one of its span starts, at a low
priority: elsewhere it would have a machine of its own. Each stream then has the text of the undisturbed run. Streams
are told apart that are not clear: in which two likeliest tokens were nearly as likely, or a random number fell next to
the border between two tokens, so that the last digits of the arithmetic, which depend on the other streams in a batch,
decide.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import torch
from beside import beside
from common import SEED, Samples, table, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalProcess, LocalSwarm
from swarm.gateway.generation import Sampling
from swarm.gateway.sampler import Sampler
from swarm.identity import Identity
from tests.support import warm

SPANS = ("0:4", "4:8", "8:12")
GAP_S_MAX = 3.0
NEAR = 1e-3  # natural logarithms of probabilities that are no farther apart may come out in either order
NEAR_DRAW = 1e-4  # a random number that is no farther from another token's share may give that one
TEMPERATURE = 0.8


@dataclass(slots=True)
class Stream:
    """One answer: pieces and their times. margin: how near its likeliest tokens ever were."""

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
        clear = [is_clear(body, answer) for body, answer in zip(bodies, undisturbed, strict=True)]
        killed, disturbed = asyncio.run(with_kills(swarm, url, bodies, options.every))
    report(undisturbed, disturbed, clear, killed, options)


def requests(name: str, streams: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return the bodies: of each pair one is greedy and one has a seed."""
    code = Path(__file__).read_text()
    bodies = []
    for index in range(streams):
        start = 97 * (index + seed)
        prompt = code[start % 3000 : start % 3000 + 120]
        for sampling in ({"temperature": 0}, {"temperature": TEMPERATURE, "seed": index}):
            body = {"model": name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 2}
            bodies.append({**body, **sampling, "stream": True})
    return bodies


def is_clear(body: dict[str, Any], answer: Stream) -> bool:
    """Whether no choice of a stream was so near that rounding may decide it."""
    return answer.margin > NEAR if body["temperature"] == 0 else distance(body) > NEAR_DRAW


@torch.inference_mode()
def distance(body: dict[str, Any]) -> float:
    """Repeat a sampled stream with the local model. Returns how near a random number came to another token's share."""
    tokenizer, model = local()
    ids = torch.tensor([tokenizer(body["prompt"])["input_ids"]])
    sampler, past, nearest = Sampler(Sampling(temperature=TEMPERATURE, seed=body["seed"]), ()), None, 1.0
    for _ in range(body["max_tokens"]):
        output = model(ids, past_key_values=past, use_cache=True)
        past, logits = output.past_key_values, output.logits[0, -1]
        shares = torch.softmax(logits / TEMPERATURE, dim=-1).cumsum(dim=-1, dtype=torch.float64)
        point = sampler.draw() * shares[-1]
        token = int(torch.searchsorted(shares, point, right=True))
        nearest = min(nearest, float((shares[max(0, token - 1) : token + 1] - point).abs().min()))
        ids = torch.tensor([[token]])
    return nearest


@cache
def local() -> tuple[Any, Any]:
    """Return the tokenizer and the whole model."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(CHECKPOINT), model


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
        alive.append((span, beside(swarm.start_server(span))))
    return killed, await streaming


def report(
    undisturbed: list[Stream], disturbed: list[Stream], clear: list[bool], killed: int, options: argparse.Namespace
) -> None:
    """Print, write, and exit with 1 where a promise is not kept."""
    pairs = list(zip(undisturbed, disturbed, strict=True))
    same = [after.done and after.text == before.text for before, after in pairs]
    differ = [not is_same for is_same, is_certain in zip(same, clear, strict=True) if is_certain]
    gaps = [Samples(name, [1000 * each.gap_s for each in run]) for name, run in
            (("undisturbed", undisturbed), ("disturbed", disturbed))]  # fmt: skip
    rows = [[each.name, f"{each.median:.0f}", f"{max(each.ms):.0f}"] for each in gaps]
    table(f"longest gaps of {len(disturbed)} streams, {killed} kills", ["", "median ms", "most"], rows)
    failed = [each for each in disturbed if each.status != 200 or each.error]
    unclear = len(clear) - sum(clear)
    also = sum(same) - (len(differ) - sum(differ))
    print(f"of {len(differ)} clear streams {sum(differ)} differ; of {unclear} others {unclear - also}")
    print(f"{len(failed)} streams failed")
    write_json(
        options.json, "gateway_faults", options.seed, gaps, killed=killed, differ=sum(differ), failed=len(failed),
        unclear=unclear,
        streams=[asdict(each) | {"times": []} for each in disturbed if each.error],
    )  # fmt: skip
    if options.check and (sum(differ) or failed or max(gaps[1].ms) > 1000 * GAP_S_MAX):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
