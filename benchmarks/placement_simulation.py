"""Swarms of servers that place themselves by `swarm.server.placement`, in virtual time, and an annealer beside them."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

import numpy as np

from swarm.blocks import Blocks
from swarm.server.placement import Holder, candidates, power_bound, served, should_move
from swarm.server.probes import ProbeLimits, steps_of
from swarm.server.proofs import ProofLimits, Shown, callees
from swarm.server.weights import Claim, weighed

LOOK_EVERY_S = 300.0  # plus or minus a half
QUIET_LOOKS = 12  # looks of every server without a move: more than the patience of any server here
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
    """How a simulation ended. quiet: no server moved in its last QUIET_LOOKS looks."""

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
    """Let every server look at random times and move when the rule says so, until none does any more.

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


# Among liars

KINDS = ("nobody", "silent", "boasting", "slow", "subtle")
RTT_S = (0.01, 0.2)  # between two servers


@dataclass(frozen=True, slots=True)
class Member:
    """A server. tps: its speed through its span. claimed: the speed in its record. answers: calls."""

    claim: Claim
    tps: float
    answers: bool = True


@dataclass(slots=True)
class Looker:
    """The knowledge of one honest server."""

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


def simulate_among_liars(
    n_blocks: int, honest: Sequence[Member], liars: Sequence[Member], seed: int, hours_max: float
) -> Ended:
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
            replace(m, claim=replace(m.claim, blocks=past[j][-1][1] if j == i else _span_as_of(past[j], now - ages[j])))
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


def _span_as_of(past: Sequence[tuple[float, Blocks]], moment: float) -> Blocks:
    return next((blocks for since, blocks in reversed(past) if since <= moment), past[0][1])
