"""Which blocks a server with an automatic span should hold. Pure: announcements in, a span out.

**What is served.** A server that holds L blocks and decodes T tokens/s through all of them gives T tokens/s to *each*
of its blocks; a shorter span would be faster (T is about its power, in block-tokens/s, over L), the same span
elsewhere is as fast. So block b is served x_b = sum of T over the servers whose span contains b, and the swarm's
bottleneck is min x_b: no distribution of sessions over routes gets more tokens/s through the model.

**What is best.** min x_b alone says nothing while several blocks are equally bad, so spans are compared by the *level*,
a mean that the worst blocks rule:  level(x) = (sum_b x_b^-p / n)^(-1/p) with p = 32.  It is min x_b where all
blocks are served alike, else at most n^(1/p) times that, and rises whenever one of the worst is served better.
(Petals compares sorted lists of throughputs, which has no scale on which a gain could be too small to be worth it.)

**Who moves.** Every server computes the same list of candidates from the same public state: for each automatic server
its best other span, if that raises the level by more than MOVE_GAIN of the server's own share of the swarm's power
(one that brings 1 % of the power moves for 0.05 % more). The list is in order of gain, then of key, and a server moves
when it is first. One that is r-th waits for r looks in a row: so a first one that never moves, because it lies or
hangs, delays the others and does not stop them. Looks are at random times.

**It ends.** Take one move after the other, each from a true view. In a state whose worst block has x0, every
term (x_b/x0)^-p is at most 1, their sum at most n, and terms are cut off at e^18, far above any n. So a move that is
accepted makes no block that bad, and the level, a function of the state alone, strictly rises (blocks below
a ten-thousandth of their fair share count as that). There are finitely many states, hence finitely many moves. Views
that are a minute old can make two servers move for the same gap; one of them then has a reason to move on, and the
simulation in `benchmarks/placement.py` shows that this ends too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from swarm.blocks import Blocks
from swarm.dht.records import Announcement

SHARPNESS = 32.0  # p: 16 ends a few per cent lower, 64 misses improvements of all but the very worst block
MOVE_GAIN = 0.05  # of the mover's share of the swarm's power: what a move must add to the level
FLOOR_SHARE = 1e-4  # of a block's fair share: what counts for a block that nobody serves
POWER_SPREAD_MAX = 100.0  # times the median: a claim of more power counts as that much
_CUT = 18.0  # e^18 is far above BLOCKS_MAX, and sums with it are exact enough to compare terms of 1
_EXACT = 1e-7  # of a sum: what rounding may leave of it
_SLICE = 1 << 20  # numbers in one matrix: many servers are looked at in slices

Rates = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Holder:
    """A server's span. tps: tokens/s through the whole span, so for each block. automatic: it may move."""

    key: str  # the public key, hex
    blocks: Blocks
    tps: float
    automatic: bool = False

    @property
    def power(self) -> float:
        """Block-tokens per second: what stays the same wherever, and however long, its span is."""
        return self.tps * len(self.blocks)


def holders_of(announcements: Iterable[Announcement], numeric_class: str | None = None) -> tuple[Holder, ...]:
    """Return who holds or will soon hold blocks: servers that are online or joining, of one numeric class.

    Who has not measured yet counts with the median server's power, and nobody with more than POWER_SPREAD_MAX times it.
    """
    there = [a for a in announcements if a.state in {"online", "joining"} and numeric_class in {None, a.numeric_class}]
    measured = [a.decode_tps * len(a.span) for a in there if a.decode_tps is not None]
    usual = median(measured) if measured else 1.0
    return tuple(
        Holder(a.public_key, a.span, _power(a, usual) / len(a.span), a.automatic)
        for a in sorted(there, key=lambda a: (a.public_key, a.span))
    )


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


def choose_span(n_blocks: int, length: int, holders: Sequence[Holder], key: str) -> Blocks:
    """Return where a server that is about to start should put its span: where the level rises most.

    Ties fall to the blocks with fewest holders, then to the first ones. What `key` itself holds does not count.
    """
    length = min(length, n_blocks)
    others = [holder for holder in holders if holder.key != key]
    usual = median([holder.power for holder in others]) if others else 1.0
    me = Holder(key, Blocks(0, length), usual / length, True)
    costs, _ = _costs(n_blocks, [*others, me], [len(others)])
    count = np.concatenate(([0.0], np.cumsum(served(n_blocks, [replace(h, tps=1.0) for h in others]))))
    best = float(costs.min())
    ties = [s for s in range(n_blocks - length + 1) if costs[0, s] <= best * (1 + _EXACT)]
    start = min(ties, key=lambda s: (count[s + length] - count[s], s))
    return Blocks(start, start + length)


def should_move(n_blocks: int, holders: Sequence[Holder], key: str, patience: int) -> tuple[Blocks | None, int]:
    """Return the span to which this server should move now, or None; and the patience for its next look.

    patience: at how many looks in a row before this one it was a candidate whose turn it was not. Starts with 0.
    """
    for rank, (candidate, blocks) in enumerate(candidates(n_blocks, holders)):
        if candidate == key:
            return (blocks, 0) if rank <= patience else (None, patience + 1)
    return None, 0


def candidates(n_blocks: int, holders: Sequence[Holder]) -> tuple[tuple[str, Blocks], ...]:
    """Return who would gain the swarm enough by moving, and whereto; the best first."""
    movable = [i for i, holder in enumerate(holders) if holder.automatic]
    total = sum(holder.power for holder in holders)
    found = []
    for at in range(0, len(movable), rows := max(1, _SLICE // n_blocks)):
        part = movable[at : at + rows]
        costs, now = _costs(n_blocks, holders, part)
        starts = costs.argmin(axis=1)
        for row, (i, start) in enumerate(zip(part, starts.tolist(), strict=True)):
            gain = math.log(now / costs[row, start]) / SHARPNESS
            if gain > math.log1p(MOVE_GAIN * holders[i].power / total):
                found.append((-gain, holders[i].key, Blocks(start, start + len(holders[i].blocks))))
    return tuple((key, blocks) for _, key, blocks in sorted(found))


def _costs(n_blocks: int, holders: Sequence[Holder], movers: Sequence[int]) -> tuple[Rates, float]:
    """Return what the sum of (x_b / x0)^-p becomes if a mover goes to a start, [movers, starts], and what it is now.

    x0: what the worst block is served now. Starts from which the span would not fit have infinite cost.
    """
    x = served(n_blocks, holders)
    x0 = max(float(x.min()), FLOOR_SHARE * sum(holder.power for holder in holders) / n_blocks)
    start, length, tps = (
        np.array([value(holders[i]) for i in movers])[:, None]
        for value in (lambda h: h.blocks.start, lambda h: len(h.blocks), lambda h: h.tps)
    )
    at = np.arange(n_blocks)
    without = x - tps * ((at >= start) & (at < start + length))
    before = _terms(without, x0)
    more = np.zeros((len(movers), n_blocks + 1))
    np.cumsum(_terms(without + tps, x0) - before, axis=1, out=more[:, 1:])
    stop = at + length
    costs = before.sum(axis=1, keepdims=True) + np.take_along_axis(more, np.minimum(stop, n_blocks), axis=1)
    now = float(_terms(x, x0).sum())
    costs = np.maximum(costs - more[:, :-1], _EXACT * now)
    return np.where(stop > n_blocks, np.inf, costs), now


def _terms(x: Rates, x0: float) -> Rates:
    return np.asarray(np.exp(-SHARPNESS * np.log(np.maximum(x, x0 * math.exp(-_CUT / SHARPNESS)) / x0)))


def _power(announcement: Announcement, usual: float) -> float:
    if announcement.decode_tps is None:
        return usual
    return min(announcement.decode_tps * len(announcement.span), POWER_SPREAD_MAX * usual)
