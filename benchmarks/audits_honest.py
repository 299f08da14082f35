"""Honest servers on processors of several kinds, audited many times: how many audits take one for wrong.

    python benchmarks/audits_honest.py [--texts 100] [--classes float32 ...] [--json FILE] [--check]

A process of each kind of kernels computes the same texts twice, as benchmarks/audits.py does: step by step on three
spans, and as one prompt on two. Its kernels are this processor's, or those without vectors of 512 bits, or none beyond
SSE4.1. Each kind's steps are compared with each kind's prompts, so a text gives nine audits. The first half of the
texts is computed one by one, the other half eight at a time, as a busy server does.

If FILE exists, its counts are added up and other texts follow: run it as often as there is time.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from audits import PROMPT, STEPS, audited, cuts, loaded, opened, sessions
from common import SEED, table, write_json
from quantised import DEMO, OLD_KERNELS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.bounds import bounds_of, distance
from swarm.demo import train

KERNELS: dict[str, dict[str, str]] = {
    "all": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4.1": OLD_KERNELS,
}
COLUMNS = ("class", "texts", "audits", "taken for wrong", "median, most", "its bound", "largest, most", "bound")
TOGETHER = 8


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=DEMO, help="a checkpoint")
    arguments.add_argument("--texts", type=int, default=100, help="of each class, in this run")
    arguments.add_argument("--classes", nargs="*", default=["float32", "float32+int8", "bfloat16", "bfloat16+int8"])
    arguments.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    arguments.add_argument("--outputs", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--check", action="store_true", help="exit with 1 where any was taken for wrong")
    arguments.add_argument("--quick", action="store_true", help="two texts of one class")
    arguments.add_argument("--json", type=Path, help="where the figures go, and are added up")
    options = arguments.parse_args()
    if options.quick:
        options.texts, options.classes = 2, ["float32"]
    torch.set_num_threads(1)
    if options.outputs is not None:
        save_file(outputs_of(options), options.outputs)
        return
    before: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows = {row[0]: list(row) for row in before.get("rows", ())}
    for name in options.classes:
        skip = rows[name][1] if name in rows else 0
        found = compared(name, computed(options, name, skip))
        rows[name] = added(rows.get(name), [name, options.texts, *found])
        rows[name][5::2] = [f"{bound:g}" for bound in bounds_of_class(name)]
        print(f"{name}: {rows[name]}", flush=True)
    shown = [list(row) for row in rows.values()]
    table("honest servers", COLUMNS, [tuple(map(str, row)) for row in shown])
    write_json(options.json, "audits_honest", SEED, [], columns=COLUMNS, rows=shown)
    if options.check and any(row[3] for row in shown):
        sys.exit("an honest server was taken for wrong")


def computed(options: argparse.Namespace, name: str, skip: int) -> dict[str, dict[str, Tensor]]:
    """Return the outputs of a process of each kind of kernels: steps and prompts, [texts, steps, hidden_size]."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        for kind, restricted in KERNELS.items():
            path = Path(folder, f"{kind}.safetensors")
            line = [sys.executable, __file__, "--model", str(options.model), "--texts", str(options.texts)]
            line += ["--classes", name, "--skip", str(skip), "--outputs", str(path)]
            subprocess.run(line, env={**os.environ, **restricted}, check=True)
            found[kind] = load_file(path)
    return found


def outputs_of(options: argparse.Namespace) -> dict[str, Tensor]:
    """Compute texts of one class with this process's kernels."""
    (name,) = options.classes
    texts = drawn_texts(options.model, options.skip, options.texts)
    checkpoint, embed = opened(options.model, name)
    a, b = cuts(checkpoint.n_blocks)
    three = [loaded(checkpoint, name, Blocks(*each)) for each in ((0, a), (a, b), (b, checkpoint.n_blocks))]
    two = [loaded(checkpoint, name, blocks) for blocks in (Blocks(0, b - 1), Blocks(b - 1, checkpoint.n_blocks))]
    steps, prompts = [], []
    half = len(texts) // 2
    for rows in (*texts[:half].split(1), *texts[half:].split(TOGETHER)):
        hidden = embed(rows)
        steps.append(sessions(hidden, three))
        prompts += [audited(each, two) for each in hidden.split(1)]
    return {"steps": torch.cat(steps).float(), "prompts": torch.cat(prompts).float()}


def drawn_texts(model: Path, skip: int, count: int) -> Tensor:
    """Return passages of held-out text, [count, tokens], each from a drawn place: those behind the first `skip`."""
    texts = train.split(train.library_sources())[1]
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)("\n".join(texts), add_special_tokens=False)["input_ids"])
    drawn = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(ids) - PROMPT - STEPS, (skip + count,), generator=drawn)[skip:]
    return torch.stack([ids[start : start + PROMPT + STEPS] for start in starts.tolist()])


def compared(name: str, outputs: dict[str, dict[str, Tensor]]) -> list[Any]:
    """Return how many audits there are, how many fail, and the greatest distances with a place for each bound."""
    bounds = bounds_of([NumericClass.parse(name)])
    distances = [
        distance(told, ours)
        for claim, reference in itertools.product(outputs.values(), repeat=2)
        for told, ours in zip(claim["steps"], reference["prompts"], strict=True)
    ]
    failed = sum(not bounds.allow(each) for each in distances)
    typical, worst = max(each.typical for each in distances), max(each.worst for each in distances)
    return [len(distances), failed, f"{typical:.1e}", "", f"{worst:.1e}", ""]


def bounds_of_class(name: str) -> tuple[float, float]:
    """Return the bounds of a class, of the median position and of any."""
    bounds = bounds_of([NumericClass.parse(name)])
    return bounds.typical, bounds.worst


def added(before: Sequence[Any] | None, now: list[Any]) -> list[Any]:
    """Add counts up, and take the greater distances."""
    if before is None:
        return now
    counts = [a + b for a, b in zip(before[1:4], now[1:4], strict=True)]
    return [now[0], *counts, *(max(a, b, key=float) if b else "" for a, b in zip(before[4:], now[4:], strict=True))]


if __name__ == "__main__":
    main()
