"""Ollama's requests: bodies of `/api/chat` and `/api/generate`, as chats and completions of all dialects."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from swarm.errors import BadRequest
from swarm.gateway.api.requests import REQUEST, Given, Items, Stops
from swarm.gateway.chat import Chat, Completion, Message, Sampling, Tool
from swarm.gateway.generation import TEMPERATURE_MIN

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Options(Given):
    """How to sample. Defaults are Ollama's, except that no token is penalised unless a request says so.

    Options of memory and threads, such as num_ctx and num_gpu, are the servers' business and are ignored.
    """

    num_predict: int | None = None
    temperature: Finite | None = None
    top_k: int | None = None
    top_p: Finite | None = None
    min_p: Finite | None = None
    seed: Annotated[int, Field(le=2**63 - 1)] | None = None
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    repeat_last_n: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    typical_p: Finite | None = None
    tfs_z: Finite | None = None
    mirostat: int | None = None

    @property
    def tokens_max(self) -> int | None:
        """Tokens of the output. Ollama's -1 and -2 are as many as fit."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, logprobs: int | None) -> Sampling:
        """Return it in the words of all dialects. Raises BadRequest for an option that would change the answer."""
        for name, neutral in (("typical_p", 1), ("tfs_z", 1), ("mirostat", 0)):
            if getattr(self, name) not in {None, neutral}:
                raise BadRequest(f"options.{name}", f"only {neutral}, which leaves it out, is supported")
        penalty = 1.0 if self.repeat_penalty is None or self.repeat_last_n == 0 else self.repeat_penalty
        if penalty != 1 and self.repeat_last_n not in {None, -1}:
            raise BadRequest("options.repeat_last_n", "repeat_penalty counts the whole text, which is -1, or none, 0")
        top_k = 40 if self.top_k is None else self.top_k
        temperature = _or(self.temperature, 0.8)
        return Sampling(
            temperature=temperature if temperature >= TEMPERATURE_MIN else 0.0,
            top_k=max(0, top_k),
            top_p=min(1.0, max(0.0, _or(self.top_p, 0.9))),
            min_p=min(1.0, max(0.0, _or(self.min_p, 0.0))),
            repetition_penalty=penalty,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=self.seed if self.seed is not None and self.seed >= 0 else None,
            logprobs=logprobs,
        )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


class Function(Given):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(Given):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class _Request(Given):
    """The fields of both. keep_alive is only told apart from 0: the gateway keeps its models as its own limits say."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: dict[str, Any] | Literal["", "json"] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=REQUEST.logprobs_max)] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in lines: it does unless a request says no."""
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Whether a request that only loads asks for the contrary."""
        return self.keep_alive is not None and str(self.keep_alive) in {"0", "0.0", "0s"}

    def _sampling(self) -> tuple[Options, Sampling]:
        options = self.options or Options()
        return options, options.sampling((self.top_logprobs or 0) if self.logprobs else None)

    def _schema(self) -> Mapping[str, Any] | None:
        if not self.format and not isinstance(self.format, dict):
            return None
        return {"type": "object"} if self.format == "json" else dict(self.format)

    def _template(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": self.think is not False, **effort}

    def _chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], owner: str, conversation: str | None, model: str
    ) -> Chat:
        options, sampling = self._sampling()
        return Chat(
            model=model,
            messages=messages,
            tools=tuple(tools),
            schema=self._schema(),
            tokens_max=options.tokens_max,
            stop=options.stops,
            sampling=sampling,
            template=self._template(),
            owner=owner,
            conversation=conversation,
        )


class ChatRequest(_Request):
    """The body of `POST /api/chat`. Without messages it loads the model."""

    messages: Items = Field(default_factory=list)
    tools: Annotated[list[FunctionTool], Field(max_length=REQUEST.tools_max, fail_fast=True)] | None = None

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.messages

    def asked(self, owner: str, conversation: str | None, model: str) -> Chat:
        """Return the request in the words of all dialects. model: its name in the catalogue. Raises BadRequest."""
        tools = [
            Tool(each.name, each.description or "", each.parameters or {"type": "object", "properties": {}})
            for each in (tool.function for tool in self.tools or ())
        ]
        return self._chat(messages_of(self.messages), tools, owner, conversation, model)


class GenerateRequest(_Request):
    """The body of `POST /api/generate`. Without a prompt it loads the model."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: Annotated[list[int], Field(fail_fast=True)] | None = None
    images: list[Any] | None = None

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.prompt

    def asked(self, owner: str, conversation: str | None, model: str) -> Chat | Completion:
        """Return the request in the words of all dialects. model: its name in the catalogue. Raises BadRequest."""
        for name, why in (
            ("suffix", "a text between two others is not supported"),
            ("template", "the model's own template is used; send a whole prompt with raw"),
            ("context", "send the conversation as messages to /api/chat"),
            ("images", "the model reads text alone"),
        ):
            if getattr(self, name):
                raise BadRequest(name, why)
        if not self.raw:
            system = [{"role": "system", "content": self.system}] if self.system else []
            user = {"role": "user", "content": self.prompt}
            return self._chat([*system, user], (), owner, conversation, model)
        for name in ("system", "format"):
            if getattr(self, name):
                raise BadRequest(name, "a raw prompt has none")
        options, sampling = self._sampling()
        return Completion(
            model=model,
            prompt=self.prompt,
            tokens_max=options.tokens_max,
            stop=options.stops,
            sampling=sampling,
            owner=owner,
            conversation=conversation,
        )


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as chat templates take them. Raises BadRequest.

    Templates match results to calls by id, and many clients of Ollama send none: a call gets one by its place, and a
    result without one answers the first open call of its tool, or the first open call.
    """
    messages: list[Message] = []
    open_calls = _OpenCalls()
    for at, each in enumerate(given):
        role = each.get("role")
        if not isinstance(role, str) or role not in {"system", "user", "assistant", "tool"}:
            raise BadRequest("messages", f"a role is system, user, assistant or tool, not {str(role)[:40]!r}")
        if each.get("images"):
            raise BadRequest("messages", "images: the model reads text alone")
        content = each.get("content")
        if not isinstance(content, str | None):
            raise BadRequest("messages", "content is text")
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if isinstance(each.get("thinking"), str) and each["thinking"]:
            message["reasoning_content"] = each["thinking"]
        if each.get("tool_calls"):
            message["tool_calls"] = _calls(each["tool_calls"], at)
            for call in message["tool_calls"]:
                open_calls.add(call["id"], call["function"]["name"])
        if role == "tool":
            message |= _answered(each, open_calls)
        messages.append(message)
    return messages


def _calls(given: object, at: int) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise BadRequest("messages", "tool_calls is a list")
    calls = []
    for index, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("messages", "a tool call has a function with a name")
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise BadRequest("messages", "arguments of a tool call are an object")
        call_id = call.get("id") if isinstance(call.get("id"), str) else None
        named = {"name": function["name"], "arguments": arguments}
        calls.append({"id": call_id or f"call{at:03d}{index:02d}", "type": "function", "function": named})
    return calls


class _OpenCalls:
    """Calls that no result has answered yet, the oldest first."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, tuple[str, str]] = OrderedDict()  # id and name, by their number
        self._by_word: defaultdict[tuple[str, object], deque[int]] = defaultdict(deque)  # answered ones, too
        self._count = 0

    def add(self, call_id: str, name: str) -> None:
        """Add a call."""
        self._count += 1
        self._calls[self._count] = call_id, name
        self._by_word["id", call_id].append(self._count)
        self._by_word["name", name].append(self._count)

    def take(self, call_id: object, name: object) -> tuple[str, str]:
        """Take the first call with this id, or else with this name, or else of all; two empty texts without any."""
        for word in (("id", call_id), ("name", name)):
            numbers = self._by_word.get(word) if isinstance(word[1], str) else None
            while numbers:
                if (number := numbers.popleft()) in self._calls:
                    return self._calls.pop(number)
        return self._calls.popitem(last=False)[1] if self._calls else ("", "")


def _answered(message: Mapping[str, Any], open_calls: _OpenCalls) -> dict[str, str]:
    """Return id and name of the call that a result answers."""
    name = message.get("tool_name") or message.get("name")
    call_id = message.get("tool_call_id")
    found_id, found_name = open_calls.take(call_id, name)
    names = {"tool_call_id": call_id or found_id, "name": name or found_name}
    return {key: str(value) for key, value in names.items() if value}
