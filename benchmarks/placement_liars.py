"""The damage of one fifth of lying servers to a swarm of servers that place themselves.

    python benchmarks/placement_liars.py [--servers 100] [--seeds 2] [--kinds nobody silent] [--quick] [--json PATH]

An honest server looks at the swarm about every five minutes of virtual time. Its view is 20 to 60 s old. It calls and
probes others as `swarm.server.proofs` does, weighs their records by `swarm.server.weights`, and moves by
`swarm.server.placement.should_move`. The liars are all in one half of the model, and never move:

    nobody    records without a server, each claims half of the model and 20 times the median power
    silent    the same, and they answer calls and no step
    boasting  they claim 20 times their speed
    slow      they claim a usual speed and have a twentieth of it
    subtle    they claim twice their speed, which is as much as a probe lets pass

The bottleneck counts what servers really serve. It is compared with that of the honest servers alone.
"""

import argparse
import math
from pathlib import Path

from common import SEED, Samples, table, write_json
from placement_simulation import KINDS, honest_members, liars, random_swarm, simulate_among_liars

MODELS = (32, 80)  # blocks
LIARS = 0.2  # of all servers
COLUMNS = ("liars", "blocks", "seed", "without", "with", "with / without", "moves", "hours", "stopped")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--servers", type=int, default=100, help="liars among them")
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    arguments.add_argument("--blocks", type=int, nargs="+", default=MODELS)
    arguments.add_argument("--speeds", default="lognormal", choices=("lognormal", "spread"))
    arguments.add_argument("--hours", type=float, default=12.0, help="virtual hours after which a swarm is left moving")
    arguments.add_argument("--quick", action="store_true", help="one small case, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the figures go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.servers, options.seeds, options.blocks, options.hours = 20, 1, [16], 2.0
    results = []
    for n_blocks in options.blocks:
        for seed in range(options.seed, options.seed + options.seeds):
            results += measure(n_blocks, seed, options)
    table(f"bottleneck in tokens/s, {options.servers} servers", COLUMNS, [row(result) for result in results])
    ratios = [Samples(f"{kind}: with / without", [r["ratio"] for r in results if r["kind"] == kind]) for kind in KINDS]
    ratios = [samples for samples in ratios if samples.ms]
    print(f"worst ratio: {min(r['ratio'] for r in results):.3f}")
    write_json(
        options.json, "placement_liars", options.seed, ratios,
        unit="ratio", servers=options.servers, speeds=options.speeds, results=results,
        columns=COLUMNS, rows=[row(result) for result in results],
    )  # fmt: skip


def measure(n_blocks: int, seed: int, options: argparse.Namespace) -> list[dict]:
    """Compare the honest servers alone with the same beside each kind of liars."""
    count = round(LIARS * options.servers)
    holders = random_swarm(seed, n_blocks, options.servers - count, options.speeds)
    honest = honest_members(holders)
    alone = simulate_among_liars(n_blocks, honest, (), seed, options.hours)
    results = []
    for kind in options.kinds:
        lying = liars(kind, count, n_blocks, seed, holders)
        ended = simulate_among_liars(n_blocks, honest, lying, seed, options.hours)
        results.append(
            {
                "kind": kind,
                "blocks": n_blocks,
                "seed": seed,
                "without": alone.bottleneck,
                "with": ended.bottleneck,
                "ratio": ended.bottleneck / alone.bottleneck if alone.bottleneck else math.inf,
                "moves": ended.moves,
                "hours": ended.last_move_h,
                "quiet": ended.quiet,
                "quiet_without": alone.quiet,
            }
        )
        print(*row(results[-1]), flush=True)
    return results


def row(r: dict) -> tuple[str, ...]:
    speeds = (f"{r['without']:.1f}", f"{r['with']:.1f}", f"{r['ratio']:.3f}")
    return (r["kind"], str(r["blocks"]), str(r["seed"]), *speeds, str(r["moves"]), f"{r['hours']:.2f}", str(r["quiet"]))


if __name__ == "__main__":
    main()
