"""Parses outputs by the response template that a model's repository ships, with the parser of `transformers`.

For families that are not in the table. That parser raises where a call is broken: all that it has not handed out is
text from there on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from transformers import PreTrainedTokenizerBase

from swarm.gateway.chat import Tool
from swarm.gateway.parts import Called, Mark, Parsed, Thought, called, new_id

_log = structlog.get_logger("swarm.gateway")


class ShippedParser:
    """Reads one output of a model whose tokenizer has a `response_template`."""

    reads_special = True
    _reasoning = frozenset({"reasoning_content", "thinking"})  # names of fields

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Sequence[Tool]) -> None:
        """prompt: the rendered conversation. A broken template raises an error of `transformers`."""
        declared: list[Any] = [{"function": {"name": tool.name, "parameters": tool.parameters}} for tool in tools]
        self._parser: Any = tokenizer.get_response_parser(prefix=prompt, tools=declared)
        self._raw = ""  # not handed out yet
        self._at = 0  # in it: the beginning of a call that is not complete
        self._is_broken = False

    def feed(self, text: str) -> list[Parsed]:
        """Take more of the output. Returns the parts that it completes."""
        self._raw += text
        return self._parts(lambda: self._parser.feed(text))

    def close(self) -> list[Parsed]:
        """Return the parts that are held back, at the end of the output."""
        return self._parts(lambda: self._parser.finalize()[1])

    def _parts(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> list[Parsed]:
        try:
            if not self._is_broken:
                return [part for event in read() for part in self._of(event)]
        except Exception as error:  # noqa: BLE001 - it raises what its readers of contents raise
            _log.warning("an output does not fit its response template", error=type(error).__name__)
            self._is_broken = True
        raw, self._raw = self._raw, ""
        return [raw] if raw else []

    def _of(self, event: Mapping[str, Any]) -> list[Parsed]:
        kind, field = event["type"], event["field"]
        is_call = field == "tool_calls"
        if kind == "region_chunk":
            end = self._raw.index(event["text"], self._at) + len(event["text"])
            if is_call:
                self._at = end
                return []
            self._raw, self._at = self._raw[end:], 0
            return [Thought(event["text"]) if field in self._reasoning else event["text"]]
        if kind == "region_close" and is_call:
            value = event["value"]
            calls = [_called(each) for each in (value if isinstance(value, list) else [value])]
            self._raw, self._at = self._raw[self._at :], 0
            return list(calls)
        return [Mark()] if kind == "region_close" and field in self._reasoning else []


def _called(value: Mapping[str, Any]) -> Called:
    function = value["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False)
    return called(str(value.get("id") or new_id()), str(function["name"]), arguments)
