"""Check the span code on a GPU, and time it: correctness of every way, decode, prefill, overhead, CUDA graphs.

    python benchmarks/gpu_check.py [--device cuda] [--sections limits,wide,decode,...]

The server's own span classes run in this process, without a network, on random weights. Without a GPU it runs the same
at small sizes on the CPU. A section that fails is recorded with its traceback, and the others run. The exit status is
1 if a section failed or a comparison was beyond its bound.
"""

import argparse
import logging
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from common import SEED, Samples, table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_integers import integers
from gpu_paths import bounds, families, wide
from gpu_spans import Bench, Sizes
from gpu_speed import Speed, describe


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--sections", help="names with commas between; all by default")
    arguments.add_argument("--budget-s", type=float, default=230.0, help="after so many seconds nothing new begins")
    arguments.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the figures go")
    arguments.add_argument("--commit", help="the checked-out commit, where git cannot tell")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    began = time.perf_counter()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = Sizes.quick() if options.quick else Sizes() if device.type == "cuda" else Sizes.small()
    bench = Bench(device, sizes, options.seed, began + options.budget_s)
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    speed = Speed(bench)
    works: dict[str, Callable[[], Any]] = {
        "machine": lambda: describe(bench) | {"driver": _driver()},
        "limits": speed.limits,
        "wide": lambda: wide(bench),
        "announced": speed.announced,
        "decode": speed.decode,
        "prefill": speed.prefill,
        "overhead": speed.overhead,
        "families": lambda: families(bench),
        "integers": lambda: integers(bench),
        "attention": speed.attention,
        "graphs": speed.graphs,
    }
    chosen = options.sections.split(",") if options.sections else list(works)
    sections = {name: _section(bench, name, works[name]) for name in chosen}
    report(sections)
    write_json(
        options.json,
        "gpu_check",
        options.seed,
        [Samples(f"section {name}", [1000 * section["took_s"]]) for name, section in sections.items()] + speed.samples,
        device=sections.get("machine", {}).get("found"),
        sizes={name: str(value) if name.endswith("dtype") else value for name, value in _plain(sizes).items()},
        bounds=asdict(bounds()),
        took_s=time.perf_counter() - began,
        backward="not served: spans compute forwards alone",
        sections=sections,
        **({"commit": options.commit} if options.commit else {}),
    )
    failed = [name for name, section in sections.items() if not section["ok"]]
    print(f"failed: {', '.join(failed)}" if failed else "all sections passed")
    raise SystemExit(1 if failed else 0)


def report(sections: dict[str, dict[str, Any]]) -> None:
    """Print the sections' figures as tables."""
    for name in ("wide", "families"):
        rows: list[list[str]] = []
        for each in sections.get(name, {}).get("found") or []:
            of = f"{each['family']}, {each['dtype']}: "
            rows += [[of + way["what"], *_compared(way)] for way in each["ways"]]
            rows += [[of + what, text[:60], "", "", "", ""] for what, text in each["errors"].items()]
        if rows:
            table(name, ["", "max error", "median", "bound", "same tokens", "bits"], rows)
    for name in ("decode", "prefill", "overhead"):
        found = sections.get(name, {}).get("found") or []
        columns = list(dict.fromkeys(key for row in found for key in row))
        if found:
            table(name, columns, [[_cell(row.get(column, "")) for column in columns] for row in found])


def _compared(way: dict[str, Any]) -> list[str]:
    bits = "equal" if way["equal_bits"] else "differ"
    marked = bits if way["ok"] else f"{bits}, BEYOND"
    return [f"{way['error']:.1e}", f"{way['middle']:.1e}", f"{way['bound']:.0e}", f"{way['same_tokens']:.2f}", marked]


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _section(bench: Bench, name: str, work: Callable[[], Any]) -> dict[str, Any]:
    """Run one section. Returns its figures, or the traceback of its failure."""
    began = time.perf_counter()
    if bench.late:
        return {"ok": False, "took_s": 0.0, "error": "no time was left", "found": None}
    bench.say(f"{name}:")
    found, error = None, None
    try:
        found = work()
    except Exception:  # noqa: BLE001 - recorded, and the other sections run
        error = traceback.format_exc()
        bench.say(error)
    took_s = time.perf_counter() - began
    bench.say(f"  {took_s:.1f} s")
    beyond = [each for each in found if each.get("failed")] if isinstance(found, list) else []
    return {"ok": error is None and not beyond, "took_s": took_s, "error": error, "found": found, "cut": bench.late}


def _plain(sizes: Sizes) -> dict[str, Any]:
    return {name: [str(item) for item in value] if name == "dtypes" else value for name, value in asdict(sizes).items()}


def _driver() -> str | None:
    """The NVIDIA driver's version."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    line = [program, "--query-gpu=driver_version,name,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=20).stdout.strip()


if __name__ == "__main__":
    main()
