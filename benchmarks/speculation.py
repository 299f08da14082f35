"""Guesses ahead over a wide-area ring: tokens per second, with and without, and whether they are the same tokens.

    python benchmarks/speculation.py [--delays 0,25,100] [--tokens 96] [--quick] [--json PATH]

The demo's checkpoint on three servers, with a delay on every edge of the ring, as in benchmarks/wan.py. "edit": the
prompt is a function and the beginning of the same function again, so that look-up in the text finds most of it. "new":
the beginning of a function, of which look-up knows nothing at first.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import SEED, table, write_json
from delay_proxy import delay_proxies
from transformers import AutoTokenizer
from wan import free_ports

from swarm.client import AutoDistributedModel
from swarm.client.hf.model import DistributedModel
from swarm.demo.cli import CHECKPOINT
from swarm.demo.local import LocalSwarm

SPANS = ("0:4", "4:8", "8:12")
FUNCTION = '''def load(path, default=None):
    """Read a file as JSON. Return the default if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return default


'''
PROMPTS = {
    "edit": FUNCTION + FUNCTION.replace("load", "read")[:60],
    "new": 'def walk(top, topdown=True, onerror=None):\n    """Directory tree generator.',
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
GREEDY = {"do_sample": False}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--delays", default="0,25,100", help="milliseconds one way, each a ring of its own")
    arguments.add_argument("--tokens", type=int, default=96, help="of each text")
    arguments.add_argument("--rounds", type=int, default=3, help="of all ways in turn; the median counts")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    delays = [float(each) for each in options.delays.split(",")]
    if options.quick:
        delays, options.tokens, options.rounds = [5.0], 16, 1
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    for delay_ms in delays:
        with ring(delay_ms) as swarm:
            rows += measured(swarm, delay_ms, options)
    columns = ["ms one way", "text", "sampling", "guesses", "tokens/s", "of plain", "right", "computed a token", "same"]
    table(
        f"{options.tokens} tokens, medians of {options.rounds}", columns, [[str(each) for each in row] for row in rows]
    )
    write_json(options.json, "speculation", options.seed, [], columns=columns, rows=rows)


@contextmanager
def ring(delay_ms: float) -> Iterator[LocalSwarm]:
    """Start three servers, and proxies in front of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2 * len(SPANS))]
        pairs = list(zip(addresses[: len(SPANS)], addresses[len(SPANS) :], strict=True))
        stack.enter_context(delay_proxies(pairs, delay_ms, folder / "late.json"))
        swarm = stack.enter_context(LocalSwarm(CHECKPOINT, log_level="warning"))
        for span, (announced, listen) in zip(SPANS, pairs, strict=True):
            swarm.start_server(span, "--dtype", "float32", "--listen", listen, "--announce-address", announced)
        for server in swarm.servers:
            server.wait_ready()
        yield swarm


def measured(swarm: LocalSwarm, delay_ms: float, options: argparse.Namespace) -> list[list[Any]]:
    """Generate each text in each way, in turns. Returns rows of the table."""
    tokenizer, rows = AutoTokenizer.from_pretrained(CHECKPOINT), []
    join = {"initial_peers": swarm.initial_peers, "network": swarm.network, "dtype": torch.float32}
    with (
        AutoDistributedModel.from_pretrained(CHECKPOINT, draft="none", **join) as plain,
        AutoDistributedModel.from_pretrained(CHECKPOINT, draft="lookup", **join) as ahead,
    ):
        for model in (plain, ahead):
            model.generation_config.eos_token_id = None  # every text is as long
        for text, prompt in PROMPTS.items():
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            for sampling, how in (("greedy", GREEDY), ("seeded", SAMPLED)):
                ways = {"none": generating(plain, ids, how, options), "look-up": generating(ahead, ids, how, options)}
                runs: dict[str, list[tuple[float, torch.Tensor]]] = {way: [] for way in ways}
                for _ in range(options.rounds + 1):
                    for way, work in ways.items():
                        runs[way].append(work())
                speeds = {way: sorted(each[0] for each in run[1:])[options.rounds // 2] for way, run in runs.items()}
                same = all(torch.equal(a[1], b[1]) for a, b in zip(*runs.values(), strict=True))
                counts = ahead.last_speculation
                assert counts is not None
                guessed = counts.right + counts.wrong
                rows.append([delay_ms, text, sampling, "none", round(speeds["none"], 1), 1.0, "", 1.0, ""])
                rows.append(
                    [delay_ms, text, sampling, "look-up", round(speeds["look-up"], 1),
                     round(speeds["look-up"] / speeds["none"], 2), round(counts.right / guessed, 2) if guessed else "",
                     round(counts.computed / max(1, counts.tokens), 2), same]
                )  # fmt: skip
    return rows


def generating(
    model: DistributedModel, ids: torch.Tensor, how: dict[str, Any], options: argparse.Namespace
) -> Callable[[], tuple[float, torch.Tensor]]:
    """Return a function that generates once: tokens per second behind the first token, and all tokens."""

    def once() -> tuple[float, torch.Tensor]:
        times: list[float] = []
        torch.manual_seed(options.seed)
        generate: Any = model.generate
        tokens = generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, streamer=_Times(times), **how
        )
        return (len(times) - 2) / (times[-1] - times[1]), tokens

    return once


class _Times:
    """A streamer that notes when tokens come; the first note is the prompt."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def put(self, _: torch.Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
