"""Prompts become tokens in a few threads of their own: a long one takes seconds, and hundreds of bytes for each token.

A thread goes on where its caller has left, so those that render chats are others. What cannot be a prompt is refused
after a part of it.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from swarm.errors import PromptTooLong
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class TokenizingLimits:
    """Bounds of the work on one prompt, and of all that runs at one time."""

    inline_characters: int = limit(4096, "characters", "a longer prompt is tokenized in a thread, not among streams")
    threads: int = limit(2, "prompts", "are tokenized at one time; more wait")
    dense_characters: int = limit(8, "characters", "per position of the context: longer prompts are counted first")
    piece_characters: int = limit(16384, "characters", "counted at a time, until there are more tokens than fit")
    seam_tokens: int = limit(64, "tokens", "of each piece that its ends may have made, and are not counted")


class Tokenizing:
    """Those of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: TokenizingLimits = TokenizingLimits()) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.threads, "tokenize")

    async def ids(self, text: str, positions_max: int, *, special: bool = True) -> tuple[int, ...]:
        """Return the tokens of a prompt. Raises PromptTooLong, before all of it is read, where it is far too long."""
        if len(text) < self._limits.inline_characters:
            return self._encoded(text, special=special)
        work = partial(self._of_long, text, positions_max, special=special)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _of_long(self, text: str, positions_max: int, *, special: bool) -> tuple[int, ...]:
        limits = self._limits
        if len(text) > limits.dense_characters * positions_max:
            tokens = 0
            for start in range(0, len(text), limits.piece_characters):
                piece = text[start : start + limits.piece_characters]
                tokens += max(0, len(self._encoded(piece, special=False)) - limits.seam_tokens)
                if tokens > positions_max:
                    raise PromptTooLong(tokens, positions_max, "the model")
        return self._encoded(text, special=special)

    def _encoded(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=special))
