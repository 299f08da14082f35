"""The nouns that all dialects share: a chat as a template takes it, and the events of its answer.

A dialect parses its JSON into a `Chat`, and writes `Event`s as its own JSON or stream. `swarm.gateway.answering` does
all that lies between: the template, the tokens, text and tool calls of the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.gateway.generation import Likely, Sampling

Message = Mapping[str, Any]
"""As a chat template takes it: role, content, and tool_calls, tool_call_id, reasoning_content or name where there are
any. Arguments of tool calls are objects, not text."""

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode: "auto", "none" or "required"; name: the one that must be called, with mode "required"."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A request for answers to a conversation.

    tokens_max: None for as many as fit. stop: strings that end the output and do not appear in it. n: answers.
    schema: JSON schema of the answer; an empty one is any JSON object. ignore_eos: go on behind the end token.
    template: further variables of the chat template, such as enable_thinking. continues: the last message is the
    assistant's, and the answer goes on where it ends.
    """

    model: str
    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    schema: Mapping[str, Any] | None = None
    tokens_max: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    template: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    ignore_eos: bool = False
    owner: str = ""
    conversation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request to continue a text, or token ids, without a template. echo: the answer begins with the prompt."""

    model: str
    prompt: str | tuple[int, ...]
    tokens_max: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    echo: bool = False
    ignore_eos: bool = False
    owner: str = ""
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of the output as dialects report it: its text, its bytes, and those of the likeliest others."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptDone:
    """The first event of a choice: tokens of its prompt, and how many of them a kept session had already.

    echo: the prompt's tokens, if a completion asks for them with probabilities. The first one has none: NaN.
    """

    choice: int
    tokens: int
    cached: int
    echo: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """More of an answer. tokens: those that it is made of, if probabilities are asked for."""

    choice: int
    text: str
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's reasoning before it answers."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. index: among the calls of its choice. arguments: JSON text of an object."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a choice.

    tokens: of the output. stop: the string that ended it, if one did. reasoning: how many of the tokens are reasoning.
    """

    choice: int
    reason: FinishReason
    tokens: int
    stop: str | None = None
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class RouteChanged:
    """Servers have left the route of a choice, and the text goes on. For the chat page."""

    choice: int
    left: tuple[str, ...]
    hops: tuple[str, ...]
    took_s: float


Event = PromptDone | Text | Reasoning | ToolCall | Finished | RouteChanged

__all__ = [
    "Chat",
    "Completion",
    "Event",
    "FinishReason",
    "Finished",
    "Likely",
    "Message",
    "PromptDone",
    "Reasoning",
    "RouteChanged",
    "Sampling",
    "Text",
    "TokenText",
    "Tool",
    "ToolCall",
    "ToolChoice",
]
