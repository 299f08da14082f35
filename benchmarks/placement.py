"""How near servers that place themselves come to the best placement, and how soon they stop moving.

    python benchmarks/placement.py [--servers 100] [--seeds 3] [--anneal 1000000] [--quick] [--json PATH]

From random starts, servers of very different speeds and sizes look at the swarm every five minutes or so of virtual
time and move by `swarm.server.placement.should_move`, once with true views and once with views that are 20 to 60 s
old. The bottleneck (tokens/s that the least served block gets) is compared with what a seeded annealer finds from
the same start, and with a bound that holds even for spans in pieces.
"""

import argparse
from pathlib import Path

from common import SEED, Samples, table, write_json
from placement_simulation import DELAY_S, anneal, random_swarm, simulate

from swarm.server.placement import power_bound, served

MODELS = (32, 80, 128)  # blocks
SPEEDS = ("lognormal", "spread")
COLUMNS = (
    "speeds, blocks, seed",
    "bound",
    "annealer",
    "start",
    "settled",
    "/annealer",
    "moves",
    "hours",
    "stale",
    "moves",
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--servers", type=int, default=100)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--anneal", type=int, default=1_000_000, help="moves that the annealer tries")
    arguments.add_argument("--quick", action="store_true", help="one small case, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the figures go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    cases = [(speeds, n, options.seed + i) for speeds in SPEEDS for n in MODELS for i in range(options.seeds)]
    if options.quick:
        cases, options.anneal, options.servers = cases[:1], 20_000, 30
    results = [measure(*case, options.servers, options.anneal) for case in cases]
    table(f"bottleneck in tokens/s, {options.servers} servers", COLUMNS, [row(result) for result in results])
    worst = min(min(r["settled"], r["stale"]) / r["annealer"] for r in results)
    print(f"worst ratio to the annealer's {options.anneal} moves: {worst:.3f}")
    print(f"all stopped moving: {all(r['quiet'] for r in results)}")
    ratios = Samples("settled / annealer", [r["settled"] / r["annealer"] for r in results])
    stale = Samples("settled with stale views / annealer", [r["stale"] / r["annealer"] for r in results])
    print(f"median ratio {ratios.median:.3f}, with stale views {stale.median:.3f}")
    write_json(
        options.json, "placement", options.seed, [ratios, stale],
        unit="ratio", servers=options.servers, annealer_moves=options.anneal, results=results,
    )  # fmt: skip


def measure(speeds: str, n_blocks: int, seed: int, servers: int, anneal_moves: int) -> dict:
    holders = random_swarm(seed, n_blocks, servers, speeds)
    true = simulate(n_blocks, holders, seed)
    stale = simulate(n_blocks, holders, seed, delay_s=DELAY_S)
    return {
        "case": f"{speeds}, {n_blocks}, {seed}",
        "bound": power_bound(n_blocks, holders),
        "annealer": anneal(n_blocks, holders, seed, anneal_moves),
        "start": float(served(n_blocks, holders).min()),
        "settled": float(served(n_blocks, true.holders).min()),
        "moves": true.moves,
        "hours": true.last_move_h,
        "stale": float(served(n_blocks, stale.holders).min()),
        "stale_moves": stale.moves,
        "stale_hours": stale.last_move_h,
        "quiet": true.quiet and stale.quiet,
    }


def row(r: dict) -> tuple[str, ...]:
    numbers = [f"{r[name]:.1f}" for name in ("bound", "annealer", "start", "settled")]
    share = f"{r['settled'] / r['annealer']:.3f}"
    return (
        r["case"],
        *numbers,
        share,
        str(r["moves"]),
        f"{r['hours']:.2f}",
        f"{r['stale']:.1f}",
        str(r["stale_moves"]),
    )


if __name__ == "__main__":
    main()
