"""Turns the tokens of one output into its parts: through a detokenizer, the stop strings and a parser."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from swarm.gateway.parts import OutputParser, Parsed
from swarm.gateway.text import Detokenizer, StopStrings


class Output:
    """The text of one output, and the reasoning and the tool calls that a parser takes out of it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        parser: OutputParser | None,
        control_ids: Collection[int],
    ) -> None:
        """parser: None for text alone. control_ids: no text, where the parser reads special tokens."""
        reads_special = parser is not None and parser.reads_special
        self._detokenizer = Detokenizer(tokenizer, special=reads_special)
        self._hidden = control_ids if reads_special else ()
        self._stop = StopStrings(stop)
        self._parser = parser

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the output; None if none has."""
        return self._stop.found

    def feed(self, token: int) -> Sequence[Parsed]:
        """Take a token. Returns the parts that it completes."""
        if token in self._hidden:
            return ()
        return self._parsed(self._stop.feed(self._detokenizer.feed(token)))

    def close(self) -> Sequence[Parsed]:
        """Return the parts that are held back, at the end of the output."""
        parts: list[Parsed] = []
        if self.stop is None:
            parts += self._parsed(self._stop.feed(self._detokenizer.close()))
        if self.stop is None:
            parts += self._parsed(self._stop.close())
        if self._parser is not None:
            parts += self._parser.close()
        return parts

    def _parsed(self, text: str) -> Sequence[Parsed]:
        if not text:
            return ()
        return (text,) if self._parser is None else self._parser.feed(text)
