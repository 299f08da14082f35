"""OpenAI's responses: `POST /v1/responses`, without a memory. Every request has the whole conversation."""

import base64
import binascii
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from swarm.errors import BadRequest
from swarm.gateway.api.chat import text_of
from swarm.gateway.api.requests import REQUEST, AnswerRequest, Given, Items, Words, at_most
from swarm.gateway.api.responses_tools import INPUT, Tools, choice_of, spaced, tools_of
from swarm.gateway.api.turns import Turns
from swarm.gateway.chat import Chat, Message, ToolChoice
from swarm.gateway.values import read

SEALED = "swarm:"  # begins a thought that a client keeps for us; it is text, because nothing in it is a secret


class TextFormat(Given):
    """The form of the answer. `schema` shadows a method of pydantic's, so it has an alias."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextConfig(Given):
    """How the answer's text is."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Given):
    """How much the model thinks, and whether that is shown as a summary."""

    effort: str | None = None
    summary: str | None = None


class ResponseRequest(AnswerRequest):
    """The body of a request."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=REQUEST.logprobs_max)] | None = None
    text: TextConfig | None = None
    tools: Items | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: Words | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]] | None, at_most(16)] = None
    truncation: Literal["auto", "disabled"] | None = None
    # These need a memory, or another program
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None

    @cached_property
    def offered(self) -> tuple[Tools, ToolChoice]:
        """The tools that the model may call, and which of them it must. Raises BadRequest."""
        parallel = self.parallel_tool_calls is not False
        return choice_of(self.tool_choice, tools_of(self.tools or ()), parallel=parallel)

    @property
    def seals_thoughts(self) -> bool:
        """Whether the client keeps thoughts for the next request."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def shows_summary(self) -> bool:
        """Whether thoughts are shown as summaries. Nothing summarizes them here, so a summary is the thought."""
        return self.reasoning is not None and self.reasoning.summary is not None

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported; None for no probabilities at all."""
        wanted = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if wanted else self.top_logprobs or None

    def chat(self, owner: str, conversation: str | None) -> Chat:
        """Return the request in the words of all dialects. Raises BadRequest."""
        self._check_memory()
        self._check_repeated()
        tools, choice = self.offered
        return Chat(
            model=self.model,
            messages=self._messages(),
            tools=tools.tools,
            tool_choice=choice,
            schema=self._schema(),
            tokens_max=self.max_output_tokens,
            sampling=self.sampling(self.logprobs),
            template=self._template(),
            owner=owner,
            conversation=self.prompt_cache_key or conversation,
        )

    def _check_memory(self) -> None:
        if self.previous_response_id is not None:
            why = "this gateway keeps no responses: send the whole conversation as input, with store false"
            raise BadRequest("previous_response_id", why, "previous_response_not_found")
        for name, value in (("conversation", self.conversation), ("prompt", self.prompt)):
            if value is not None:
                raise BadRequest(name, "this gateway keeps none: send the text as input")
        if self.background:
            raise BadRequest("background", "this gateway keeps no responses: use stream")

    def _check_repeated(self) -> None:
        """Raise BadRequest for infinite numbers, such as 1e999, in fields that the answer repeats."""
        form = self.text.format if self.text else None
        try:
            json.dumps([self.tools, self.tool_choice, form and form.schema_], allow_nan=False)
        except ValueError:
            raise BadRequest("tools", "a number in tools, tool_choice or text.format is infinite") from None

    def _template(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning else None
        return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}

    def _schema(self) -> Mapping[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.schema_ is None:
            raise BadRequest("text.format", "schema is missing")
        return wanted.schema_

    def _messages(self) -> list[Message]:
        turns = Turns()
        if self.instructions:
            turns.system(self.instructions)
        if isinstance(self.input, str):
            turns.user(self.input)
        else:
            for item in self.input:
                _add(turns, item)
        if not turns.messages:
            raise BadRequest("input", "it is empty")
        return turns.messages


def _add(turns: Turns, item: Mapping[str, Any]) -> None:
    """Add an item of the input. Raises BadRequest."""
    kind = item.get("type") or ("message" if "role" in item else None)
    try:
        match kind:
            case "message":
                _add_message(turns, item)
            case "function_call":
                space, name = item.get("namespace"), str(item["name"])
                arguments = read(item.get("arguments") or "{}")
                turns.call(str(item["call_id"]), spaced(str(space), name) if space else name, dict(arguments))
            case "custom_tool_call":
                turns.call(str(item["call_id"]), str(item["name"]), {INPUT: str(item["input"])})
            case "function_call_output" | "custom_tool_call_output":
                turns.result(str(item["call_id"]), text_of(item["output"], "input"))
            case "reasoning":
                thought = thought_of(item)
                if thought:
                    turns.thought(thought)
            case "item_reference":
                raise BadRequest("input", "this gateway keeps no items: send the item itself")
            case _:
                raise BadRequest("input", f"items of the type {str(kind)[:40]!r} are not supported")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadRequest("input", f"an item of the type {kind!r} lacks a field, or has one of another type") from None


def _add_message(turns: Turns, item: Mapping[str, Any]) -> None:
    text = text_of(item.get("content"), "input")
    match item.get("role"):
        case "system" | "developer":
            turns.system(text)
        case "user":
            turns.user(text)
        case "assistant":
            turns.assistant(text)
        case role:
            raise BadRequest("input", f"a role is user, assistant, system or developer, not {str(role)[:40]!r}")


def thought_of(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item; "" for one of another server, which it alone can read."""
    parts = item.get("content") or ()
    text = "\n".join(str(part.get("text") or "") for part in parts if part.get("type") in {"reasoning_text", "text"})
    return text or _unsealed(item.get("encrypted_content"))


def sealed(thought: str) -> str:
    """Return a thought as clients keep it: Codex sends nothing else of a reasoning item back."""
    return SEALED + base64.b64encode(thought.encode()).decode()


def _unsealed(content: object) -> str:
    if not isinstance(content, str) or not content.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
