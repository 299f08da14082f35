"""What a hop costs here and in another checkout, a second in turn: `hop_overhead.py` for two versions at once.

    python benchmarks/hop_turns.py OTHER [--tokens 600] [--check SHARE] [--json PATH]

Each version has a process with its own client and servers. They take turns in computing some tokens, locally and over
1, 2 and 3 hops, so that the machine's noise hits both alike; runs one after the other differ by a tenth. Cost per hop:
the median of (a token's time - the local one's beside it) / hops.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

OF_VERSION = os.environ.get("HOP_TURNS")  # the benchmarks of the version that this process computes for
if OF_VERSION is not None:
    sys.path[0] = OF_VERSION

import hop_overhead
import torch
from common import SEED, Samples, table, tiny_llama, write_json

from swarm.demo.local import LocalSwarm

BLOCKS = 6
BURST = 20  # tokens of each kind, one version after the other
ROUTES = ("1 hop", "2 hops", "3 hops")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("other", type=Path, help="a checkout of the version to compare with")
    arguments.add_argument("--tokens", type=int, default=600, help="measured tokens of each kind")
    arguments.add_argument("--check", type=float, help="fail if a hop costs more than this share of the other's")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    versions = {"other": Version(options.other.resolve()), "present": Version(Path(__file__).resolve().parent.parent)}
    try:
        samples = in_turns(versions, options.tokens)
    finally:
        for version in versions.values():
            version.stop()
    shares = report(samples)
    write_json(options.json, "hop_turns", SEED, list(samples.values()), shares=shares, tokens=options.tokens)
    if options.check is not None and max(shares.values()) > options.check:
        sys.exit(f"a hop costs more than {options.check} of what it did")


class Version:
    """A process of one version."""

    def __init__(self, checkout: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout), "HOP_TURNS": str(checkout / "benchmarks")}
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while (line := self._said()) != "ready":
            assert line, "it has ended"

    def burst_ms(self) -> dict[str, list[float]]:
        """Compute some tokens of each kind in turn. Returns the milliseconds of each."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, list[float]] = json.loads(self._said())
        return found

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def in_turns(versions: dict[str, Version], tokens: int) -> dict[str, Samples]:
    """Compute tokens, the versions in random order each time."""
    order = random.Random(SEED)
    samples = {
        f"{version}, {name}": Samples(f"{version}, {name}") for version in versions for name in ("local", *ROUTES)
    }
    for _ in range(tokens // BURST):
        for version in order.sample(list(versions), len(versions)):
            versions[version].burst_ms()  # its caches are the other's
            for name, ms in versions[version].burst_ms().items():
                samples[f"{version}, {name}"].ms += ms
    return samples


def report(samples: dict[str, Samples]) -> dict[str, float]:
    """Print the costs. Returns the present one's share of the other's, by route."""
    rows, shares = [], {}
    for hops, name in enumerate(ROUTES, 1):
        cost = {
            version: median(
                (token - local) / hops
                for token, local in zip(samples[f"{version}, {name}"].ms, samples[f"{version}, local"].ms, strict=True)
            )
            for version in ("other", "present")
        }
        shares[name] = cost["present"] / cost["other"]
        whole = samples[f"present, {name}"].median / samples[f"other, {name}"].median
        rows.append([name, *(f"{cost[each]:.3f}" for each in cost), f"{shares[name]:.3f}", f"{whole:.3f}"])
    table("milliseconds a hop", ["", "other", "present", "share", "share of a whole token"], rows)
    return shares


def serve() -> None:
    """Compute the tokens that standard input asks for, by the version that PYTHONPATH names."""
    calls = 0

    def interleaved(count: int, works: dict[str, Callable[[], object]]) -> dict[str, Samples]:
        nonlocal calls
        calls += 1
        for _ in range(count):
            for work in works.values():
                work()
        if calls == 2:  # they are warm
            print("ready", flush=True)
            for _ in sys.stdin:
                print(json.dumps(_burst(works)), flush=True)
            raise SystemExit
        return {}

    hop_overhead.interleaved = interleaved
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder, torch.inference_mode():
        local = tiny_llama(Path(folder), BLOCKS, SEED)
        with LocalSwarm(folder, [f"0:{BLOCKS}"] * len(ROUTES), log_level="warning") as swarm:
            hop_overhead.measure_routes(swarm, local, 20)


def _burst(works: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(BURST):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            found[name].append((time.perf_counter() - began) * 1000)
    return found


if __name__ == "__main__":
    serve() if OF_VERSION is not None else main()
