"""The gateway under everyday load: next turns, many requests at once, and hours of clients that come and go.

python benchmarks/gateway_load.py turns [--prompt 700] [--rounds 8]
python benchmarks/gateway_load.py crowd [--streams 120] [--rate 50] [--seconds 30]
python benchmarks/gateway_load.py guesses [--streams 8] [--rounds 8]
python benchmarks/gateway_load.py soak [--streams 32] [--seconds 3600] [--every 20]

turns: the time to the first token of a conversation's second turn, and of the same prompt in a new session. crowd: long
streams beside short requests at a rate; each ends well, or with 429 and Retry-After. guesses: tokens a second of all
streams through a gateway that may guess, and through one that does not, in turn; texts repeat themselves. soak: streams
of which some are cut off, prompts of up to 20,000 tokens, and servers that are killed; then the gateway's memory, and
the sessions on all servers. All over the demo's checkpoint in float32, three servers of one thread each. For a soak its
config allows 32,768 positions, which is more than it was trained for and changes no cost.
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import psutil
from common import SEED, Samples, table, write_json
from gateway import events_of
from transformers import AutoTokenizer

from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalProcess, LocalSwarm
from swarm.identity import Identity
from tests.support import warm

SPANS = ("0:4", "4:8", "8:12")
TURN_SHARE_MAX = 0.1  # of a new session's time to the first token
GUESSES_SHARE_MIN = 0.98  # of the rate without guesses, where many streams run
KEPT_MB_MAX = 1.0  # of memory for each conversation that is kept
QUIET_S = 60.0  # after it no session is left on any server
POSITIONS, LONG_PROMPT, LONG_SHARE = 32768, 20000, 0.005
CODE = Path(__file__).read_text()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("turns", "crowd", "guesses", "soak"), nargs="?", default="turns")
    arguments.add_argument("--prompt", type=int, default=700, help="tokens of a first turn")
    arguments.add_argument("--rounds", type=int, default=8, help="conversations")
    arguments.add_argument("--streams", type=int, help="long streams at once; 120, 8 or 32")
    arguments.add_argument("--rate", type=float, default=50.0, help="short requests a second")
    arguments.add_argument("--seconds", type=float, help="30 or 3600")
    arguments.add_argument("--every", type=float, default=20.0, help="seconds between kills; 0 kills none")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="a few requests, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    options.streams = options.streams or {"crowd": 120, "guesses": 8}.get(options.what, 32)
    options.seconds = options.seconds or (30.0 if options.what == "crowd" else 3600.0)
    if options.quick:
        options.prompt, options.rounds, options.streams, options.rate = 100, 2, 3, 5.0
        options.seconds, options.every = 4.0, 0.0
    spans = SPANS * (2 if options.what == "soak" else 1)
    with checkpoint(POSITIONS if options.what == "soak" else None) as model, serving(model, spans) as (swarm, gateway):
        measure = {"turns": turns, "crowd": crowd, "guesses": guesses, "soak": soak}[options.what]
        broken = asyncio.run(measure(options, swarm, gateway))
    for promise in broken:
        print(f"NOT KEPT: {promise}")
    if options.check and broken:
        raise SystemExit(1)


@contextmanager
def checkpoint(positions: int | None) -> Iterator[Path]:
    """Make the demo's checkpoint with room for so many positions; None: as it is."""
    if positions is None:
        yield CHECKPOINT
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long"
        shutil.copytree(CHECKPOINT, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        yield path


@contextmanager
def serving(model: Path, spans: tuple[str, ...]) -> Iterator[tuple[LocalSwarm, LocalProcess]]:
    """Run a swarm, and a gateway that its servers know."""
    me = Identity.generate()
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
    code = AutoTokenizer.from_pretrained(CHECKPOINT)(CODE)["input_ids"]

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
    started = swarm.start_gateway("--dtype", "float32", "--threads", "1", "--draft", "none", "--log-level", "warning")
    plain = await asyncio.to_thread(started.wait_ready)
    lookup, none, texts = Samples("--draft lookup"), Samples("--draft none"), dict[str, list[str]]()

    async def ask(http: httpx.AsyncClient, name: str, index: int) -> str:
        prompt = CODE[37 * index : 37 * index + 120] * 2
        body = {"model": name, "prompt": prompt, "max_tokens": 128, "temperature": 0, "ignore_eos": True}
        return str((await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]["text"])

    for turn in range(options.rounds + 1):
        for samples, each in ((lookup, gateway), (none, plain)):
            name, began = each.ready["models"][0], time.perf_counter()
            async with client(each) as http:
                asked = (ask(http, name, options.streams * turn + index) for index in range(options.streams))
                texts[samples.name] = list(await asyncio.gather(*asked))
            if turn:  # the first one warms up
                samples.ms.append(1000 * (time.perf_counter() - began))
        if texts[lookup.name] != texts[none.name]:
            return ["the texts with guesses are those without"]
    share = none.median / lookup.median
    rows = [[each.name, f"{128_000 * options.streams / each.median:.1f}"] for each in (lookup, none)]
    table(f"tokens/s of {options.streams} streams", ["", "tokens/s"], rows)
    write_json(options.json, "gateway_load", options.seed, [lookup, none], what="guesses", share=share)
    least = GUESSES_SHARE_MIN
    return [f"with guesses the rate is {least} of the one without: {share:.3f}"] if share < least else []


async def soak(options: argparse.Namespace, swarm: LocalSwarm, gateway: LocalProcess) -> list[str]:
    """Run streams of clients that come and go, while servers are killed; then look at what is left."""
    rng, name, ends = random.Random(options.seed), gateway.ready["models"][0], Counter[str]()
    process = psutil.Process(gateway.process.pid)
    until, memory = time.monotonic() + options.seconds, [process.memory_info().rss]
    async with client(gateway) as http:
        async with asyncio.TaskGroup() as group:
            for _ in range(options.streams):
                group.create_task(come_and_go(http, name, random.Random(rng.random()), until, ends))
            group.create_task(kill_servers(swarm, options.every, until))
            while time.monotonic() < until:
                await asyncio.sleep(min(10.0, options.seconds / 4))
                memory.append(process.memory_info().rss)
        kept = gauge((await http.get("/metrics")).text, "conversations_idle")
    gateway.stop()
    left = await sessions_left(swarm, QUIET_S)
    settled = memory[len(memory) // 4]  # after the first quarter caches and pools are as large as they get
    grown_mb = (memory[-1] - settled) / 2**20
    rows = [["memory before", f"{memory[0] / 2**20:.0f} MB"], ["grown since the first quarter", f"{grown_mb:.1f} MB"],
            ["conversations kept", f"{kept:.0f}"], ["sessions left", str(left)],
            *([end, str(count)] for end, count in sorted(ends.items()))]  # fmt: skip
    table(f"{options.seconds:.0f} s of {options.streams} streams", ["", ""], rows)
    write_json(options.json, "gateway_load", options.seed, [], what="soak", memory=memory, ends=dict(ends), left=left)
    broken = [f"memory grows by at most {KEPT_MB_MAX} MB a kept conversation"] * (grown_mb > KEPT_MB_MAX * max(kept, 1))
    broken += [f"no session is left on any server: {left} are"] * (left > 0)
    wrong = [end for end in ends if not end.startswith(("whole", "cut", "429"))]
    return broken + [f"no answer fails: {wrong}"] * bool(wrong)


async def come_and_go(http: httpx.AsyncClient, name: str, rng: random.Random, until: float, ends: Counter[str]) -> None:
    """Ask again and again: short and long prompts, some answers cut off at a random moment."""
    while time.monotonic() < until:
        tokens = rng.choice((8, 40, 120))
        length = LONG_PROMPT if rng.random() < LONG_SHARE else rng.choice((40, 200, 800))
        ids = [3 + rng.randrange(2000) for _ in range(length)]
        body = {"model": name, "prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        patience_s = rng.uniform(0.0, 2.0) if rng.random() < 0.3 else 600.0
        try:
            async with asyncio.timeout(patience_s):
                response = await http.post("/v1/completions", json=body)
            ends["whole" if response.status_code == 200 else f"{response.status_code} {response.text[:80]}"] += 1
        except TimeoutError:
            ends["cut off by the client"] += 1
        except httpx.HTTPError as error:
            ends[f"failed: {type(error).__name__}"] += 1


async def kill_servers(swarm: LocalSwarm, every_s: float, until: float) -> None:
    """Kill one server after the other; another one of its span takes its place."""
    alive = list(zip(SPANS * 2, swarm.servers, strict=False))
    while every_s and time.monotonic() + every_s < until:
        await asyncio.sleep(every_s)
        span, victim = alive.pop(0)
        victim.kill()
        alive.append((span, swarm.start_server(span)))


def gauge(metrics: str, name: str) -> float:
    """Return a figure of `/metrics`."""
    found = re.search(rf"^\S*{name} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def sessions_left(swarm: LocalSwarm, within_s: float) -> int:
    """Count the sessions of the servers that live, by their logs, until none is left or time is over."""
    deadline = time.monotonic() + within_s
    while True:
        left = 0
        for server in swarm.servers:
            if server.process.poll() is None:
                counts = re.findall(r"sessions\W+(\d+)", server.log.read_text(errors="replace"))
                left += int(counts[-1]) if counts else 0
        if not left or time.monotonic() > deadline:
            return left
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    main()
