"""What one fifth of lying servers takes from a swarm of servers that place themselves.

    python benchmarks/placement_liars.py [--servers 100] [--seeds 2] [--kinds nobody silent] [--quick] [--json PATH]

Every honest server looks at the swarm every five minutes or so of virtual time, with views that are 20 to 60 s old. It
calls and probes others as `swarm.server.proofs` does, weighs their records by `swarm.server.weights`, and moves by
`swarm.server.placement.should_move`. The liars are all in one half of the model, and never move:

    nobody    records without a server, each claims half of the model and 20 times the median power
    silent    the same, and they answer calls and no step
    boasting  they claim 20 times their speed
    slow      they claim a usual speed and have a twentieth of it
    subtle    they claim twice their speed, which is as much as a probe lets pass

The bottleneck counts what servers really serve. It is compared with that of the honest servers alone.
"""

import argparse
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
from common import SEED, Samples, table, write_json
from placement_simulation import DELAY_S, LOOK_EVERY_S, QUIET_LOOKS, random_swarm

from swarm.blocks import Blocks
from swarm.server.placement import Holder, candidates, served, should_move
from swarm.server.probes import ProbeLimits, steps_of
from swarm.server.proofs import ProofLimits, Shown, callees
from swarm.server.weights import Claim, weighed

KINDS = ("nobody", "silent", "boasting", "slow", "subtle")
MODELS = (32, 80)  # blocks
RTT_S = (0.01, 0.2)  # between two servers
LIARS = 0.2  # of all servers
COLUMNS = ("liars", "blocks", "seed", "without", "with", "with / without", "moves", "hours", "stopped")


@dataclass(frozen=True, slots=True)
class Member:
    """A server. tps: what it computes, through its span. claimed: what its record says. answers: calls."""

    claim: Claim
    tps: float
    answers: bool = True


@dataclass(slots=True)
class Looker:
    """What one honest server knows."""

    shown: dict[str, Shown] = field(default_factory=dict)
    patience: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a simulation ended. bottleneck: tokens/s that the least served block really gets."""

    bottleneck: float
    moves: int
    last_move_h: float
    quiet: bool


def honest_members(holders: Sequence[Holder]) -> list[Member]:
    """Return servers that tell the truth."""
    return [Member(Claim(h.key, h.blocks, h.tps, automatic=True), h.tps) for h in holders]


def liars(kind: str, count: int, n_blocks: int, seed: int, holders: Sequence[Holder]) -> list[Member]:
    """Return liars, all in the first half of the model. holders: the honest servers."""
    random = np.random.default_rng(1_000_000 + seed)
    usual, half = median(holder.power for holder in holders), n_blocks // 2
    found = []
    for i in range(count):
        key = f"{1 << 20 | i:064x}"
        if kind in {"nobody", "silent"}:
            claim = Claim(key, Blocks(0, half), 20 * usual / half, automatic=True)
            found.append(Member(claim, 0.0, answers=kind == "silent"))
            continue
        like = holders[int(random.integers(len(holders)))]
        length = min(len(like.blocks), half)
        start = int(random.integers(0, half - length + 1))
        claimed, real = {"boasting": (20.0, 1.0), "slow": (1.0, 0.05), "subtle": (1.999, 1.0)}[kind]
        blocks = Blocks(start, start + length)
        found.append(Member(Claim(key, blocks, claimed * like.tps, automatic=True), real * like.tps))
    return found


def probed(member: Member, rtt_s: float) -> float:
    """Return the block-tokens/s that a probe shows, as `swarm.server.probes.Prober.probe` does."""
    limits = ProbeLimits()
    steps = steps_of(member.claim.tps, limits)
    in_time = min(steps, math.floor((limits.answer_s - rtt_s) * member.tps))
    took_s = rtt_s + steps / member.tps if in_time == steps else limits.answer_s
    return in_time / took_s * len(member.claim.blocks)


def simulate(n_blocks: int, honest: Sequence[Member], liars: Sequence[Member], seed: int, hours_max: float) -> Ended:
    """Let every honest server look at random times and move when the rule says so, until none does any more."""
    numbers, random = np.random.default_rng(seed), Random(seed)
    now_is = [*honest, *liars]
    past: list[list[tuple[float, Blocks]]] = [[(0.0, member.claim.blocks)] for member in now_is]
    lookers = [Looker() for _ in honest]
    rtt_s = numbers.uniform(*RTT_S, (len(honest), len(now_is)))
    looks = [(float(t), i) for i, t in enumerate(numbers.uniform(0, LOOK_EVERY_S, len(honest)))]
    heapq.heapify(looks)
    moves, moved_s, now = 0, 0.0, 0.0
    while now < hours_max * 3600 and now - moved_s <= QUIET_LOOKS * LOOK_EVERY_S * 1.5:
        now, i = heapq.heappop(looks)
        ages = numbers.uniform(*DELAY_S, len(now_is))
        view = [
            replace(m, claim=replace(m.claim, blocks=past[j][-1][1] if j == i else _as_of(past[j], now - ages[j])))
            for j, m in enumerate(now_is)
        ]
        looker = lookers[i]
        _look(looker, view, i, now, rtt_s[i], random)
        proven = {key: shown.power for key, shown in looker.shown.items()}
        holders = weighed(n_blocks, [m.claim for m in view], {**proven, view[i].claim.key: math.inf})
        blocks, looker.patience = should_move(candidates(n_blocks, holders), view[i].claim.key, looker.patience)
        if blocks is not None:
            past[i].append((now, blocks))
            moves, moved_s = moves + 1, now
        heapq.heappush(looks, (now + LOOK_EVERY_S * numbers.uniform(0.5, 1.5), i))
    real = [Holder(m.claim.key, past[j][-1][1], m.tps) for j, m in enumerate(now_is)]
    return Ended(float(served(n_blocks, real).min()), moves, moved_s / 3600, now < hours_max * 3600)


def _look(looker: Looker, view: Sequence[Member], me: int, now: float, rtt_s: np.ndarray, random: Random) -> None:
    """Probe some of the others, as `swarm.server.proofs.Proofs` does."""
    limits = ProofLimits()
    looker.shown = {key: shown for key, shown in looker.shown.items() if shown.until > now}
    index = {member.claim.key: j for j, member in enumerate(view) if j != me}
    probes = limits.probes_max
    for key in callees({key: view[j].claim.blocks for key, j in index.items()}, looker.shown, random, limits):
        member = view[index[key]]
        power = probed(member, rtt_s[index[key]]) if member.answers and member.tps else 0.0
        until = now + (limits.proven_s if power else limits.silent_s)
        looker.shown[key] = Shown(power, member.claim.blocks, until)
        probes -= member.answers
        if not probes:
            break


def _as_of(past: Sequence[tuple[float, Blocks]], moment: float) -> Blocks:
    return next((blocks for since, blocks in reversed(past) if since <= moment), past[0][1])


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
    alone = simulate(n_blocks, honest, (), seed, options.hours)
    results = []
    for kind in options.kinds:
        ended = simulate(n_blocks, honest, liars(kind, count, n_blocks, seed, holders), seed, options.hours)
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
