"""The choice of blocks for a server with an automatic span. Pure: announcements in, a span out.

**The goal.** A server that holds L blocks and decodes T tokens/s through all of them gives T tokens/s to *each*
of its blocks; a shorter span would be faster (T is about its power, in block-tokens/s, over L), the same span
elsewhere is as fast. So block b is served x_b = sum of T over the servers whose span contains b, and the swarm's
bottleneck is min x_b: no distribution of sessions over routes gets more tokens/s through the model.

**The measure.** min x_b alone says nothing while several blocks are equally bad, so spans are compared by the *level*,
the geometric mean of the power means  (sum_b x_b^-p / n)^(-1/p)  for p = 4, 16 and 64. Each is min x_b where all blocks
are served alike, and rises whenever any block is served better, the more the worse that one is. The soft ones lead out
of corners in which a sharp one gets stuck; the sharp ones look at the bottleneck. (Petals compares sorted lists of
throughputs, which has no scale on which a gain could be too small to be worth it.)

**The mover.** Every server computes a queue of candidates, nearly the same from the same records (each has probed other
servers, so it knows others of the claims): of each automatic server
its best other span, if that raises the level by more than `move_gain` of the server's own share of the swarm's power
(one that brings 1 % of the power moves for 0.02 % more), the largest gain first, then by key. The first one moves. The
r-th one waits for `looks_per_rank` r looks in a row: so a first one that never moves, because it lies or hangs, delays
the others and does not stop them. Looks are at random times. Moves in order of gain end a few per cent higher than
moves in any order, and are half as many.

**It ends.** Take one move after the other, each from a true view. The level is a function of the state alone (blocks
below a ten-thousandth of their fair share count as that), every move strictly raises it, and there are finitely many
states. (Terms are cut off at e^18 times the worst block's, and a move that reaches the cut is refused: so the level
itself is compared.) Views that are a minute old can make two servers move for the same gap; one of them then has a
reason to move on, and the simulation in `benchmarks/placement.py` shows that this ends too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from swarm.blocks import Blocks
from swarm.limits import limit

Rates = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """When a server moves. All servers of a swarm have the same, or they would compute different queues."""

    move_gain: float = limit(0.02, "share", "of the mover's share of the power that a move must add to the level")
    looks_per_rank: int = limit(2, "looks", "that a candidate waits for each one before it")
    floor_share: float = limit(1e-4, "share", "of its fair share that an unserved block counts with")
    holders_min: int = limit(2, "holders", "of a block that a server leaves; fewer only where others have fewer still")
    sharpness: tuple[float, ...] = limit((4.0, 16.0, 64.0), "p", "of the means; a single one ends lower, or gets stuck")
    exact_share: float = limit(1e-7, "share", "of a sum: rounding leaves less")


@dataclass(frozen=True, slots=True)
class Holder:
    """A server's span. tps: tokens/s through the whole span, so for each block. automatic: it may move.

    proven: it has shown that it computes. Other holders do not count where a block is not to be left by the last ones.
    """

    key: str  # the public key, hex
    blocks: Blocks
    tps: float
    automatic: bool = False
    proven: bool = True

    @property
    def power(self) -> float:
        """Block-tokens per second: the same for every place and length of its span."""
        return self.tps * len(self.blocks)


def served(n_blocks: int, holders: Iterable[Holder]) -> Rates:
    """Return the tokens/s that each block is served. Shape: [n_blocks]."""
    rates = np.zeros(n_blocks)
    for holder in holders:
        rates[holder.blocks.start : holder.blocks.stop] += holder.tps
    return rates


def power_bound(n_blocks: int, holders: Sequence[Holder]) -> float:
    """Return a bottleneck that no placement exceeds, not even one that could cut spans into pieces.

    If every block gets t, a server has given each of its blocks at most t of use: sum min(T, t) L >= n t.
    """
    low, high = 0.0, sum(holder.power for holder in holders) / n_blocks
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(min(h.tps, middle) * len(h.blocks) for h in holders) >= n_blocks * middle
        low, high = (middle, high) if enough else (low, middle)
    return high


def choose_span(
    n_blocks: int, length: int, holders: Sequence[Holder], key: str, limits: PlacementLimits = PlacementLimits()
) -> Blocks:
    """Return the best span for a server that is about to start: where the level rises most.

    Ties fall to the blocks with fewest holders, then to the first ones. The blocks of `key` itself do not count.
    """
    length = min(length, n_blocks)
    others = [holder for holder in holders if holder.key != key]
    known = [holder.power for holder in others if holder.proven] or [holder.power for holder in others]
    typical = median(known) if known else 1.0
    me = Holder(key, Blocks(0, length), typical / length, True)
    gains = _gains(n_blocks, [*others, me], [len(others)], limits)[0]
    count = np.concatenate(([0.0], np.cumsum(served(n_blocks, [replace(h, tps=1.0) for h in others]))))
    ties = [s for s in range(n_blocks - length + 1) if gains[s] >= gains.max() - limits.exact_share]
    start = min(ties, key=lambda s: (count[s + length] - count[s], s))
    return Blocks(start, start + length)


def candidates(
    n_blocks: int, holders: Sequence[Holder], limits: PlacementLimits = PlacementLimits()
) -> tuple[tuple[str, Blocks], ...]:
    """Return the servers that would gain the swarm enough by moving, and whereto; the best first.

    A server that has shown nothing is none: it would only delay those behind it.
    """
    movable = [i for i, holder in enumerate(holders) if holder.automatic and holder.proven]
    total = sum(holder.power for holder in holders)
    found = []
    rows = max(1, (1 << 20) // n_blocks)  # many servers are looked at in slices: matrices of a million numbers
    for at in range(0, len(movable), rows):
        part = movable[at : at + rows]
        gains = np.where(_allowed(n_blocks, holders, part, limits), _gains(n_blocks, holders, part, limits), -np.inf)
        starts = gains.argmax(axis=1)
        for row, (i, start) in enumerate(zip(part, starts.tolist(), strict=True)):
            gain = float(gains[row, start])
            if gain > math.log1p(limits.move_gain * holders[i].power / total):
                found.append((-gain, holders[i].key, Blocks(start, start + len(holders[i].blocks))))
    return tuple((key, blocks) for _, key, blocks in sorted(found))


def should_move(
    queue: Sequence[tuple[str, Blocks]], key: str, patience: int, limits: PlacementLimits = PlacementLimits()
) -> tuple[Blocks | None, int]:
    """Return the span to which this server should move now, or None; and the patience for its next look.

    queue: the candidates. patience: at how many looks in a row before this one it was a candidate whose turn it was
    not; starts with 0.
    """
    for rank, (candidate, blocks) in enumerate(queue):
        if candidate == key:
            return (blocks, 0) if patience >= rank * limits.looks_per_rank else (None, patience + 1)
    return None, 0


def _allowed(
    n_blocks: int, holders: Sequence[Holder], movers: Sequence[int], limits: PlacementLimits
) -> NDArray[np.bool_]:
    """Return whether a mover may go to a start without leaving blocks to too few holders: [movers, starts].

    A block with c proven holders lacks max(0, holders_min - c) squared. Where a move makes some lack more, it has
    to make others lack less by a greater sum. So one strong server that lies does not draw all others from a block.
    """
    count = served(n_blocks, [replace(holder, tps=float(holder.proven)) for holder in holders])
    start, length, proven = (
        np.array([value(holders[i]) for i in movers])[:, None]
        for value in (lambda h: h.blocks.start, lambda h: len(h.blocks), lambda h: h.proven)
    )
    at = np.arange(n_blocks)
    mine = (at >= start) & (at < start + length)
    without = count - (mine & proven)
    lack = np.maximum(0.0, limits.holders_min - without) ** 2 - np.maximum(0.0, limits.holders_min - without - 1) ** 2
    stop = np.minimum(at + length, n_blocks)

    def within(values: Rates) -> Rates:
        sums = np.zeros((len(movers), n_blocks + 1))
        np.cumsum(values, axis=1, out=sums[:, 1:])
        return np.take_along_axis(sums, stop, axis=1) - sums[:, :-1]

    left = np.where(mine, lack, 0.0)
    total = left.sum(axis=1, keepdims=True)
    allowed: NDArray[np.bool_] = (total - within(left) <= limits.exact_share) | (
        within(lack) > total + limits.exact_share
    )
    return allowed


def _gains(n_blocks: int, holders: Sequence[Holder], movers: Sequence[int], limits: PlacementLimits) -> Rates:
    """Return by how much the level's logarithm rises if a mover goes to a start: [movers, starts].

    Starts from which the span would not fit, or that would leave some block far worse than any is now, have -inf.
    """
    cut = 18.0  # e^18 is far above BLOCKS_MAX, and sums with it are exact enough to compare terms of 1
    floor = limits.floor_share * sum(holder.power for holder in holders) / n_blocks
    x = np.maximum(served(n_blocks, holders), floor)
    x0 = x.min()
    start, length, tps = (
        np.array([value(holders[i]) for i in movers])[:, None]
        for value in (lambda h: h.blocks.start, lambda h: len(h.blocks), lambda h: h.tps)
    )
    at = np.arange(n_blocks)
    stop = at + length
    without = served(n_blocks, holders) - tps * ((at >= start) & (at < start + length))
    now, apart, there = (np.log(np.maximum(y, floor) / x0) for y in (x, without, without + tps))
    gains = np.where(stop > n_blocks, -np.inf, 0.0)
    for p in limits.sharpness:
        before, after = (np.exp(np.minimum(-p * y, cut)) for y in (apart, there))
        more = np.zeros((len(movers), n_blocks + 1))
        np.cumsum(after - before, axis=1, out=more[:, 1:])
        sums = before.sum(axis=1, keepdims=True) - more[:, :-1]
        sums += np.take_along_axis(more, np.minimum(stop, n_blocks), axis=1)
        total = np.exp(-p * now).sum()
        gain = np.log(total / np.maximum(sums, limits.exact_share * total)) / p
        gains += np.where(sums < math.exp(cut) / 2, gain, -np.inf) / len(limits.sharpness)
    return gains
