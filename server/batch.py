"""What runs next: from the work that is ready to one batch, and how much prefill a batch may carry.

Both are pure. The compute thread (`swarm.server.executor`) asks them before every iteration.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

DECODE_TOKENS_MAX = 512  # of one batch: more would not make it quicker by the token
PREFILL_TOKENS_MIN = 1  # so that it goes on whatever decode costs; the weights are read for decode anyway
PREFILL_TOKENS_MAX = 2048
PIECE_TOKENS_MIN = 16  # where a budget is shared: every piece costs a part of its own, however small it is
PREFILL_TOKENS_UNKNOWN = 512  # before anything is known of the model's speed
STRETCH = 0.5  # what prefill may add to an iteration while others decode, as a share of it
STRETCH_MIN_S = 0.002  # which nobody notices
ALONE_S = 0.2  # an iteration with nothing but prefill; whoever comes to decode waits for its end
FORGOTTEN_S = 1.0  # who is away for longer is not waited for
SMOOTHING = 0.2  # weight of the newest measurement
REMEMBERED = 0.97  # the weight of each iteration with prefill, when the next one comes
OUTLIER = 2.0  # what takes so much longer than was thought is held to be a hiccup; so much shorter: it had been one
INERTIA = 0.01  # what is thought already weighs as much as sizes that vary by a tenth
PIECE_SHARE_MAX = 0.85  # of what an average piece takes, which is not its tokens'
ABSENT_REMEMBERED = 4096  # sessions
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
        """Whether it is a single position, which somebody waits for."""
        return self.tokens == 1


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `tokens` positions of the ready work number `index`."""

    index: int
    tokens: int


def form_batch(ready: Sequence[Ready], prefill_tokens: int) -> tuple[Slice, ...]:
    """Choose what runs in the next iteration: never empty if anything is ready.

    ready: in the order in which it runs if there is no reason for another; a session is in it once. Work that was
    cut comes again at the end, so that all go forward.
    prefill_tokens: the most that is spent on prefill, at least for one piece.

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
    for index in prefills:
        tokens = _piece(ready[index], min(share, left))
        if tokens * ready[index].rows > left and chosen:
            continue
        chosen.append(Slice(index, tokens))
        left -= tokens * ready[index].rows
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

    An iteration with n tokens of prefill takes so much longer: piece_s + n * token_s. What any piece costs must be told
    from what its tokens cost: or else, where the former is more than prefill may add, pieces would become ever smaller
    and dearer. Both are a weighted least squares fit, each observation weighted by 1 / n^2, as noise is relative.

    But some is not: the first pass of a fresh process, page faults, a machine that others use, too. One such hiccup,
    taken for the price of tokens, makes the next pieces a token long, of which the fit learns least; a prompt then
    takes ten times as long. So none counts more than OUTLIER times what was expected, and one that takes less
    than that part of it halves the weight of all before it.
    """

    def __init__(self) -> None:
        self._decode_s: float | None = None  # an iteration without prefill
        self._piece_s = 0.0
        self._token_s: float | None = None
        self._sums = [0.0] * 5  # of 1, x, y, x*x, x*y; x = 1 / n, y = seconds / n
        self._is_odd = False  # sizes alternate a little, or else they would tell nothing of their difference

    def observe(self, decodes: int, prefill_tokens: int, took_s: float) -> None:
        """Learn from an iteration of so many decode steps and prefilled tokens."""
        if prefill_tokens == 0:
            most_s = took_s if self._decode_s is None else OUTLIER * self._decode_s
            self._decode_s = _smooth(self._decode_s, min(took_s, most_s))
            return
        # Weights are read once, whatever runs; how long that takes without anybody who decodes is not known so well.
        beside_s = self._decode_s or 0.0
        more_s = max(took_s - beside_s, took_s / 10 if decodes else took_s / 2)
        if self._token_s is not None:
            expected_s = self._piece_s + prefill_tokens * self._token_s
            if more_s < expected_s / OUTLIER:
                self._sums = [each / 2 for each in self._sums]
            more_s = min(more_s, OUTLIER * expected_s)
        x, y = 1 / prefill_tokens, more_s / prefill_tokens
        self._sums = [REMEMBERED * a + b for a, b in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)]
        self._is_odd = not self._is_odd
        self._fit()

    def _fit(self) -> None:
        n, x, y, xx, xy = self._sums
        x, y, xx, xy = x / n, y / n, xx / n, xy / n
        inertia = INERTIA * x * x  # where all pieces are of about one size, they tell nothing of the difference
        piece_s = (xy - x * y + inertia * self._piece_s) / (xx - x * x + inertia)
        self._piece_s = min(max(0.0, piece_s), PIECE_SHARE_MAX * y / x)  # however much the measurements vary
        self._token_s = y - self._piece_s * x

    def prefill_tokens(self, *, decoding: bool) -> int:
        """How many tokens of prefill the next iteration may carry. decoding: whether anybody waits for single steps.

        While anybody decodes, pieces and tokens together may take STRETCH longer; but the tokens alone get half of
        that, whatever a piece costs.
        """
        if self._token_s is None:
            return 4 * PREFILL_TOKENS_MIN if decoding else PREFILL_TOKENS_UNKNOWN
        limit_s, least = ALONE_S, PREFILL_TOKENS_MIN
        if decoding and self._decode_s is not None:
            stretch_s = max(STRETCH_MIN_S, STRETCH * self._decode_s)
            limit_s = max(stretch_s - self._piece_s, stretch_s / 2) * (1.2 if self._is_odd else 0.8)
            least *= 2 if self._is_odd else 1
        return max(least, min(PREFILL_TOKENS_MAX, int(limit_s / self._token_s)))


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)


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
        if since is not None:
            self._away_s[session] = _smooth(self._away_s.get(session), now - since)

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
