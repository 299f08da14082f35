"""Anthropic's answers: a message made of blocks, whole or as a stream of typed events."""

import json
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from swarm.gateway.api.problems import Problem
from swarm.gateway.api.sse import event
from swarm.gateway.chat import Chat, Event, Finished, PromptDone, Reasoning, Text, ToolCall

Block = dict[str, Any]


class Writer:
    """Writes the events of one answer. The stream's events add up to the whole message."""

    def __init__(self, chat: Chat, request_id: str) -> None:
        self._request_id = request_id
        self._content: list[Block] = []
        self._is_open = False  # whether the last block may get more
        self._usage: dict[str, Any] = {}
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": chat.model,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
        }

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the message."""
        for each in events:
            for _ in self._written(each):
                pass
        return {**self._message, "content": self._content, "usage": self._usage}

    async def chunks(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
        """Write the message as server-sent events."""
        async with aclosing(events):
            async for each in events:
                for body in self._written(each):
                    yield event(body, body["type"])

    def failed(self, problem: Problem) -> bytes:
        """Return the last event of a stream that has failed."""
        return event(error_body(problem, self._request_id), "error")

    def _written(self, each: Event) -> Iterator[Mapping[str, Any]]:
        match each:
            case PromptDone(_, tokens, cached):
                self._usage = _usage(tokens, cached)
                yield {"type": "message_start", "message": {**self._message, "content": [], "usage": self._usage}}
            case Reasoning(_, text):
                yield from self._more("thinking", text, {"signature": ""})
            case Text(_, text):
                if text:
                    yield from self._more("text", text, {"citations": None})
            case ToolCall():
                yield from self._call(each)
            case Finished():
                yield from self._closed()
                yield from self._finished(each)

    def _more(self, kind: str, text: str, beside: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Add to the block that is open, or to a new one. beside: further fields of the block."""
        if not self._is_open or self._content[-1]["type"] != kind:
            yield from self._closed()
            yield self._opened({"type": kind, kind: "", **beside})
        self._content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> Iterator[Mapping[str, Any]]:
        yield from self._closed()
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, "caller": {"type": "direct"}}
        yield self._opened(block)
        self._content[-1]["input"] = json.loads(call.arguments)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._closed()

    def _opened(self, block: Block) -> Mapping[str, Any]:
        self._content.append(dict(block))
        self._is_open = True
        return {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _closed(self) -> Iterator[Mapping[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        if self._content[-1]["type"] == "thinking":
            signed = {"signature": "unsigned"}  # clients send thoughts back only if they have one
            self._content[-1] |= signed
            yield self._delta({"type": "signature_delta", **signed})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _finished(self, each: Finished) -> Iterator[Mapping[str, Any]]:
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[each.reason]
        ends = {
            "stop_reason": "stop_sequence" if each.reason == "stop" and each.stop is not None else reason,
            "stop_sequence": each.stop,
            "stop_details": None,
            "container": None,
        }
        counts = {"output_tokens": each.tokens, "output_tokens_details": {"thinking_tokens": each.reasoning}}
        self._message |= ends
        self._usage = {**self._usage, **counts}
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "server_tool_use", *counts)
        yield {"type": "message_delta", "delta": ends, "usage": {name: self._usage[name] for name in names}}
        yield {"type": "message_stop"}


def _usage(prompt: int, cached: int) -> dict[str, Any]:
    """Return the counts of a prompt. Anthropic counts those that a kept session had apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "output_tokens": 0,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def error_body(problem: Problem, request_id: str | None = None) -> dict[str, Any]:
    """Return an error as Anthropic writes it."""
    kind = {
        "invalid_request": "request_too_large" if problem.status == 413 else "invalid_request_error",
        "not_found": "not_found_error",
        "authentication": "authentication_error",
        "permission": "permission_error",
        "rate_limit": "rate_limit_error",
        "overloaded": "overloaded_error",
        "timeout": "timeout_error",
    }.get(problem.kind, "api_error")
    message = problem.message
    if problem.too_long is not None:  # in the words that agents look for
        message = "prompt is too long: {} tokens > {} maximum".format(*problem.too_long)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
