"""Steps of int8 and int4 against llama.cpp's of Q8_0 and Q4_0, on the same shapes, in one run and on one thread.

    python benchmarks/ggml.py --python ENVIRONMENT/bin/python [--hidden 2048] [--blocks 8] [--count 12] [--quick]

ENVIRONMENT has `llama-cpp-python` and `gguf`, compiled for the instructions that are to be compared. To limit ours,
set the variables of `quantised.py`. The blocks are those of `quantised.py`, and both sides have a
head of 64 tokens or none. All take turns: a step of one session, of four and of eight, and a prompt of 512.

--check: int8 has at least 0.85 of Q8_0's speed for one session and four, and int4 0.8 of Q4_0's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from common import SEED, Samples, interleaved, table, write_json
from load import save_checkpoint
from quantised import CLASSES, LIMITS, works_of

from swarm.blocks import Blocks
from swarm.model.checkpoint import open_checkpoint
from swarm.model.kernels import choose_kernels
from swarm.model.loading import load_span
from swarm.model.span import Span

PAIRS = {"bfloat16+int8": ("Q8_0", 0.85), "bfloat16+int4": ("Q4_0", 0.8)}  # ggml's, and the least share of its speed
STEPS = ("1 session", "4 sessions")  # that are promised


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--python", required=True, help="of an environment with llama-cpp-python and gguf")
    arguments.add_argument("--hidden", type=int, default=2048)
    arguments.add_argument("--blocks", type=int, default=8)
    arguments.add_argument("--count", type=int, default=12)
    arguments.add_argument("--check", action="store_true", help="exit with 1 where ours is slower than it may be")
    arguments.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    hidden, blocks, count = (256, 2, 2) if options.quick else (options.hidden, options.blocks, options.count)
    intermediate = 4 * hidden if hidden >= 2048 else 8 * hidden // 3 // 256 * 256
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder, torch.inference_mode():
        shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": blocks}
        shape |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
        save_checkpoint(Path(folder, "model"), "llama", torch.bfloat16, SEED, **shape)
        spans = {name: span_of(Path(folder, "model"), name) for name in PAIRS}
        ours = {name: works_of(span) for name, span in spans.items()}
        line = [options.python, str(Path(__file__).with_name("ggml_steps.py")), folder]
        line += [str(hidden), str(intermediate), str(blocks)]
        theirs = {kind: Ggml([*line, kind]) for kind, _ in PAIRS.values()}
        timed: dict[str, Samples] = {}
        for what in next(iter(ours.values())):
            works: dict[str, Callable[[], object]] = {}
            for name, (kind, _) in PAIRS.items():
                works |= {f"{what}, {name}": ours[name][what], f"{what}, {kind}": theirs[kind].work(what)}
            interleaved(1, works)  # warms up
            timed |= interleaved(max(2, count // 4) if what.startswith("prompt") else count, works)
        for each in theirs.values():
            each.end()
    rows, slow = compared(timed, list(next(iter(ours.values()))))
    columns = ("step", *(f"{each}, ms" for pair in PAIRS.items() for each in (pair[0], pair[1][0])), "int8", "int4")
    table(f"{blocks} blocks of width {hidden}: quickest, and the share of ggml's speed", columns, rows)
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    write_json(options.json, "ggml", SEED, list(timed.values()), columns=columns, rows=rows, kernels=limits)
    if options.check and slow:
        sys.exit("; ".join(slow))


def span_of(model: Path, name: str) -> Span:
    """Load all blocks of a checkpoint in a class."""
    checkpoint = open_checkpoint(model)
    dtype, quantize = CLASSES[name]
    span = load_span(checkpoint, Blocks(0, checkpoint.n_blocks), dtype=dtype, quantize=quantize)
    choose_kernels(span)
    return span


def compared(timed: dict[str, Samples], kinds: list[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the table's rows, and the steps that are slower than they may be."""
    rows, slow = [], []
    for what in kinds:
        row, shares = [what], []
        for name, (kind, least) in PAIRS.items():
            mine, other = (min(timed[f"{what}, {each}"].ms) for each in (name, kind))
            row += [f"{mine:.2f}", f"{other:.2f}"]
            shares.append(f"{other / mine:.2f}")
            if what in STEPS and other / mine < least:
                slow.append(f"{what}: {name} has {other / mine:.2f} of {kind}'s speed, and {least} is promised")
        rows.append((*row, *shares))
    return rows, slow


class Ggml:
    """A process with llama.cpp, which computes a step when it is told to."""

    def __init__(self, line: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self._ask("")

    def work(self, what: str) -> Callable[[], object]:
        """Return what is timed: a few microseconds are the pipe's."""
        return lambda: self._ask(what)

    def end(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60.0)

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if what:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        assert self._process.stdout.readline(), "llama.cpp's process has ended"


if __name__ == "__main__":
    main()
