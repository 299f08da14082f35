"""How long a server's weights take to load, and how much memory meanwhile: plain, rounded, and from the cache.

    python benchmarks/starting.py [--hidden 2048] [--blocks 8] [--count 3] [--quick] [--check]

A random llama's blocks, in bfloat16, lie in one file that the system has in its page cache. Each start is a process of
its own, and the kinds take turns. Memory is what a process holds beyond what it held before it loaded: its own pages,
not those of files. "first" rounds. It writes the blocks into a cache then, which a server does while it serves: that
time is given apart. "second" reads them from there.

--check: a rounded start's peak is at most its weights and 1.1 of the largest tensor in float32; a first start takes at
most 1.5 times bfloat16's, a second one 0.5.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from load import save_checkpoint

from swarm.blocks import Blocks
from swarm.model.allocator import keep_free_memory
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from swarm.model.weightcache import WeightCache, WeightCacheLimits

KINDS = ("bfloat16", "int8, first", "int8, second", "int4, first", "int4, second")
FIRST_MAX, SECOND_MAX, TENSORS_MAX = 1.5, 0.5, 1.1
SAID = ("s", "wrote", "peak", "weights")  # of a start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--hidden", type=int, default=2048, help="width of the random llama")
    arguments.add_argument("--blocks", type=int, default=8)
    arguments.add_argument("--count", type=int, default=3, help="starts of each kind")
    arguments.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    arguments.add_argument("--check", action="store_true", help="exit with 1 where a bound is broken")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--start", nargs=3, metavar=("FOLDER", "KIND", "CACHE"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.start is not None:
        print(json.dumps(start(*options.start)))
        return
    hidden, blocks, count = (256, 2, 1) if options.quick else (options.hidden, options.blocks, options.count)
    starts: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": blocks}
        shape |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
        save_checkpoint(Path(folder, "model"), "llama", torch.bfloat16, SEED, **shape)
        line = [sys.executable, __file__, "--start", str(Path(folder, "model"))]
        for number in range(-1, count):
            for kind in KINDS:
                cache = Path(folder, f"cache-{number}-{kind[:4]}")
                done = subprocess.run([*line, kind, str(cache)], capture_output=True, text=True, check=True)
                if number >= 0:  # the first round warms up
                    starts[kind].append(json.loads(done.stdout.splitlines()[-1]))
    columns = ("start", "s", "to bfloat16's", "writes, s", "peak, MB", "weights, MB", "beyond, in largest tensors")
    rows, broken = compared(starts, 4 * 4 * hidden * hidden)
    table(f"{blocks} blocks of width {hidden}: medians", columns, rows)
    samples = [Samples(kind, [1000 * one["s"] for one in its]) for kind, its in starts.items()]
    write_json(options.json, "starting", SEED, samples, columns=columns, rows=rows, memory=starts)
    if options.check and broken:
        sys.exit("; ".join(broken))


def compared(starts: dict[str, list[dict[str, float]]], largest: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the table's rows, and which bounds are broken. largest: bytes of the largest tensor in float32."""
    rows, broken = [], []
    plain = statistics.median(one["s"] for one in starts["bfloat16"])
    for kind, its in starts.items():
        took, wrote, peak, weights = (statistics.median(one[key] for one in its) for key in SAID)
        ratio, beyond = took / plain, (peak - weights) / largest
        mb = (f"{peak / 1e6:.0f}", f"{weights / 1e6:.0f}")
        rows.append((kind, f"{took:.2f}", f"{ratio:.2f}", f"{wrote:.2f}", *mb, f"{beyond:.2f}"))
        most = {"first": FIRST_MAX, "second": SECOND_MAX}.get(kind.partition(", ")[2])
        if most is not None and (ratio > most or beyond > TENSORS_MAX):
            broken.append(f"{kind}: {ratio:.2f} times bfloat16's, {beyond:.2f} tensors beyond the weights")
    return rows, broken


def start(folder: str, kind: str, cache: str) -> dict[str, float]:
    """Load a checkpoint's blocks. Returns its seconds, the peak of the process's own memory, and the weights' bytes."""
    torch.set_num_threads(1)
    keep_free_memory()  # as a server does
    checkpoint = open_checkpoint(folder)  # hashes the files, once
    blocks = Blocks(0, checkpoint.n_blocks)
    quantize = None if kind == "bfloat16" else kind[:4]
    kept = None if quantize is None else WeightCache(Path(cache), WeightCacheLimits(free_bytes_min=0))
    before, highest, ended = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not ended.wait(0.005):
            highest = max(highest, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    span = load_span(checkpoint, blocks, dtype=torch.bfloat16, quantize=quantize, rounded=kept)
    took = time.perf_counter() - began
    if kept is not None:
        kept.write()  # beside its work, in a server
    wrote = time.perf_counter() - began - took
    ended.set()
    watcher.join()
    peak = max(highest, own_bytes()) - before
    return {"s": took, "wrote": wrote, "peak": float(peak), "weights": float(span.weight_bytes)}


def own_bytes() -> int:
    """Return this process's own memory: resident pages that are no file's. Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
