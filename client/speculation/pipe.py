"""The tokens of one session that are in flight: those that are known, and guesses behind them. Pure.

    text       known tokens, each fed once: the caller has, or is about to get, the outputs of all of them
    guesses    tokens behind the text that are in flight, in order
    frames     steps in flight that cover the end of the text and all guesses; each was sent with the tokens before it

    feed(token)     the caller's next token. If it is the first guess, its output is on the way already. If not, the
                    guesses were wrong from there on: they, and the frames that hold them, are forgotten, and the next
                    frame takes their place on the servers
    frame(guesses)  the next step: the last tokens of the text if they are not in flight, and guesses behind all others
    plain()         the last tokens of the text travel as a step that the caller waits for: no frame holds them
    covering(at)    the frame with the output of a position

So a step's answer counts if the tokens that it continues became the text. Nobody needs to be told of wrong guesses: the
step behind them says how many positions stay.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from swarm.client.speculation.calibration import Calibration
from swarm.client.speculation.drafts import Draft, Guess
from swarm.client.speculation.limits import AheadLimits

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Frame(Generic[Answer]):
    """One step. start: position of its first token. answer: the caller's, once it was sent."""

    start: int
    tokens: tuple[int, ...]
    answer: Answer | None = None

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)


@dataclass(slots=True)
class Counts:
    """What became of guesses. tokens: fed by the caller. computed: by the servers. trips: tokens that no guess was.

    off: why nothing can be guessed, where that is so.
    """

    tokens: int = 0
    computed: int = 0
    trips: int = 0
    right: int = 0
    wrong: int = 0
    off: str = ""

    @property
    def tokens_a_trip(self) -> float:
        """How many tokens of the text came for each trip around the route."""
        return self.tokens / max(1, self.trips)


class Pipe(Generic[Answer]):
    """One session's tokens in flight."""

    def __init__(self, limits: AheadLimits, calibration: Calibration, positions_max: int | None = None) -> None:
        """positions_max: of text and guesses together; None for no bound."""
        self.text: list[int] = []
        self.counts = Counts()
        self.depth = limits.tokens_max  # tokens that may be in flight; the caller may say fewer
        self.cut_off = limits.cut_off  # a guess that is sent is likelier to become the text; the caller may say more
        self.gathered = limits.frame_tokens  # by a slow draft for a frame, at most; the caller may say fewer
        self.calibration = calibration  # of the present draft
        self._limits = limits
        self._positions_max = positions_max
        self._sent = 0  # the position behind the last token that was sent and counts
        self._guesses: deque[tuple[Guess, float]] = deque()  # each with how likely it is, if those before it are right
        self._frames: deque[Frame[Answer]] = deque()

    @property
    def guesses(self) -> list[int]:
        """The tokens in flight behind the text."""
        return [guess.token for guess, _ in self._guesses]

    @property
    def room(self) -> int:
        """How many guesses the next frame may hold; 0 while it is better to wait."""
        return self._room_for(self._limits.frame_tokens_min)

    @property
    def slow_room(self) -> int:
        """The same of a slow draft's guesses, which wait for fewer others."""
        return self._room_for(min(self._limits.frame_tokens_min, self.fill))

    @property
    def fill(self) -> int:
        """How many of a slow draft's guesses make a frame: where few are in flight, each is likely to be needed."""
        return max(1, min(self.gathered, self._limits.frame_tokens, len(self._guesses)))

    def _room_for(self, least: int) -> int:
        room = min(self.depth - len(self._guesses), self._limits.frame_tokens)
        if len(self._frames) >= self._limits.frames_max or (room < least and self._guesses):
            return 0
        if self._positions_max is not None:
            room = min(room, self._positions_max - len(self.text) - len(self._guesses))
        return max(0, room)

    @property
    def unsent(self) -> int:
        """How many of the text's last tokens are not in flight."""
        return len(self.text) - min(self._sent, len(self.text))

    def restart(self, keep: int, tokens: Iterable[int] = ()) -> None:
        """Nothing is in flight that counts. The servers keep so many tokens of the text, and have these behind them."""
        del self.text[keep:]
        self.text.extend(tokens)
        self._sent = len(self.text)
        self._guesses.clear()
        self._frames.clear()

    def feed(self, token: int) -> bool:
        """Take the caller's next token. Returns whether it is in flight as a guess."""
        guess = self._guesses.popleft()[0] if self._guesses else None
        is_right = guess is not None and guess.token == token
        if guess is None:
            self.calibration.forget()
        else:
            self.calibration.saw(guess, is_right=is_right)
            self.counts.right += is_right
            self.counts.wrong += not is_right
        self.text.append(token)
        self.counts.tokens += 1
        if is_right:
            while self._frames[0].stop < len(self.text):
                self._frames.popleft()
        else:
            self.counts.trips += 1
            self._sent = min(self._sent, len(self.text) - 1)
            self._guesses.clear()
            self._frames.clear()
        return is_right

    def guessed(self, draft: Draft) -> list[tuple[Guess, float]]:
        """Return what a draft guesses for the next frame, as far as there is room and it is worth sending."""
        room = self.room
        return self.likely(draft.propose(self.text, self.guesses, room)) if room else []

    def likely(self, guesses: Sequence[Guess]) -> list[tuple[Guess, float]]:
        """Return those of these guesses that are worth sending: if the text gets there more often than `cut_off` says.

        Each with how likely it is if those before it are right: calibrated confidences, which are multiplied.
        """
        path = prod(likelihood for _, likelihood in self._guesses)
        chosen = []
        for guess in guesses:
            likelihood = self.calibration.likelihood(guess)
            path *= likelihood
            if path < self.cut_off:
                break
            chosen.append((guess, likelihood))
        return chosen

    def frame(self, guesses: Sequence[tuple[Guess, float]]) -> Frame[Answer]:
        """Return the next step, which is in flight from now on. guesses: some, or the last token is not in flight."""
        start = self._sent
        tokens = (*self.text[start:], *(guess.token for guess, _ in guesses))
        assert tokens
        frame: Frame[Answer] = Frame(start, tokens)
        self._guesses.extend(guesses)
        self._frames.append(frame)
        self._sent = frame.stop
        self.counts.computed += len(tokens)
        return frame

    def plain(self) -> None:
        """Take the last tokens of the text for sent: they travel as a step that the caller waits for."""
        self.counts.computed += self.unsent
        self._sent = len(self.text)

    def covering(self, position: int) -> Frame[Answer]:
        """Return the frame in flight that holds a position."""
        return next(frame for frame in self._frames if frame.start <= position < frame.stop)
