"""A client without p2pd: how long until it knows a route, against one with p2pd?

    python benchmarks/joining.py [--runs 15] [--check]

Three servers of the demo checkpoint and a bootstrap node. In turns, a fresh process imports the client, joins through
p2pd or through py-libp2p alone (`directory="p2pd"`, `"light"`), and plans its first route. What is printed: the import,
`from_pretrained` (which joins, and imports hivemind or py-libp2p), the first route, and all of it together. `--check`
exits with 1 if the light client takes more than 1.5 times as long.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

CHECKPOINT = Path(__file__).resolve().parent.parent / "swarm" / "demo" / "checkpoint"
SPANS = ("0:4", "4:8", "8:12")
WAYS = ("p2pd", "light")
PARTS = ("import", "from_pretrained", "first route", "all")
RATIO_MAX = 1.5


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=15, help="processes of each kind")
    arguments.add_argument("--quick", action="store_true", help="two of each")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promise is kept")
    arguments.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child is not None:
        print(json.dumps(join(*options.child)))
        return
    is_broken = compare(2 if options.quick else options.runs, options.json)
    sys.exit(1 if options.check and is_broken else 0)


def join(way: str, network: str, peer: str) -> list[float]:
    """Return the seconds that each part takes, in a process that has imported nothing yet."""
    times = [time.perf_counter()]
    from swarm import AutoDistributedModel  # noqa: PLC0415 - it is what is measured

    times.append(time.perf_counter())
    model = AutoDistributedModel.from_pretrained(CHECKPOINT, initial_peers=[peer], network=network, directory=way)
    times.append(time.perf_counter())
    assert len(model.route) == len(SPANS)
    times.append(time.perf_counter())
    model.close()
    return [times[i + 1] - times[i] for i in range(3)] + [times[3] - times[0]]


def compare(runs: int, path: Path | None) -> bool:
    """Measure, print and write. Returns whether the promise is broken."""
    from common import SEED, Samples, table, write_json  # noqa: PLC0415 - torch: a child must not have it

    from swarm.demo.local import LocalSwarm  # noqa: PLC0415

    samples = {(way, part): Samples(f"{way}, {part}") for way in WAYS for part in PARTS}
    with LocalSwarm(CHECKPOINT, SPANS) as swarm:
        for run in range(runs + 1):  # the first of each fills the caches of the disk
            for way in WAYS:
                line = [sys.executable, __file__, "--child", way, swarm.network, swarm.initial_peers[0]]
                done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
                for part, seconds in zip(PARTS, json.loads(done.stdout.splitlines()[-1]), strict=True):
                    if run:
                        samples[way, part].ms.append(1000 * seconds)
    rows = [
        [
            part,
            *(f"{samples[way, part].median:.0f}" for way in WAYS),
            f"{samples['light', part].median / samples['p2pd', part].median:.2f}",
        ]
        for part in PARTS
    ]
    table("medians, ms", ["", *WAYS, "light / p2pd"], rows)
    ratio = samples["light", "all"].median / samples["p2pd", "all"].median
    write_json(path, "joining", SEED, list(samples.values()), ratio=ratio)
    if ratio > RATIO_MAX:
        print(f"NOT KEPT: a light client takes {ratio:.2f} times as long")
    return ratio > RATIO_MAX


if __name__ == "__main__":
    main()
