"""Anthropic's dialect: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from swarm.errors import BadRequest
from swarm.gateway.api.dialect import Dialect, Served, conversation_of, owner_of
from swarm.gateway.api.messages_events import Writer, error_body
from swarm.gateway.api.problems import Problem
from swarm.gateway.api.requests import REQUEST, Given, Items
from swarm.gateway.api.sse import collected, event, streamed
from swarm.gateway.api.turns import Turns
from swarm.gateway.chat import Chat, Sampling, Tool, ToolChoice


class GivenTool(Given):
    """A tool. Those with another type than "custom" are programs of Anthropic's."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Return it as templates take it. Raises BadRequest."""
        if self.type not in {None, "custom"}:
            raise BadRequest("tools", f"tools of the type {self.type!r} are not supported, only those with a schema")
        if self.input_schema is None:
            raise BadRequest("tools", f"the tool {self.name!r} has no input_schema")
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


class GivenChoice(Given):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Given):
    """Whether the model thinks first."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Given):
    """A schema that the answer fulfils. `schema` shadows a method of pydantic's, so it has an alias."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Given):
    """The form of the answer."""

    format: OutputFormat | None = None


class Metadata(Given):
    """The user. user_id: Claude Code writes its session's id into it."""

    user_id: Annotated[str, Field(max_length=1024)] | None = None


class CountRequest(Given):
    """The body of a request for a count; an answer's has more."""

    model: str
    messages: Annotated[Items, Field(min_length=1)]
    system: str | Items | None = None
    tools: Annotated[list[GivenTool], Field(max_length=REQUEST.tools_max, fail_fast=True)] | None = None
    tool_choice: GivenChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    def chat(self, owner: str, conversation: str | None) -> Chat:
        """Return the request in the words of all dialects. Raises BadRequest."""
        tools = tuple(tool.tool() for tool in self.tools or ())
        turns = Turns()
        # Claude Code begins its instructions with a line that is for its vendor's accounts. It has another number in
        # every request, so with it no turn could continue a kept session.
        system = re.sub(r"\Ax-anthropic-[a-z-]+:[^\n]*\n?", "", _text("system", self.system or ""))
        if system:
            turns.system(system)
        for message in self.messages:
            _add(turns, message)
        wanted = self.output_config and self.output_config.format
        return Chat(
            model=self.model,
            messages=turns.messages,
            tools=tools,
            tool_choice=self._tool_choice({tool.name for tool in tools}),
            schema=wanted.schema_ if wanted else None,
            template={} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"},
            continues=turns.ends_in_text,
            owner=owner,
            conversation=(self.metadata and self.metadata.user_id) or conversation,
        )

    def _tool_choice(self, names: set[str]) -> ToolChoice:
        given = self.tool_choice
        if given is None:
            return ToolChoice()
        parallel = not given.disable_parallel_tool_use
        match given.type:
            case "auto" | "none":
                return ToolChoice(given.type, None, parallel)
            case "any":
                if not names:
                    raise BadRequest("tool_choice", "a call is required, and there are no tools")
                return ToolChoice("required", None, parallel)
            case "tool":
                if given.name not in names:
                    raise BadRequest("tool_choice", f"there is no tool {given.name!r} among the tools")
                return ToolChoice("required", given.name, parallel)


class MessagesRequest(CountRequest):
    """The body of a request."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=REQUEST.stop_sequences_max, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    def chat(self, owner: str, conversation: str | None) -> Chat:
        """Return the request in the words of all dialects. Raises BadRequest."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(
            super().chat(owner, conversation),
            tokens_max=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            sampling=Sampling(**present),
        )


def _add(turns: Turns, message: Mapping[str, Any]) -> None:
    """Add a message's blocks. Raises BadRequest."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in {"user", "assistant", "system"}:
        raise BadRequest("messages", f"a role is user or assistant, not {str(role)[:40]!r}")
    if role == "system":
        turns.system(_text("messages", content))
        return
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise BadRequest("messages", "content is text or a list of blocks")
    for block in blocks:
        _add_block(turns, role, block)


def _add_block(turns: Turns, role: str, block: Any) -> None:  # noqa: ANN401 - JSON
    kind = block.get("type") if isinstance(block, dict) else None
    try:
        match role, kind:
            case "user", "text":
                turns.user(str(block["text"]))
            case "assistant", "text":
                turns.assistant(str(block["text"]))
            case "assistant", "thinking":
                turns.thought(str(block["thinking"]))
            case "assistant", "redacted_thinking":
                pass  # another model's, which only its vendor can read
            case "assistant", "tool_use":
                turns.call(str(block["id"]), str(block["name"]), dict(block["input"]))
            case "user", "tool_result":
                turns.result(str(block["tool_use_id"]), _text("messages", block.get("content") or ""))
            case _:
                raise BadRequest("messages", f"blocks of the type {str(kind)[:40]!r} are not supported")
    except (KeyError, TypeError, ValueError):
        raise BadRequest(
            "messages", f"a block of the type {kind!r} lacks a field, or has one of another type"
        ) from None


def _text(field: str, content: object) -> str:
    """Return text that is given as such or in blocks. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(field, "content is text or a list of blocks")
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise BadRequest(field, f"blocks of the type {str(kind)[:40]!r} are not supported")
        texts.append(str(block.get("text") or ""))
    return "\n".join(texts)


# --- over HTTP -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Anthropic(Dialect):
    """Its errors have an id, and 529 stands for a swarm that has no room."""

    def problem(self, problem: Problem) -> Response:
        """Return the answer to a request that failed before its first byte."""
        request_id = new_request_id()
        status = 529 if problem.kind == "overloaded" else problem.status
        headers = {**problem.headers, "request-id": request_id}
        return JSONResponse(error_body(problem, request_id), status, headers)


DIALECT = _Anthropic(("/v1/messages",), error_body)


def new_request_id() -> str:
    """Return the id of a request, for the answer's header."""
    return f"req_{secrets.token_hex(12)}"


def router(served: Served) -> APIRouter:
    """Return the routes."""
    routes, ping = APIRouter(), event({"type": "ping"}, "ping")

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        asked = body.chat(owner_of(request), conversation_of(request))
        model = await served.model(asked.model, request)
        headers = {"request-id": new_request_id()}
        events, writer = model.chat(asked), Writer(asked, headers["request-id"])
        if not body.stream:
            return JSONResponse(writer.whole(await collected(events)), headers=headers)
        return await streamed(writer.chunks(events), writer.failed, served.streams, keep_alive=ping, headers=headers)

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        """Count the tokens of a conversation as a prompt."""
        model = await served.model(body.model, request)
        count = await model.count(body.chat(owner_of(request), conversation_of(request)))
        return JSONResponse({"input_tokens": count}, headers={"request-id": new_request_id()})

    return routes
