"""Puts the items of a conversation into messages as chat templates take them.

Anthropic's messages and OpenAI's responses have texts, thoughts, calls and results as items of their own. Templates
take turns: one message has an assistant's thought, text and calls, and no role but `tool` comes twice in a row.
"""

from collections.abc import Mapping
from typing import Any

from swarm.gateway.chat import Message


class Turns:
    """A conversation, item by item."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # texts in them are lists of parts
        self._names: dict[str, str] = {}  # of the tools that were called, by the call's id

    @property
    def messages(self) -> list[Message]:
        """The messages."""
        texts = {"content", "reasoning_content"}
        return [
            {name: "\n\n".join(value) if name in texts else value for name, value in message.items()}
            for message in self._messages
        ]

    @property
    def ends_in_text(self) -> bool:
        """Whether the assistant's text, without a call, is the last that was said."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last

    def system(self, text: str) -> None:
        """Add instructions. Many templates take them at the beginning alone; later ones become a note to the user's."""
        if any(message["role"] != "system" for message in self._messages):
            self.user(f"<system-reminder>\n{text}\n</system-reminder>")
        else:
            self._add("system", "content", text)

    def user(self, text: str) -> None:
        """Add the user's text."""
        self._add("user", "content", text)

    def assistant(self, text: str) -> None:
        """Add the model's text."""
        self._add("assistant", "content", text)

    def thought(self, text: str) -> None:
        """Add the model's reasoning."""
        self._add("assistant", "reasoning_content", text)

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Add a call that the model has made."""
        self._names[call_id] = name
        function = {"name": name, "arguments": dict(arguments)}
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        message: dict[str, Any] = {"role": "tool", "content": [text], "tool_call_id": call_id}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self._messages.append(message)

    def _add(self, role: str, field: str, text: str) -> None:
        parts = self._turn(role).setdefault(field, [])
        if text:
            parts.append(text)

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]
