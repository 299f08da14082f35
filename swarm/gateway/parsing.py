"""Takes reasoning and tool calls out of an output's text, as the model's family writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from swarm.gateway.chat import Chat


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model thinks and does not say."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A complete call of a tool. arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str


Parsed = str | Thought | Called


class OutputParser(Protocol):
    """Reads one output, piece by piece."""

    reads_special: bool  # whether its marks are special tokens, which are left out of text otherwise

    def feed(self, text: str) -> Sequence[Parsed]:
        """Take more of the output. Returns the parts that it completes."""
        ...

    def close(self) -> Sequence[Parsed]:
        """Return what is held back, at the end of the output."""
        ...


def parser_for(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> OutputParser | None:
    """Return a parser for one output of this model; None where there is nothing to take out."""
    del tokenizer, chat
    return None
