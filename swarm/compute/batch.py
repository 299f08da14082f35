"""What runs next: from the work that is ready to one batch, and how much prefill a batch may carry.

Both are pure. The compute thread (`swarm.server.executor`) asks them before every iteration.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

DECODE_TOKENS_MAX = 512  # of one batch: more would not make it quicker by the token
SINGLE_ROWS_MAX = 32  # a position of more rows is planned as prefill is: others would wait for all of them
PREFILL_TOKENS_MIN = 1  # so that it goes on whatever decode costs; the weights are read for decode anyway
PREFILL_TOKENS_MAX = 2048
PIECE_TOKENS_MIN = 16  # where a budget is shared: every piece costs a part of its own, however small it is
LENT_MAX = 512  # tokens
PREFILL_TOKENS_UNKNOWN = 512  # before anything is known of the model's speed
STRETCH = 0.25  # what prefill may add to an iteration while others decode, as a share of it
UNNOTICED_S = 0.018  # or up to this, which nobody notices: a quarter of a quick step pays for hardly a piece
ALONE_S = 0.2  # an iteration with nothing but prefill; whoever comes to decode waits for its end
# Prefill is told apart by size in steps of a third to a half.
_SIZES: list[int] = [1, *(n for power in range(1, 11) for n in (2**power, 3 * 2 ** (power - 1))), PREFILL_TOKENS_MAX]
FORGOTTEN_S = 1.0  # who is away for longer is not waited for
SMOOTHING = 0.2  # weight of the newest measurement
OUTLIER = 1.5  # what takes longer than so many times what was thought is held to be a hiccup
BARE_EVERY = 16  # iterations with decode steps
AGAIN_FIRST, AGAIN_LAST = 8, 512  # iterations until what took too long is tried again, at first and later
ABSENT_REMEMBERED = 4096  # sessions
AWAY_SMOOTHING = 0.5  # of how long a session is away: prefill that begins too early makes it wait for all of it
LINGER_MAX_S = 0.010  # that a single step waits for company
LINGER_SHARE = 0.4  # of the last iteration, at most
YIELD_MAX_S, YIELD_SHARE = 0.050, 1.0  # the same of prefill: whoever decodes would wait for the whole iteration
YIELD_MIN_S = 0.005  # however short the last one was


@dataclass(frozen=True, slots=True)
class Ready:
    """The first unfinished work of one session, as the planner sees it.

    peer: who owns it. group: work of different groups (parts of the span) cannot run together. tokens: positions that
    are left, of each of `rows` rows. packs: whether it can run with others at all. cuts: whether it can run in pieces.
    """

    peer: str
    group: object
    rows: int
    tokens: int
    packs: bool = True
    cuts: bool = True

    @property
    def decodes(self) -> bool:
        """Whether it is a single position of few rows, which somebody waits for."""
        return self.tokens == 1 and self.rows <= SINGLE_ROWS_MAX


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `tokens` positions of the ready work number `index`."""

    index: int
    tokens: int


def form_batch(ready: Sequence[Ready], prefill_tokens: int) -> tuple[Slice, ...]:
    """Choose what runs in the next iteration: never empty if anything is ready.

    ready: in the order in which it runs if there is no reason for another; a session is in it once.
    prefill_tokens: the most that is spent on prefill. Unless it is 0, one position of all rows of the first goes even
    if that is more; the caller has it paid back (`Loan`).

    Decode steps come first, of every peer in turn. Prefill fills up the budget; peers share it evenly, whatever
    number of sessions they have.
    """
    if not ready:
        return ()
    first = ready[0]
    if len(ready) == 1 or not first.packs:
        return (Slice(0, _piece(first, prefill_tokens)),)
    together = [i for i, work in enumerate(ready) if work.packs and work.group == first.group]
    chosen: list[Slice] = []
    room = DECODE_TOKENS_MAX
    for index in _in_turn(ready, [i for i in together if ready[i].decodes]):
        if room < ready[index].rows and chosen:
            break
        chosen.append(Slice(index, 1))
        room -= ready[index].rows
    prefills = _in_turn(ready, [i for i in together if not ready[i].decodes])
    share = max(PIECE_TOKENS_MIN, prefill_tokens // max(1, len({ready[i].peer for i in prefills})))
    left = prefill_tokens
    n_decodes = len(chosen)
    for index in prefills:
        tokens = _piece(ready[index], min(share, left))
        lends = len(chosen) == n_decodes and (prefill_tokens > 0 or not chosen)
        if tokens * ready[index].rows > left and not lends:
            continue
        chosen.append(Slice(index, tokens))
        left -= tokens * ready[index].rows
    for at in range(n_decodes, len(chosen)):  # what others could not use of their shares
        piece, work = chosen[at], ready[chosen[at].index]
        more = min(work.tokens - piece.tokens, max(0, left) // work.rows)
        chosen[at] = Slice(piece.index, piece.tokens + more)
        left -= more * work.rows
    return tuple(chosen)


def _piece(work: Ready, tokens: int) -> int:
    """Positions that a piece of about so many tokens has."""
    return min(work.tokens, max(1, tokens // work.rows)) if work.cuts else work.tokens


def _in_turn(ready: Sequence[Ready], indices: Sequence[int]) -> list[int]:
    """Put the first of every peer before the second of any; within that, as they come."""
    seen: dict[str, int] = defaultdict(int)
    ranked = []
    for index in indices:
        ranked.append((seen[ready[index].peer], index))
        seen[ready[index].peer] += 1
    return [index for _, index in sorted(ranked)]


class Pace:
    """Learns how long iterations take, and from it how much prefill they may carry.

    What prefill adds depends on what it runs beside: a few rows more cost nothing next to many, and much where they
    make the kernels others. So it is learned by how many decode steps there are, in powers of two.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # an iteration without prefill, by the number of steps
        self._until_bare: dict[int, int] = {}  # iterations before the next without prefill, by the number of steps
        self._prefill: defaultdict[int, _Costs] = defaultdict(_Costs)  # what it adds, by the number of steps

    def observe(self, decodes: int, prefill_tokens: int, took_s: float) -> None:
        """Learn from an iteration of so many decode steps (their rows) and prefilled tokens."""
        steps = decodes.bit_length()
        if prefill_tokens == 0:
            self._decode_s[steps] = _learned(self._decode_s.get(steps), took_s)
            return
        self._prefill[steps].observe(prefill_tokens, max(took_s - self._decode_s.get(steps, 0.0), took_s / 10))

    def prefill_tokens(self, decodes: int, *, decoding: bool) -> int:
        """How many tokens of prefill the next iteration may carry, beside so many decode steps.

        decoding: whether anybody decodes, in this iteration or as soon as it is over.

        While anybody does, prefill may make an iteration longer by STRETCH, or up to UNNOTICED_S. One iteration in
        BARE_EVERY carries none: it shows what decode takes today. What is not known yet of prefill beside so many steps
        is taken to be as it is alone.
        """
        if not decoding:
            return self._prefill[0].largest(ALONE_S) or PREFILL_TOKENS_UNKNOWN
        if decodes == 0:  # who decodes waits for all of it
            decode_s = self._decode_s.get(1, 0.0)
            beside_one = self._prefill[1].largest(_stretch_s(decode_s))
            return beside_one or self._prefill[0].largest(decode_s + _stretch_s(decode_s)) or PREFILL_TOKENS_MIN
        steps = decodes.bit_length()
        until_bare = self._until_bare.get(steps, 0)
        self._until_bare[steps] = (until_bare or BARE_EVERY) - 1
        if until_bare == 0:
            return 0
        stretch_s = _stretch_s(self._decode_s.get(steps, 0.0))
        return self._prefill[steps].largest(stretch_s) or self._prefill[0].largest(stretch_s) or PREFILL_TOKENS_MIN


class Loan:
    """Prefill that had to run in one piece and was more than its iteration's budget: later iterations pay for it.

    So work of many rows goes on beside others' steps, and takes no larger share of the time than work of few.
    """

    def __init__(self) -> None:
        self._tokens = 0

    def budget(self, tokens: int, *, decoding: bool) -> int:
        """Return what is left of a budget when the loan has been paid from it. While nobody decodes, nobody minds."""
        if not decoding:
            self._tokens = 0
        paid = min(self._tokens, tokens)
        self._tokens -= paid
        return tokens - paid

    def lend(self, tokens: int, budget: int) -> None:
        """Note what ran on a budget."""
        self._tokens = min(LENT_MAX, self._tokens + max(0, tokens - budget))


def _stretch_s(decode_s: float) -> float:
    return max(UNNOTICED_S - decode_s, STRETCH * decode_s)


class _Costs:
    """How long prefill takes, by size, where nothing is known but that more takes longer.

    Machines have hiccups: the first pass of a fresh process, page faults, others who use them. So what took too long is
    tried again, but ever more rarely: whoever decodes notices each time.
    """

    def __init__(self) -> None:
        self._s: dict[int, float] = {}  # by size, seconds
        self._n: dict[int, int] = {}  # by size, how many that is the mean of
        self._seen = 0
        self._too_long: dict[int, tuple[int, int]] = {}  # sizes: tried again when so many are seen, and so many later

    def observe(self, tokens: int, took_s: float) -> None:
        size = _SIZES[bisect_right(_SIZES, tokens) - 1]
        self._n[size] = self._n.get(size, 0) + 1
        self._s[size] = _learned(self._s.get(size), took_s, max(SMOOTHING, 1 / self._n[size]))
        self._seen += 1

    def largest(self, limit_s: float) -> int:
        """Return the most tokens that take no longer, or a few more to see what they take; 0 if nothing is known.

        Where a single one takes more than half of the limit, others may take that half longer than one.
        """
        if not self._s:
            return 0
        takes = self._takes()
        limit_s = max(limit_s, takes[1] + limit_s / 2)
        fits = 1
        for size, takes_s in takes.items():
            if takes_s > limit_s:
                return size if self._again(size) else fits
            self._too_long.pop(size, None)
            fits = size
        return fits

    def _takes(self) -> dict[int, float]:
        """Seconds by size, up to the next one after those seen: no more than larger ones took; linear in between."""
        sizes = sorted(self._s)
        seconds = np.minimum.accumulate([self._s[size] for size in reversed(sizes)])[::-1]
        known = _SIZES[: _SIZES.index(sizes[-1]) + 2]
        return dict(zip(known, np.interp(known, [0, *sizes], [0.0, *seconds]).tolist(), strict=True))

    def _again(self, size: int) -> bool:
        """Whether to try what was too long."""
        at, pause = self._too_long.get(size, (self._seen + AGAIN_FIRST, AGAIN_FIRST))
        due = self._seen >= at
        if due:
            pause = min(AGAIN_LAST, 4 * pause)
            at = self._seen + pause
            self._n[size] = 1  # it was long ago
        self._too_long[size] = at, pause
        return due


def _learned(old_s: float | None, new_s: float, weight: float = SMOOTHING) -> float:
    """What is thought after another measurement. One that is half of what was thought shows a hiccup before it."""
    if old_s is None or new_s < old_s / 2:
        return new_s
    return old_s + weight * (min(new_s, OUTLIER * old_s) - old_s)


class Company:
    """Learns who comes back soon: waiting a moment for them costs less than running twice.

    Steps that ran together were delivered together, so their sessions' next ones come together too, as long as they
    travel the same way; and a client next door is back before the next iteration has begun. Without this, sessions fall
    into groups that take turns, each reading all weights for itself.
    """

    def __init__(self) -> None:
        self._delivered_s: dict[object, float] = {}  # absent sessions: since when
        self._away_s: dict[object, float] = {}  # how long they usually are
        self._batch_of: dict[object, int] = {}
        self._batch = 0
        self._iteration_s = 0.0

    def delivered(self, sessions: Collection[object], now: float, took_s: float) -> None:
        """Note that one step each of these sessions went out together, after an iteration of `took_s`."""
        self._batch += 1
        self._iteration_s = took_s
        gone = [session for session, went in self._delivered_s.items() if now - went > FORGOTTEN_S]
        for session in gone:
            for known in (self._delivered_s, self._away_s, self._batch_of):
                known.pop(session, None)
        if len(self._batch_of) > ABSENT_REMEMBERED:  # who came back, and then ended
            self._away_s = {session: away_s for session, away_s in self._away_s.items() if session in self._delivered_s}
            self._batch_of = {session: self._batch_of[session] for session in self._delivered_s}
        for session in sessions:
            self._delivered_s[session] = now
            self._batch_of[session] = self._batch

    def arrived(self, session: object, now: float) -> None:
        """Note that a session is back."""
        since = self._delivered_s.pop(session, None)
        if since is None:
            return
        away_s = min(now - since, YIELD_MAX_S)  # once is no rule, and for longer nobody waits
        usual_s = self._away_s.get(session, away_s)
        if away_s < usual_s / 2:
            usual_s = away_s
        self._away_s[session] = usual_s + AWAY_SMOOTHING * (away_s - usual_s)

    def wait_s(self, ready: Collection[object], since: float, now: float, *, decoding: bool = True) -> float:
        """How long to wait before the next iteration, while these sessions are ready, the first since `since`.

        decoding: whether any of them waits for a single step.
        """
        limit_s, late = min(LINGER_MAX_S, LINGER_SHARE * self._iteration_s), 1.5
        if not decoding:
            limit_s, late = min(YIELD_MAX_S, max(YIELD_MIN_S, YIELD_SHARE * self._iteration_s)), 4.0
        if now >= since + limit_s or len(self._delivered_s) == 0:
            return 0.0
        batches = {self._batch_of.get(session) for session in ready}
        until = now
        for session, went in self._delivered_s.items():
            away_s = self._away_s.get(session, limit_s)
            soon, latest = went + 1.5 * away_s, min(went + late * away_s, since + limit_s)
            if soon <= since + limit_s and now < latest:
                until = max(until, latest)
            elif self._batch_of.get(session) in batches:
                until = since + limit_s
        return max(0.0, until - now)
