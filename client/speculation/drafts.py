"""Where guesses of the next tokens come from."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class Guess:
    """One guessed token. likely: how sure the draft is that it is right, from 0 to 1, where it can tell.

    kind: guesses of one kind are surer than they say, or less sure, by the same log-odds.
    """

    token: int
    kind: int
    likely: float | None = None


class Draft(Protocol):
    """Guesses the tokens behind a text."""

    def propose(self, text: Sequence[int], guesses: Sequence[int], count: int) -> list[Guess]:
        """Return at most `count` guesses of the tokens behind `text` and the guesses behind it; none is fine.

        text: grows from call to call; another text needs another draft.
        """
        ...


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """How the text itself is searched."""

    match_min: int = limit(3, "tokens", "shorter matches are right by chance")
    match_max: int = limit(12, "tokens", "longer matches say no more")
    places_max: int = limit(8, "places", "so many of the latest matches are compared")


class Lookup:
    """Prompt look-up: what stood behind the last tokens where they stood before (Saxena, 2023, and LLMA, 2304.04487).

    The longest match counts, and of equal ones the latest. It costs microseconds, and says nothing on new text.
    """

    def __init__(self, limits: LookupLimits | None = None) -> None:
        self._limits = limits or LookupLimits()
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> where the next token is
        self._indexed: list[int] = []

    def propose(self, text: Sequence[int], guesses: Sequence[int], count: int) -> list[Guess]:
        """As `Draft.propose`."""
        self._index(text)
        path = [*text[-self._limits.match_max :], *guesses]
        best, place = 0, 0
        for candidate in reversed(self._places.get(tuple(path[-self._limits.match_min :]), ())):
            if candidate < len(text) + len(guesses) and (length := self._match(path, candidate)) > best:
                best, place = length, candidate
        if not best:
            return []
        copied = self._from(place, guesses, count)
        return [Guess(token, best) for token in copied]

    def _from(self, place: int, guesses: Sequence[int], count: int) -> list[int]:
        """Copy from a place on; behind the end of the text it is the copy itself that is copied."""
        known, tokens = len(self._indexed), list(guesses)
        for index in range(place, place + count):
            tokens.append(self._indexed[index] if index < known else tokens[index - known])
        return tokens[len(guesses) :]

    def _match(self, path: Sequence[int], place: int) -> int:
        """Return how many tokens before `place` are the last ones of the path."""
        most = min(self._limits.match_max, len(path), place)
        return next((n for n in range(most) if self._indexed[place - 1 - n] != path[-1 - n]), most)

    def _index(self, text: Sequence[int]) -> None:
        size = self._limits.match_min
        for token in text[len(self._indexed) :]:
            self._indexed.append(token)
            if len(self._indexed) >= size:
                places = self._places[tuple(self._indexed[-size:])]
                places.append(len(self._indexed))
                del places[: -self._limits.places_max]
