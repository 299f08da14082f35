"""Swarms of servers that place themselves by `swarm.server.placement`, in virtual time, and an annealer beside them."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarm.blocks import Blocks
from swarm.server.placement import Holder, candidates, power_bound, served, should_move

LOOK_EVERY_S = 300.0  # plus or minus a half
QUIET_LOOKS = 12  # looks of every server without a move: more than anybody's patience that matters
DELAY_S = (20.0, 60.0)  # how old a view of another server is


def random_swarm(seed: int, n_blocks: int, servers: int, speeds: str) -> list[Holder]:
    """Spans of 3 to 30 % of the model at random places. speeds: "lognormal", or "spread" for 1:30, even in log."""
    random = np.random.default_rng(seed)
    power = np.exp(random.normal(0, 1, servers) if speeds == "lognormal" else random.uniform(0, np.log(30), servers))
    holders = []
    for i in range(servers):
        length = max(1, int(n_blocks * random.uniform(0.03, 0.3)))
        start = int(random.integers(0, n_blocks - length + 1))
        tps = 100 * float(power[i]) / length
        holders.append(Holder(f"{i:064x}", Blocks(start, start + length), tps, automatic=True))
    return holders


@dataclass(frozen=True, slots=True)
class Settled:
    """How a simulation ended. quiet: nobody moved for QUIET_LOOKS looks of everybody."""

    holders: tuple[Holder, ...]
    moves: int
    last_move_h: float
    quiet: bool


def simulate(
    n_blocks: int,
    holders: Sequence[Holder],
    seed: int,
    *,
    delay_s: tuple[float, float] = (0.0, 0.0),
    moves_max: int = 2000,
) -> Settled:
    """Let every server look at random times and move when the rule says so, until nobody does any more.

    delay_s: how old the view of each other server is, drawn for each look.
    """
    random = np.random.default_rng(seed)
    past: list[list[tuple[float, Holder]]] = [[(0.0, holder)] for holder in holders]
    patience = [0] * len(holders)
    looks = [(float(t), i) for i, t in enumerate(random.uniform(0, LOOK_EVERY_S, len(holders)))]
    heapq.heapify(looks)
    moves, moved_s = 0, 0.0
    queues: dict[tuple[Blocks, ...], tuple[tuple[str, Blocks], ...]] = {}  # of the latest view
    while moves < moves_max:
        now, i = heapq.heappop(looks)
        if now - moved_s > QUIET_LOOKS * LOOK_EVERY_S * 1.5:
            return Settled(tuple(p[-1][1] for p in past), moves, moved_s / 3600, True)
        ages = random.uniform(*delay_s, len(holders))
        view = [p[-1][1] if j == i else _as_of(p, now - ages[j]) for j, p in enumerate(past)]
        places = tuple(holder.blocks for holder in view)
        if places not in queues:
            queues = {places: candidates(n_blocks, view)}
        blocks, patience[i] = should_move(queues[places], view[i].key, patience[i])
        if blocks is not None:
            past[i].append((now, replace(view[i], blocks=blocks)))
            moves, moved_s = moves + 1, now
        heapq.heappush(looks, (now + LOOK_EVERY_S * random.uniform(0.5, 1.5), i))
    return Settled(tuple(p[-1][1] for p in past), moves, moved_s / 3600, False)


def _as_of(past: list[tuple[float, Holder]], moment: float) -> Holder:
    return next((holder for since, holder in reversed(past) if since <= moment), past[0][1])


def anneal(n_blocks: int, holders: Sequence[Holder], seed: int, moves: int) -> float:
    """Return the best bottleneck that simulated annealing finds from here, moving one span at a time.

    Its energy is the logarithm of the inverse level, with an exponent that rises from 8 to 128 while it cools.
    """
    random = np.random.default_rng(seed)
    which, where = random.integers(0, len(holders), moves).tolist(), random.random(moves).tolist()
    luck = (-np.log(random.random(moves))).tolist()
    start = [h.blocks.start for h in holders]
    length, tps = [len(h.blocks) for h in holders], [h.tps for h in holders]
    x = served(n_blocks, holders)
    fair = power_bound(n_blocks, holders)
    best = float(x.min())
    sharpness, temperature, energy = 8.0, 0.05, np.inf
    for k in range(moves):
        if k % 10_000 == 0:
            sharpness, temperature = 8.0 * 16.0 ** (k / moves), 0.05 * 1e-3 ** (k / moves)
            energy = _energy(x, fair, sharpness)
        i = which[k]
        old, new, size = start[i], int(where[k] * (n_blocks - length[i] + 1)), length[i]
        y = x.copy()
        y[old : old + size] -= tps[i]
        y[new : new + size] += tps[i]
        then = _energy(y, fair, sharpness)
        if then - energy < temperature * luck[k]:
            x, energy, start[i] = y, then, new
            best = max(best, float(x.min()))
    return best


def _energy(x: np.ndarray, fair: float, sharpness: float) -> float:
    return float(np.log(np.exp(-sharpness * np.log(np.maximum(x, 0.05 * fair) / fair)).sum()) / sharpness)
