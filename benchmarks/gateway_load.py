"""The gateway under everyday load: next turns, many requests at once, and guesses. For hours of it, see soak.py.

python benchmarks/gateway_load.py turns [--prompt 700] [--rounds 8] [--model FOLDER]
python benchmarks/gateway_load.py crowd [--streams 120] [--rate 50] [--seconds 30]
python benchmarks/gateway_load.py guesses [--streams 8] [--rounds 8]
python benchmarks/gateway_load.py audits [--streams 8] [--rounds 8]

turns: the time to the first token of a conversation's second turn, and of the same prompt in a new session. crowd: long
streams beside short requests at a rate; each ends well, or with 429 and Retry-After. guesses: tokens a second of all
streams through a gateway that may guess, and through one that does not, in turn; texts repeat themselves. audits: the
same with a gateway that audits one session of fifty, and one that audits none; a turn has eight requests a stream, and
a second server holds each span, or there were nothing to audit with. All in float32 over three servers of one thread
each, with the demo's checkpoint or another one (`--model`).
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
from common import SEED, Samples, table, write_json
from gateway import events_of
from soak import gauge
from transformers import AutoConfig, AutoTokenizer

from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalProcess, LocalSwarm
from swarm.identity import Identity
from tests.support import warm

TURN_SHARE_MAX = 0.1  # of a new session's time to the first token
GUESSES_SHARE_MIN = AUDITS_SHARE_MIN = 0.98  # of the rate without, where many streams run
CODE = Path(__file__).read_text()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("turns", "crowd", "guesses", "audits"), nargs="?", default="turns")
    arguments.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint's folder")
    arguments.add_argument("--prompt", type=int, default=700, help="tokens of a first turn")
    arguments.add_argument("--rounds", type=int, default=8, help="conversations")
    arguments.add_argument("--streams", type=int, help="long streams at once; 120 or 8")
    arguments.add_argument("--rate", type=float, default=50.0, help="short requests a second")
    arguments.add_argument("--seconds", type=float, default=30.0, help="of a crowd")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="a few requests, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    options.streams = options.streams or {"crowd": 120}.get(options.what, 8)
    if options.quick:
        options.prompt, options.rounds, options.streams, options.rate = 100, 2, 3, 5.0
        options.seconds = 4.0
    with serving(options.model, 1 + (options.what == "audits")) as (swarm, gateway):
        measure = {"turns": turns, "crowd": crowd, "guesses": guesses, "audits": audits}[options.what]
        broken = asyncio.run(measure(options, swarm, gateway))
    for promise in broken:
        print(f"NOT KEPT: {promise}")
    if options.check and broken:
        raise SystemExit(1)


@contextmanager
def serving(model: Path, copies: int) -> Iterator[tuple[LocalSwarm, LocalProcess]]:
    """Run a swarm in which so many servers hold each third of a model, and a gateway that its servers know."""
    me, n_blocks = Identity.generate(), AutoConfig.from_pretrained(model).num_hidden_layers
    cuts = [n_blocks * part // 3 for part in range(4)]
    spans = [f"{start}:{stop}" for start, stop in pairwise(cuts)] * copies
    allowed = ("--dtype", "float32", "--gateway", f"{me.peer_id}=512,500,100000")
    served: dict[str, Any] = {"options": allowed, "identities": {"gateway": me}, "launch": warm.launch}
    with LocalSwarm(model, spans, **served) as swarm:
        options = ("--dtype", "float32", "--threads", "1", "--concurrency", "128", "--log-level", "warning")
        yield swarm, swarm.start_gateway(*options).wait_ready()


def client(gateway: LocalProcess) -> httpx.AsyncClient:
    """Return a client without a bound on its connections."""
    return httpx.AsyncClient(base_url=gateway.ready["url"], timeout=600, limits=httpx.Limits(max_connections=None))


async def first_token_ms(url: str, body: dict[str, Any]) -> float:
    """Stream a completion. Returns the time to its first text."""
    began, first = time.perf_counter(), None
    async for event in events_of(url, body):
        if first is None and event["choices"][0]["text"]:
            first = 1000 * (time.perf_counter() - began)
    assert first is not None
    return first


async def turns(options: argparse.Namespace, _: LocalSwarm, gateway: LocalProcess) -> list[str]:
    """Measure second turns, in turn with the same prompts in new sessions."""
    name = gateway.ready["models"][0]
    kept, new = Samples("second turn"), Samples("new session")
    code = AutoTokenizer.from_pretrained(options.model)(CODE)["input_ids"]

    def conversation(start: int) -> list[int]:
        """Return a conversation's tokens: code, so that each token has text."""
        start %= len(code) - options.prompt
        return code[start : start + options.prompt + 6]

    for index in range(options.rounds + 1):
        ids, url = conversation(97 * index), gateway.ready["url"]
        body = {"model": name, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        key = {"prompt_cache_key": str(index)}
        await first_token_ms(url, {**body, **key, "prompt": ids[: options.prompt]})
        second = await first_token_ms(url, {**body, **key, "prompt": ids})
        fresh = await first_token_ms(url, {**body, "prompt": conversation(97 * index + 31)})
        if index:  # the first one warms up
            kept.ms.append(second)
            new.ms.append(fresh)
    share = kept.median / new.median
    rows = [[each.name, f"{each.median:.0f}", f"{max(each.ms):.0f}"] for each in (kept, new)]
    table(f"time to the first token, {options.prompt} + 6 tokens", ["", "median ms", "most"], rows)
    write_json(options.json, "gateway_load", options.seed, [kept, new], what="turns", share=share)
    return [f"a second turn takes {TURN_SHARE_MAX} of a new session: {share:.3f}"] if share > TURN_SHARE_MAX else []


async def crowd(options: argparse.Namespace, _: LocalSwarm, gateway: LocalProcess) -> list[str]:
    """Run long streams beside short requests at a rate."""
    name, ends, bad = gateway.ready["models"][0], Counter[str](), list[str]()
    async with client(gateway) as http:

        async def ask(index: int, tokens: int, kind: str) -> None:
            prompt = CODE[37 * index % 2000 :][:60]
            body = {"model": name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            try:
                response = await http.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                bad.append(f"{kind}: {error!r}")
                return
            ends[f"{kind}: {response.status_code}"] += 1
            well = response.status_code == 200 and response.json()["usage"]["completion_tokens"] == tokens
            if not well and not (response.status_code == 429 and "retry-after" in response.headers):
                bad.append(f"{kind}: {response.status_code} {response.text[:200]}")

        async with asyncio.TaskGroup() as group:
            for index in range(options.streams):
                group.create_task(ask(index, 200, "long"))
            began, count = time.monotonic(), 0
            while (passed := time.monotonic() - began) < options.seconds:
                while count < passed * options.rate:
                    count += 1
                    group.create_task(ask(count, 4, "short"))
                await asyncio.sleep(0.01)
    table("requests by their ends", ["", "requests"], [[end, str(count)] for end, count in sorted(ends.items())])
    write_json(options.json, "gateway_load", options.seed, [], what="crowd", ends=dict(ends), bad=bad[:20])
    return [f"{len(bad)} requests failed without 429: {bad[0]}"] if bad else []


async def guesses(options: argparse.Namespace, swarm: LocalSwarm, gateway: LocalProcess) -> list[str]:
    """Compare the rates of two gateways, with guesses and without, and their texts."""
    plain = await another(swarm, "--draft", "none")
    gateways = {"--draft lookup": gateway, "--draft none": plain}
    least, (share, *_) = GUESSES_SHARE_MIN, await compared(options, gateways, 1)
    return [f"with guesses the rate is {least} of the one without: {share:.3f}"] if share < least else []


async def audits(options: argparse.Namespace, swarm: LocalSwarm, gateway: LocalProcess) -> list[str]:
    """Compare the rates of two gateways, with audits at the default share and without."""
    none = await another(swarm, "--audit", "0")
    share, counts = await compared(options, {"--audit 0.02": gateway, "--audit 0": none}, 8)
    least, made = AUDITS_SHARE_MIN, counts["audits_agreed"] + counts["audits_disputed"]
    broken = [f"with audits the rate is {least} of the one without: {share:.3f}"] if share < least else []
    return broken + ["an honest server is in dispute"] * bool(counts["audits_disputed"]) + ["no audit"] * (not made)


async def another(swarm: LocalSwarm, *options: str) -> LocalProcess:
    """Start a second gateway."""
    started = swarm.start_gateway("--dtype", "float32", "--threads", "1", "--log-level", "warning", *options)
    return await asyncio.to_thread(started.wait_ready)


async def compared(
    options: argparse.Namespace, gateways: dict[str, LocalProcess], each_stream: int
) -> tuple[float, dict[str, float]]:
    """Run the same requests through both gateways in turn, each first in every other round.

    Returns the first one's rate as a share of the second one's, and the first one's counts of audits.
    """
    samples = {name: Samples(name) for name in gateways}
    texts: dict[str, list[str]] = {}

    async def ask(http: httpx.AsyncClient, model: str, index: int) -> str:
        start = 37 * index % (len(CODE) - 120)
        prompt = CODE[start : start + 120] * 2
        body = {"model": model, "prompt": prompt, "max_tokens": 128, "temperature": 0, "ignore_eos": True}
        return str((await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]["text"])

    async def stream(http: httpx.AsyncClient, model: str, first: int) -> list[str]:
        return [await ask(http, model, first + index) for index in range(each_stream)]

    for turn in range(options.rounds + 1):
        for name in (*gateways,) if turn % 2 else (*gateways,)[::-1]:
            model, began = gateways[name].ready["models"][0], time.perf_counter()
            async with client(gateways[name]) as http:
                firsts = (each_stream * (options.streams * turn + index) for index in range(options.streams))
                told = await asyncio.gather(*(stream(http, model, first) for first in firsts))
            texts[name] = [text for each in told for text in each]
            if turn:  # the first one warms up
                samples[name].ms.append(1000 * (time.perf_counter() - began))
        if len({tuple(each) for each in texts.values()}) > 1:
            raise SystemExit("the gateways' texts differ")
    measured, other = samples.values()
    share = sum(other.ms) / sum(measured.ms)  # each was first in half of the rounds, which tells
    tokens = 128_000 * options.streams * each_stream
    rows = [[each.name, f"{tokens / each.median:.1f}"] for each in (measured, other)]
    table(f"tokens/s of {options.streams} streams, share {share:.3f}", ["", "tokens/s"], rows)
    async with client(gateways[measured.name]) as http:
        metrics = (await http.get("/metrics")).text
    counts = {name: gauge(metrics, name) for name in ("audits_agreed", "audits_disputed")}
    print(counts)
    write_json(
        options.json, "gateway_load", options.seed, [measured, other], what=options.what, share=share, counts=counts
    )
    return share, counts


if __name__ == "__main__":
    main()
