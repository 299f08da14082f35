"""Texts for sessions that audit: passages of this Python's own library, which no server can foresee.

A session must look like a user's, from the first block's input on. Embeddings of tokens that are drawn at random would
not; a fixed prompt would be known.
"""

import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class PassageLimits:
    """How much of the library is read for one text."""

    chars_each: int = limit(16, "characters", "read for one token; a passage of fewer tokens is drawn again")
    tries_max: int = limit(8, "passages", "drawn for one text; then its tokens are drawn one by one")
    files_max: int = limit(4096, "files", "to draw from; the rest of the library is not used")


class Passages:
    """Draws texts as token ids."""

    def __init__(
        self,
        tokenize: Callable[[str], Sequence[int]] | None,
        vocabulary: int,
        draws: random.Random,
        limits: PassageLimits = PassageLimits(),
    ) -> None:
        """tokenize: from a text to ids, without special ones; None where the model has no tokenizer.

        vocabulary: number of ids. draws: of passages; servers must not know it.
        """
        self._tokenize, self._vocabulary, self._draws, self._limits = tokenize, vocabulary, draws, limits
        library = Path(sysconfig.get_path("stdlib"))
        self._files = sorted([*library.glob("*.py"), *library.glob("*/[a-z]*.py")])[: limits.files_max]

    def ids(self, count: int) -> list[int]:
        """Return so many token ids of a text that was drawn."""
        for _ in range(self._limits.tries_max if self._tokenize is not None and self._files else 0):
            assert self._tokenize is not None
            ids = [each for each in self._tokenize(self._passage(count)) if 0 <= each < self._vocabulary]
            if len(ids) > count:
                return ids[1 : count + 1]  # the first may be the rest of a word
        return [self._draws.randrange(self._vocabulary) for _ in range(count)]

    def _passage(self, count: int) -> str:
        text = self._draws.choice(self._files).read_text(errors="ignore")
        chars = (count + 2) * self._limits.chars_each
        start = self._draws.randrange(max(1, len(text) - chars))
        return text[start : start + chars]
