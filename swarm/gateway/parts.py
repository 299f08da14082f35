"""The parts that a parser takes out of an output: text, reasoning, calls of tools, and marks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Protocol

from swarm.gateway.values import encodable


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


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a mark outside of calls: nothing before it becomes text any more."""


Parsed = str | Thought | Called | Mark


def new_id() -> str:
    """Return an id for a call whose family writes none."""
    return "call_" + token_hex(12)


def called(call_id: str, name: str, arguments: Mapping[str, Any]) -> Called:
    """Return a call whose texts UTF-8 can have. Raises ValueError for arguments that are no JSON, such as NaN."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return Called(encodable(call_id), encodable(name), encodable(text))


class OutputParser(Protocol):
    """Reads one output, piece by piece."""

    reads_special: bool  # whether its marks are special tokens, which are left out of text otherwise

    def feed(self, text: str) -> Sequence[Parsed]:
        """Take more of the output. Returns the parts that it completes."""
        ...

    def close(self) -> Sequence[Parsed]:
        """Return the parts that are held back, at the end of the output."""
        ...
