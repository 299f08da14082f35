"""OpenAI's response objects, whole or as a stream of typed events."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol

from swarm.gateway.api.chat_events import error_body, logprob_body
from swarm.gateway.api.problems import Problem
from swarm.gateway.api.responses import ResponseRequest, sealed
from swarm.gateway.api.responses_tools import INPUT, Tools
from swarm.gateway.api.sse import event
from swarm.gateway.chat import Event, Finished, PromptDone, Reasoning, Text, TokenText, ToolCall

Status = Literal["in_progress", "completed", "incomplete"]
Fields = dict[str, Any]
Typed = tuple[str, Fields]  # the type of an event behind "response.", and its fields


class Item(Protocol):
    """An item of the output while it is written."""

    id: str

    def body(self, status: Status) -> Fields:
        """Return the item."""
        ...

    def opened(self) -> Iterator[Typed]:
        """Return the events behind its beginning."""
        ...

    def closed(self) -> Iterator[Typed]:
        """Return the events before its end."""
        ...


class Writer:
    """Writes the events of one response. The whole response is the last event's."""

    def __init__(self, request: ResponseRequest) -> None:
        self._request = request
        self._tools: Tools = request.offered[0]
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._events = 0
        self._output: list[Fields] = []
        self._open: Item | None = None
        self._prompt = self._cached = 0

    def whole(self, events: Sequence[Event]) -> Fields:
        """Return the response."""
        written = [body for each in events for body in self._written(each)]
        whole: Fields = written[-1]["response"]
        return whole

    async def chunks(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
        """Write the response as server-sent events."""
        async with aclosing(events):
            async for each in events:
                for body in self._written(each):
                    yield event(body, body["type"])

    def failed(self, problem: Problem) -> bytes:
        """Return the last events of a stream that has failed. Clients know either the one or the other."""
        error = error_body(problem)["error"]
        flat = {"code": error["code"], "message": error["message"], "param": error["param"]}
        code = {"rate_limit": "rate_limit_exceeded", "invalid_request": problem.code or "invalid_prompt"}
        why = {"code": code.get(problem.kind, "server_error"), "message": problem.message}
        first = self._stamped("error", {**flat, "error": error})
        last = self._stamped("response.failed", {"response": self._response("failed", error=why)})
        return event(first, "error") + event(last, "response.failed")

    # Events

    def _written(self, each: Event) -> Iterator[Fields]:
        for kind, fields in self._typed(each):
            yield self._stamped(f"response.{kind}", fields)

    def _stamped(self, kind: str, fields: Fields) -> Fields:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _typed(self, each: Event) -> Iterator[Typed]:
        match each:
            case PromptDone(_, tokens, cached):
                self._prompt, self._cached = tokens, cached
                yield "created", {"response": self._response("in_progress")}
                yield "in_progress", {"response": self._response("in_progress")}
            case Reasoning(_, text):
                if not isinstance(self._open, _Thought):
                    yield from self._begun(_Thought(self._request))
                assert isinstance(self._open, _Thought)
                yield from self._placed(self._open.more(text))
            case Text():
                if each.text or each.tokens:
                    yield from self._text(each.text, each.tokens)
            case ToolCall():
                yield from self._begun(_Call(each, self._tools))
                yield from self._ended("completed")
            case Finished():
                yield from self._finished(each)

    def _text(self, text: str, tokens: Sequence[TokenText]) -> Iterator[Typed]:
        if not isinstance(self._open, _Message):
            yield from self._begun(_Message())
        assert isinstance(self._open, _Message)
        yield from self._placed(self._open.more(text, tokens))

    def _finished(self, each: Finished) -> Iterator[Typed]:
        if not self._output and self._open is None:
            yield from self._begun(_Message())
        status: Status = "incomplete" if each.reason == "length" else "completed"
        yield from self._ended(status)
        yield status, {"response": self._response(status, finished=each)}

    def _begun(self, item: Item) -> Iterator[Typed]:
        yield from self._ended("completed")
        self._open = item
        yield "output_item.added", {"output_index": len(self._output), "item": item.body("in_progress")}
        yield from self._placed(item.opened())

    def _ended(self, status: Status) -> Iterator[Typed]:
        if self._open is None:
            return
        yield from self._placed(self._open.closed())
        done = self._open.body(status)
        yield "output_item.done", {"output_index": len(self._output), "item": done}
        self._output.append(done)
        self._open = None

    def _placed(self, events: Iterator[Typed]) -> Iterator[Typed]:
        """Say which item events are of."""
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self._output)}
        for kind, fields in events:
            yield kind, {**place, **fields}

    # The response

    def _response(
        self, status: str, *, finished: Finished | None = None, error: Mapping[str, Any] | None = None
    ) -> Fields:
        request = self._request
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": list(self._output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": _given(request.reasoning, ("effort", "summary")),
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": _text_config(request),
            "tool_choice": request.tool_choice or "auto",
            "tools": [_tool_body(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "safety_identifier": None,
            "prompt_cache_key": request.prompt_cache_key,
            **({} if request.user is None else {"user": request.user}),
            "usage": None if finished is None else self._usage(finished),
        }

    def _usage(self, finished: Finished) -> Fields:
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": finished.tokens,
            "output_tokens_details": {"reasoning_tokens": finished.reasoning},
            "total_tokens": self._prompt + finished.tokens,
        }


def _given(part: object, names: Sequence[str]) -> Fields:
    return {name: getattr(part, name, None) for name in names}


def _text_config(request: ResponseRequest) -> Fields:
    given = request.text
    wanted = given.format.model_dump(by_alias=True, exclude_none=True) if given and given.format else {"type": "text"}
    return {"format": wanted, "verbosity": (given and given.verbosity) or "medium"}


def _tool_body(tool: Mapping[str, Any]) -> Fields:
    """Return a tool with the fields that OpenAI's types want."""
    return {"strict": None, "parameters": None, **tool} if tool.get("type") == "function" else dict(tool)


# --- items -----------------------------------------------------------------------------------------------------------


class _Message:
    """Text for the user."""

    def __init__(self) -> None:
        self.id = f"msg_{secrets.token_hex(24)}"
        self._text = ""
        self._tokens: list[Fields] = []

    def body(self, status: Status) -> Fields:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def opened(self) -> Iterator[Typed]:
        yield "content_part.added", {"content_index": 0, "part": self._part()}

    def more(self, text: str, tokens: Sequence[TokenText]) -> Iterator[Typed]:
        bodies = [logprob_body(token) for token in tokens]
        self._text += text
        self._tokens += bodies
        yield "output_text.delta", {"content_index": 0, "delta": text, "logprobs": bodies}

    def closed(self) -> Iterator[Typed]:
        yield "output_text.done", {"content_index": 0, "text": self._text, "logprobs": self._tokens}
        yield "content_part.done", {"content_index": 0, "part": self._part()}

    def _part(self) -> Fields:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._tokens)}


class _Thought:
    """The model's reasoning: as text, or as a summary where a client has asked for one."""

    def __init__(self, request: ResponseRequest) -> None:
        self.id = f"rs_{secrets.token_hex(24)}"
        self._text = ""
        self._seals = request.seals_thoughts
        self._is_summary = request.shows_summary
        name = "reasoning_summary" if self._is_summary else "reasoning"
        self._text_events = f"{name}_text"
        self._part_events = "reasoning_summary_part" if self._is_summary else "content_part"
        self._place = {"summary_index" if self._is_summary else "content_index": 0}

    def body(self, status: Status) -> Fields:
        parts = [] if status == "in_progress" else [self._part()]
        body: Fields = {"id": self.id, "type": "reasoning", "summary": parts if self._is_summary else []}
        if not self._is_summary:
            body["content"] = parts
        if self._seals:
            body["encrypted_content"] = sealed(self._text)
        return body

    def opened(self) -> Iterator[Typed]:
        yield f"{self._part_events}.added", {**self._place, "part": self._part()}

    def more(self, text: str) -> Iterator[Typed]:
        self._text += text
        yield f"{self._text_events}.delta", {**self._place, "delta": text}

    def closed(self) -> Iterator[Typed]:
        yield f"{self._text_events}.done", {**self._place, "text": self._text}
        yield f"{self._part_events}.done", {**self._place, "part": self._part()}

    def _part(self) -> Fields:
        return {"type": "summary_text" if self._is_summary else "reasoning_text", "text": self._text}


class _Call:
    """A call of a function, or of a tool that takes free text. It is complete when it comes."""

    _space: str | None  # the namespace of the function

    def __init__(self, call: ToolCall, tools: Tools) -> None:
        self._is_text = call.name in tools.texts
        self.id = f"{'ctc' if self._is_text else 'fc'}_{secrets.token_hex(24)}"
        self._call_id = call.id
        self._space, self._name = tools.spaces.get(call.name, (None, call.name))
        self._given = _text_in(call.arguments) if self._is_text else call.arguments

    def body(self, status: Status) -> Fields:
        kind, field = ("custom_tool_call", "input") if self._is_text else ("function_call", "arguments")
        body = {"id": self.id, "type": kind, "status": status, "call_id": self._call_id, "name": self._name}
        body[field] = "" if status == "in_progress" else self._given
        if self._space is not None:
            body["namespace"] = self._space
        return body

    def opened(self) -> Iterator[Typed]:
        kind = "custom_tool_call_input" if self._is_text else "function_call_arguments"
        yield f"{kind}.delta", {"delta": self._given}

    def closed(self) -> Iterator[Typed]:
        if self._is_text:
            yield "custom_tool_call_input.done", {"input": self._given}
        else:
            yield "function_call_arguments.done", {"name": self._name, "arguments": self._given}


def _text_in(arguments: str) -> str:
    """Return the free text of a call; all of its arguments where the model has given them other names."""
    given = json.loads(arguments)
    return str(given[INPUT]) if INPUT in given else arguments
