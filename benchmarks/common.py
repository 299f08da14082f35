"""Parts that benchmarks share: a tiny checkpoint, interleaved samples, a table, and JSON with everything in it."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm.blocks import Blocks
from swarm.client.hf.swarm import Swarm
from swarm.client.planning.costs import estimated
from swarm.client.planning.promise import Held
from swarm.client.planning.route import Hop, Route
from swarm.client.planning.router import Router

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SEED = 20


def tiny_llama(directory: Path, n_blocks: int, seed: int = SEED) -> PreTrainedModel:
    """Save a random fp32 llama (hidden size 64) to `directory` and return it, loaded from there."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=n_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class ByHand(Router):
    """Lets a client's next session take the route that it is told."""

    by_hand: tuple[Hop, ...] | None = None

    @classmethod
    def take_over(cls, swarm: Swarm) -> "ByHand":
        """Turn the router of a client that has joined into one of these."""
        router = swarm.membership.router
        router.__class__ = cls
        assert isinstance(router, cls)
        return router

    async def servers_in_turn(self, peers: Sequence[str], cuts: Sequence[Blocks]) -> tuple[Hop, ...]:
        """Return the route that runs `cuts[i]` on `peers[i]`, from their announcements."""
        survey = await self.surveys.read()
        known = {signed.announcement.peer_id: signed for signed in survey.servers}
        return tuple(Hop(known[peer], blocks) for peer, blocks in zip(peers, cuts, strict=False))

    async def plan(
        self,
        blocks: Blocks,
        avoid: Collection[str] = (),
        held: Held = (),
        fresh: bool = False,
        *,
        positions_needed: int = 0,
        draws: Random | None = None,
    ) -> Route:
        """As told, or as planned."""
        if self.by_hand is None:
            return await super().plan(blocks, avoid, held, fresh, positions_needed=positions_needed, draws=draws)
        return estimated(self.by_hand, self._request(blocks, avoid))


def decoder_step(model: PreTrainedModel, cache: object, prompt: Tensor) -> Callable[[], None]:
    """Prefill, and return a function that computes one more token, greedily."""

    def forward(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    latest = forward(prompt)

    def step() -> None:
        nonlocal latest
        latest = forward(latest)

    return step


def even_cuts(n_blocks: int, hops: int) -> list[Blocks]:
    """Return the ranges of `hops` spans of one size."""
    size = n_blocks // hops
    return [Blocks(i * size, (i + 1) * size) for i in range(hops)]


@dataclass(slots=True)
class Samples:
    """The measurements of one thing, in milliseconds."""

    name: str
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.ms)

    def percentile(self, share: float) -> float:
        """The smallest sample that `share` of all do not exceed."""
        ordered = sorted(self.ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interleaved(count: int, works: dict[str, Callable[[], object]]) -> dict[str, Samples]:
    """Time all works in turn, `count` times, so that the machine's noise hits all alike."""
    samples = {name: Samples(name) for name in works}
    for _ in range(count):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            samples[name].ms.append(1000 * (time.perf_counter() - began))
    return samples


def cpu_ms(pids: Sequence[int]) -> list[float]:
    """Return each process's computing time so far, all threads together. Waiting for a busy machine does not count."""
    return [
        sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
        / 1e6
        for pid in pids
    ]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def write_json(path: Path | None, name: str, seed: int, samples: Sequence[Samples], **more: object) -> Path:
    """Write the measurements, raw; by default into benchmarks/results. Returns where."""
    commit = _commit()
    if path is None:
        path = RESULTS / f"{name}-{commit[:8]}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": _machine(),
        "seed": seed,
        **more,
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(content, indent=1))
    print(f"\nwritten to {path}")
    return path


def _commit() -> str:
    """The checked-out commit; "+" behind it says that files differ."""
    git = ("git", "-C", str(ROOT))
    try:
        commit = subprocess.run((*git, "rev-parse", "HEAD"), capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run((*git, "diff", "HEAD", "--quiet"), check=False).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + "+" * changed


def _machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
