"""How fast tokens come with and without guesses, and so how far to guess ahead. Pure: times are given."""

from swarm.client.speculation.limits import AheadLimits, PaceLimits


class Pace:
    """The times of one session. Means that follow, in seconds."""

    def __init__(self, limits: PaceLimits | None = None) -> None:
        self.trip_s = 0.0
        self._limits = limits or PaceLimits()
        self._token_s = 0.002  # the caller's part of a token
        self._draft_s = 0.0
        self._plain_s = 0.0  # from token to token, without guesses
        self._asked = 0.0
        self._returned = 0.0
        self._spent: list[float] = []  # from token to token, with guesses
        self._pause = 0  # tokens that are not guessed, because guesses lost
        self._next_pause = self._limits.pause_min

    @property
    def depth(self) -> int:
        """Tokens that fill a trip."""
        return 1 + int(self.trip_s / max(self._token_s, self._draft_s))

    def gathered(self, step_s: float) -> int:
        """Return how many guesses a slow draft is to gather for a step. step_s: that the slowest hop takes for one."""
        if not self._draft_s:
            return 1
        return 1 + int(max(self._limits.step_s_min, step_s / self._limits.hop_share) / self._draft_s)

    @property
    def is_quick(self) -> bool:
        """Whether a trip takes so little that guesses save nothing, or hardly longer than drafting one."""
        return self.trip_s < max(self._limits.trip_s_min, self._limits.drafts_min * self._draft_s)

    @property
    def loses(self) -> bool:
        """Whether the latest guesses cost more than they saved: they wait for a while."""
        return self._pause > 0

    def drafted(self, took_s: float) -> None:
        """A slow draft has made one guess."""
        self._draft_s = _follow(self._draft_s, min(took_s, 4 * self._draft_s or took_s), 0.1)

    def asked(self, now: float, *, is_there: bool = False) -> None:
        """The caller has asked for an output. is_there: it need not wait."""
        if is_there and self._returned:
            self._token_s = _follow(self._token_s, now - self._returned, 0.1)
        self._asked = now

    def returned(self, now: float, *, is_guessed: bool, is_trip: bool) -> None:
        """The caller has its output. is_guessed: guesses were in flight. is_trip: its token was sent when asked for."""
        waited = now - self._asked
        if is_trip:
            self.trip_s = _follow(self.trip_s, waited, 0.2)
        if self._returned:
            # The user's own time, such as reading the text, is nobody's cost.
            took = waited + min(self._asked - self._returned, 2 * self._token_s)
            if is_guessed:
                self._guessed(took)
            else:
                self._plain_s = _follow(self._plain_s, took, 0.2)
                self._pause = max(0, self._pause - 1)
                self._draft_s *= self._limits.forgets  # so that a draft that was slow for a while is tried again
        self._returned = now

    def _guessed(self, took: float) -> None:
        self._spent.append(took)
        if len(self._spent) < self._limits.tokens or not self._plain_s:
            return
        mean = sum(self._spent) / len(self._spent)
        self._spent.clear()
        if mean > self._limits.lost * self._plain_s:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, self._limits.pause_max)
        else:
            self._next_pause = self._limits.pause_min


def pays(pace: Pace, load: float, limits: AheadLimits) -> bool:
    """Whether guesses are likely to save time: the route is slow, they did not lose lately, and its hops have room.

    load: steps of others that the busiest hop announced.
    """
    return not pace.is_quick and not pace.loses and load <= limits.load_max


def cut_off(load: float, limits: AheadLimits) -> float:
    """Return how likely a guess must be to become the text. load: as for `pays`."""
    return limits.cut_off if load < limits.load_busy else limits.cut_off_busy


def _follow(mean: float, value: float, share: float) -> float:
    return value if not mean else mean + share * (value - mean)
