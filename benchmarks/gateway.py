"""Many streams at once: the gateway over HTTP, threads of stock `generate` in one process, and a process for each.

python benchmarks/gateway.py [--streams 1,8,32] [--tokens 64] [--rounds 3] [--modes gateway,threads,clients]

The demo's checkpoint in float32, three servers of one thread each. Every mode's greedy text is compared with the local
model's. Modes take turns within a round. CPU is that of the client's side alone: the
gateway's process, or the processes that generate; the HTTP client's own is not counted.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from common import SEED, Samples, cpu_ms, table, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm import AutoDistributedModel
from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalSwarm
from swarm.identity import Identity

SPANS = ("0:4", "4:8", "8:12")
TIE = 1e-3  # logits that are no farther apart may come out in either order
MODES = ("gateway", "threads", "clients")


@dataclass(slots=True)
class Run:
    """One mode's run of some streams. cpu_ms: of the client's side. servers_cpu_ms: of all servers."""

    mode: str
    streams: int
    tokens: int
    wall_s: float
    cpu_ms: float
    servers_cpu_ms: float
    ttft_ms: list[float]
    gaps_ms: list[float]

    @property
    def rate(self) -> float:
        """Tokens a second of all streams together."""
        return self.tokens / self.wall_s


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--streams", default="1,8,32")
    arguments.add_argument("--tokens", type=int, default=64, help="of each stream")
    arguments.add_argument("--prompt", type=int, default=32, help="tokens of each stream's prompt")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--modes", default=",".join(MODES))
    arguments.add_argument("--quick", action="store_true", help="two short streams, to see that it works")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    if options.quick:
        options.streams, options.tokens, options.rounds = "2", 4, 1
    torch.set_num_threads(1)
    modes, runs = options.modes.split(","), []
    me = Identity.generate()  # the servers know the gateway
    allowed = ("--dtype", "float32", "--gateway", f"{me.peer_id}=512,500,100000")
    with LocalSwarm(CHECKPOINT, SPANS, options=allowed, log_level="warning", identities={"gateway": me}) as swarm:
        bench = Bench(swarm, options.prompt, options.tokens, options.seed)
        if "gateway" in modes:
            gateway = swarm.start_gateway("--dtype", "float32", "--threads", "1").wait_ready()
            bench.url, bench.gateway = gateway.ready["url"], gateway.process.pid
        for streams in map(int, options.streams.split(",")):
            for turn in range(options.rounds + 1):
                for mode in modes:
                    run = bench.run(mode, streams)
                    runs += [run] if turn else []  # the first one warms up
    report(runs, options)


def report(runs: list[Run], options: argparse.Namespace) -> None:
    """Print medians over the rounds, and write everything."""
    rows, samples = [], []
    for streams, mode in dict.fromkeys((run.streams, run.mode) for run in runs):
        of = [run for run in runs if (run.streams, run.mode) == (streams, mode)]
        gaps = Samples(f"{streams} streams, {mode}, gaps", [gap for run in of for gap in run.gaps_ms])
        first = Samples(f"{streams} streams, {mode}, TTFT", [ttft for run in of for ttft in run.ttft_ms])
        samples += [first, gaps]
        rows.append(
            [
                f"{streams} streams, {mode}",
                f"{statistics.median(run.rate for run in of):.1f}",
                f"{statistics.median(run.cpu_ms / run.tokens for run in of):.2f}",
                f"{statistics.median(run.servers_cpu_ms / run.tokens for run in of):.2f}",
                f"{first.median:.0f}",
                f"{first.percentile(0.99):.0f}",
                f"{gaps.median:.1f}",
                f"{gaps.percentile(0.99):.1f}",
            ]
        )
    columns = ["", "tokens/s", "CPU ms a token", "servers' CPU", "TTFT ms", "p99", "gap ms", "p99"]
    table("streams over three servers, demo checkpoint, float32", columns, rows)
    raw = [{name: value for name, value in asdict(run).items() if not name.endswith("s_ms")} for run in runs]
    write_json(options.json, "gateway", options.seed, samples, runs=raw)


class Bench:
    """Runs streams over one swarm, and compares their tokens with the local model's."""

    url: str
    gateway: int

    def __init__(self, swarm: LocalSwarm, prompt: int, tokens: int, seed: int) -> None:
        self._swarm = swarm
        self._prompt = prompt
        self._tokens = tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self._local = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()

    def run(self, mode: str, streams: int) -> Run:
        """Run streams with prompts that no mode has seen."""
        shape = (streams, self._prompt)
        prompts = torch.randint(3, self._local.config.vocab_size, shape, generator=self._generator).tolist()
        servers = [server.process.pid for server in self._swarm.servers]
        before = sum(cpu_ms(servers))
        result = {"gateway": self._through_gateway, "threads": self._alone, "clients": self._alone}[mode](mode, prompts)
        servers_ms = sum(cpu_ms(servers)) - before
        self._compare(mode, prompts, result["texts"])
        stamps = result["stamps"]
        return Run(
            mode,
            streams,
            streams * self._tokens,
            result["wall_s"],
            result["cpu_ms"],
            servers_ms,
            [1000 * each[0] for each in stamps],
            [1000 * (b - a) for each in stamps for a, b in pairwise(each)],
        )

    def _compare(self, mode: str, prompts: list[list[int]], texts: list[str]) -> None:
        """Raise AssertionError where a text is not the local model's. Texts with a near tie may be either."""
        with torch.inference_mode():
            output = self._local.generate(
                torch.tensor(prompts), max_new_tokens=self._tokens, do_sample=False, eos_token_id=None
            )
            top = self._local(output).logits[:, self._prompt - 1 : -1].topk(2).values
        clear = (top[..., 0] - top[..., 1]).amin(dim=1) > TIE
        expected = self._tokenizer.batch_decode(output[:, self._prompt :], skip_special_tokens=True)
        for text, known, is_clear in zip(texts, expected, clear.tolist(), strict=True):
            assert not is_clear or text.replace("\ufffd", "") == known.replace("\ufffd", ""), mode

    def _through_gateway(self, _: str, prompts: list[list[int]]) -> dict[str, Any]:
        before = sum(cpu_ms([self.gateway]))
        result = asyncio.run(stream_all(self.url, prompts, self._tokens))
        return {**result, "cpu_ms": sum(cpu_ms([self.gateway])) - before}

    def _alone(self, mode: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Generate in processes without a gateway: one with a thread for each stream, or one for each stream."""
        groups = [prompts] if mode == "threads" else [[prompt] for prompt in prompts]
        swarm = {"initial_peers": self._swarm.initial_peers, "network": self._swarm.network, "tokens": self._tokens}
        workers = []
        for group in groups:
            line = [sys.executable, __file__, "--worker", json.dumps({**swarm, "prompts": group})]
            workers.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        began = time.time()
        for worker in workers:
            worker.stdin.write(f"{began}\n")
            worker.stdin.flush()
        results = [json.loads(worker.stdout.readline()) for worker in workers]
        for worker in workers:
            worker.communicate()
        tokens = [tokens for result in results for tokens in result["tokens"]]
        return {
            "texts": self._tokenizer.batch_decode(tokens, skip_special_tokens=True),
            "stamps": [stamps for result in results for stamps in result["stamps"]],
            "wall_s": max(stamps[-1] for result in results for stamps in result["stamps"]),
            "cpu_ms": sum(result["cpu_ms"] for result in results),
        }


async def stream_all(url: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Stream completions of all prompts at once. Returns texts, time stamps from the start, and the wall time."""
    async with httpx.AsyncClient() as client:
        model = (await client.get(url + "/v1/models")).json()["data"][0]["id"]
    began = time.perf_counter()

    async def one(prompt: list[int]) -> tuple[str, list[float]]:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text, stamps = "", []
        async for event in events_of(url, body):
            if piece := event["choices"][0]["text"]:
                text += piece
                stamps.append(time.perf_counter() - began)
        return text, stamps

    results = await asyncio.gather(*(one(prompt) for prompt in prompts))
    wall_s = time.perf_counter() - began
    return {"texts": [text for text, _ in results], "stamps": [stamps for _, stamps in results], "wall_s": wall_s}


async def events_of(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield a completion's events, read line by line: an HTTP client takes as long for each as the gateway does."""
    address = url.removeprefix("http://")
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    assert b" 200 " in status, status
    async for line in reader:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
        elif line.startswith(b"data: [DONE]"):
            writer.close()
            return
    raise AssertionError("a stream ended without its end")


class Stamps:
    """A streamer of `transformers` that notes when each token came."""

    def __init__(self, began: float) -> None:
        self.at: list[float] = []
        self._began = began
        self._is_prompt = True

    def put(self, _: torch.Tensor) -> None:
        """Note the time, but for the prompt."""
        if not self._is_prompt:
            self.at.append(time.time() - self._began)
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def work(task: dict[str, Any]) -> None:
    """Generate some streams with stock `generate`, a thread for each; in a process of its own."""
    torch.set_num_threads(1)
    swarm = {"initial_peers": task["initial_peers"], "network": task["network"]}
    with AutoDistributedModel.from_pretrained(CHECKPOINT, dtype="float32", **swarm) as model:
        prompts = [torch.tensor([prompt]) for prompt in task["prompts"]]
        results: list[Any] = [None] * len(prompts)
        model.generate(prompts[0], max_new_tokens=2, do_sample=False, eos_token_id=None)
        print("ready", flush=True)
        began, before = float(sys.stdin.readline()), time.process_time()  # of threads that have ended, too

        def one(index: int) -> None:
            streamer = Stamps(began)
            output = model.generate(
                prompts[index],
                max_new_tokens=task["tokens"],
                do_sample=False,
                eos_token_id=None,
                streamer=streamer,
            )
            results[index] = output[0, prompts[index].shape[1] :].tolist(), streamer.at

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = 1000 * (time.process_time() - before)
        tokens, stamps = [each for each, _ in results], [each for _, each in results]
        print(json.dumps({"tokens": tokens, "stamps": stamps, "cpu_ms": spent}), flush=True)


if __name__ == "__main__":
    main()
