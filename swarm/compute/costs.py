"""The cost of iterations, learned from those that ran; and how much prefill the next one may carry.

Prefill costs more or less by the steps that it runs beside: a few tokens more cost nothing next to many, and much
where they change the kernels. So costs are learned apart by the tokens of the decode steps, in powers of two.
"""

from bisect import bisect_right
from collections import defaultdict

import numpy as np

from swarm.compute.limits import CostLimits

# Prefill is told apart by size in steps of a third to a half.
_SIZES = [1, *(n for power in range(1, 11) for n in (2**power, 3 * 2 ** (power - 1))), 2048]


class Costs:
    """Learns how long iterations take. One for each kind of task: spans of another number of blocks have their own."""

    def __init__(self, limits: CostLimits) -> None:
        self._limits = limits
        self._decode_s: dict[int, float] = {}  # an iteration without prefill, by the steps' tokens
        self._until_bare: dict[int, int] = {}  # iterations before the next without prefill, by the steps' tokens
        self._prefill: defaultdict[int, _BySize] = defaultdict(lambda: _BySize(limits))  # by the steps' tokens

    def observe(self, decodes: int, prefill_tokens: int, took_s: float) -> None:
        """Learn from an iteration of so many tokens of decode steps, and of prefill."""
        steps = decodes.bit_length()
        decode_s = self._decode_s.get(steps)
        if prefill_tokens == 0:
            self._decode_s[steps] = _learned(decode_s, took_s, self._limits.smoothing, self._limits.outlier)
        else:
            self._prefill[steps].observe(prefill_tokens, max(took_s - (decode_s or 0.0), took_s / 10))

    def prefill_tokens(self, beside: int, *, decoding: bool, stretch: float = 0.0) -> int:
        """Return how many tokens of prefill the next iteration may carry beside so many of decode steps.

        decoding: whether any session decodes, in this iteration or as soon as it is over. stretch: share of an
        iteration that prefill may add, where that is more than the limit's.

        While one does, prefill may make an iteration longer by `stretch`, or up to `unnoticed_s`. Where the cost of
        prefill beside so many tokens is unknown, it counts as its cost alone.
        """
        if not decoding:
            return self._prefill[0].largest(self._limits.alone_s) or self._limits.prefill_tokens_unknown
        if beside == 0:  # the session that decodes waits for all of it
            decode_s = self._decode_s.get(1, 0.0)
            stretch_s = self._stretch_s(decode_s, stretch)
            return self._prefill[1].largest(stretch_s) or self._prefill[0].largest(decode_s + stretch_s) or 1
        steps = beside.bit_length()
        until_bare = self._until_bare.get(steps, 0)
        self._until_bare[steps] = (until_bare or self._limits.bare_every) - 1
        if until_bare == 0:
            return 0
        stretch_s = self._stretch_s(self._decode_s.get(steps, 0.0), stretch)
        return self._prefill[steps].largest(stretch_s) or self._prefill[0].largest(stretch_s) or 1

    def _stretch_s(self, decode_s: float, stretch: float) -> float:
        limits = self._limits
        usual_s = max(limits.unnoticed_s - decode_s, limits.stretch * decode_s)
        return max(usual_s, min(stretch * max(decode_s, limits.unnoticed_s), limits.own_s - decode_s))


class _BySize:
    """How long prefill takes, by size. It assumes only that more tokens take longer.

    A size that took too long is tried again, ever more rarely: the first pass of a fresh process, page faults and other
    users of the machine make one measurement too long, and each try delays the sessions that decode.
    """

    def __init__(self, limits: CostLimits) -> None:
        self._limits = limits
        self._s: dict[int, float] = {}  # by size, seconds
        self._n: dict[int, int] = {}  # by size, how many that is the mean of
        self._seen = 0
        self._retries: dict[int, tuple[int, int]] = {}  # by size: tried again when so many are seen, and so many later
        self._table: dict[int, float] = {}  # seconds by size as they are now known; empty until asked for

    def observe(self, tokens: int, took_s: float) -> None:
        size = _SIZES[bisect_right(_SIZES, tokens) - 1]
        self._n[size] = self._n.get(size, 0) + 1
        weight = max(self._limits.smoothing, 1 / self._n[size])
        self._s[size] = _learned(self._s.get(size), took_s, weight, self._limits.outlier)
        self._seen += 1
        self._table = {}

    def largest(self, limit_s: float) -> int:
        """Return the most tokens that take no longer, or a few more to learn their cost; 0 if nothing is known.

        Where a single one takes more than half of the limit, others may take that half longer than one.
        """
        if not self._s:
            return 0
        self._table = self._table or self._takes()
        limit_s = max(limit_s, self._table[1] + limit_s / 2)
        fits = 1
        for size, takes_s in self._table.items():
            if takes_s > limit_s:
                return size if self._is_due(size) else fits
            self._retries.pop(size, None)
            fits = size
        return fits

    def _takes(self) -> dict[int, float]:
        """Seconds by size, up to the next one after those seen: no more than larger ones took; linear in between."""
        sizes = sorted(self._s)
        seconds = np.minimum.accumulate([self._s[size] for size in reversed(sizes)])[::-1]
        known = _SIZES[: _SIZES.index(sizes[-1]) + 2]
        return dict(zip(known, np.interp(known, [0, *sizes], [0.0, *seconds]).tolist(), strict=True))

    def _is_due(self, size: int) -> bool:
        """Whether to try a size that took too long."""
        first = self._limits.retry_first
        at, pause = self._retries.get(size, (self._seen + first, first))
        due = self._seen >= at
        if due:
            pause = min(self._limits.retry_last, 4 * pause)
            at = self._seen + pause
            self._n[size] = 1  # it was long ago
        self._retries[size] = at, pause
        return due


def _learned(old_s: float | None, new_s: float, weight: float, outlier: float) -> float:
    """Return the expectation after a measurement. One of less than half the expected shows a hiccup before it."""
    if old_s is None or new_s < old_s / 2:
        return new_s
    return old_s + weight * (min(new_s, outlier * old_s) - old_s)
