"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from swarm.errors import BadRequest
from swarm.gateway.api.requests import REQUEST, Given, Items, SampledRequest, Words
from swarm.gateway.chat import Chat, Message, Tool, ToolChoice
from swarm.gateway.values import read


class Function(Given):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Given):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Given):
    """The name of a function."""

    name: str


class NamedTool(Given):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class SchemaFormat(Given):
    """A schema that the answer fulfils. `schema` shadows a method of pydantic's, so it has an alias."""

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Given):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ChatRequest(SampledRequest):
    """The body of a request."""

    messages: Annotated[Items, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=REQUEST.logprobs_max)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=REQUEST.tools_max, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    # These are not supported, and would change the answer
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Words | None = None
    audio: Any = None
    web_search_options: Any = None

    def chat(self, owner: str, conversation: str | None) -> Chat:
        """Return the request in the words of all dialects. Raises BadRequest."""
        self._check_supported()
        template = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            template.setdefault("reasoning_effort", self.reasoning_effort)
            template.setdefault("enable_thinking", self.reasoning_effort != "none")
        return Chat(
            model=self.model,
            messages=[message_of(message) for message in self.messages],
            tools=tuple(_tool(tool.function) for tool in self.tools or ()),
            tool_choice=self._tool_choice(),
            schema=self._schema(),
            tokens_max=self.max_completion_tokens or self.max_tokens,
            stop=self.stops,
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            n=self.n or 1,
            template=template,
            continues=bool(self.continue_final_message),
            ignore_eos=bool(self.ignore_eos),
            owner=owner,
            conversation=self.prompt_cache_key or conversation,
        )

    def _check_supported(self) -> None:
        if self.functions or self.function_call is not None:
            raise BadRequest("functions", "they are not supported: use tools and tool_choice")
        if self.audio is not None or set(self.modalities or ()) - {"text"}:
            raise BadRequest("modalities", "answers are text")
        if self.web_search_options is not None:
            raise BadRequest("web_search_options", "this gateway does not search the web")

    def _tool_choice(self) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in {tool.function.name for tool in self.tools or ()}:
                raise BadRequest("tool_choice", f"there is no tool {name!r} among the tools")
            return ToolChoice("required", name, parallel)
        if self.tool_choice == "required" and not self.tools:
            raise BadRequest("tool_choice", "a call is required, and there are no tools")
        return ToolChoice(self.tool_choice or "auto", None, parallel)

    def _schema(self) -> Mapping[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None:
            raise BadRequest("response_format", "json_schema is missing")
        return wanted.json_schema.schema_


def _tool(function: Function) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def message_of(given: Mapping[str, Any]) -> Message:
    """Return a message as chat templates take it. Raises BadRequest."""
    role, renamed = given.get("role"), {"developer": "system", "function": "tool"}
    roles = {"system", "user", "assistant", "tool", *renamed}
    if not isinstance(role, str) or role not in roles:
        raise BadRequest("messages", f"a role is one of {', '.join(sorted(roles))}, not {str(role)[:40]!r}")
    message: dict[str, Any] = {"role": renamed.get(role, role)}
    message["content"] = text_of(given.get("content"))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise BadRequest("messages", "tool_calls is a list")
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def text_of(content: object, field: str = "messages") -> str:
    """Return the text of a message's content: a string, or parts of text. Raises BadRequest."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(field, "content is text or a list of parts")
    texts = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, dict) else None
        if kind not in {"text", "input_text", "output_text", "refusal"}:
            raise BadRequest(field, f"parts of content are text, not {str(kind)[:40]!r}")
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(texts)


def _call(call: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        given = read(arguments) if isinstance(arguments, str) else arguments
        return {
            "id": str(call.get("id") or ""),
            "type": "function",
            "function": {"name": str(function["name"]), "arguments": given},
        }
    except (KeyError, TypeError, AttributeError, ValueError):
        raise BadRequest("messages", "a tool call has an id, a function's name and JSON arguments") from None
