"""OpenAI's chat completions as answers: whole, or as a stream of chunks."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from swarm.gateway.answering import Model
from swarm.gateway.api.problems import Problem
from swarm.gateway.api.sse import DONE, event
from swarm.gateway.chat import (
    Chat,
    Event,
    Finished,
    PromptDone,
    Reasoning,
    RouteChanged,
    Text,
    TokenText,
    ToolCall,
)


class Usage:
    """Counts the tokens of an answer."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = self.reasoning = 0

    def take(self, each: Event) -> None:
        """Count an event."""
        match each:
            case PromptDone(choice, tokens, cached):
                if choice == 0:
                    self.prompt, self.cached = tokens, cached
            case Finished():
                self.completion += each.tokens
                self.reasoning += each.reasoning

    def body(self) -> dict[str, Any]:
        """Return it as OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


def head(kind: str, name: str, model: Model) -> dict[str, Any]:
    """Return the fields that all parts of an answer begin with. kind: of its id; name: of the object."""
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "object": name,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": f"fp_{model.root[:10]}",  # the same weights have the same one
    }


def whole(chat: Chat, model: Model, events: Sequence[Event]) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    usage = Usage()
    choices = [_Answer(index) for index in range(chat.n)]
    for each in events:
        usage.take(each)
        choices[each.choice].take(each)
    return {
        **head("chatcmpl", "chat.completion", model),
        "service_tier": "default",
        "choices": [choice.body(with_logprobs=chat.sampling.logprobs is not None) for choice in choices],
        "usage": usage.body(),
    }


class _Answer:
    def __init__(self, index: int) -> None:
        self.index = index
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[TokenText] = []
        self.reason = "stop"

    def take(self, each: Event) -> None:
        match each:
            case Text():
                self.text += each.text
                self.tokens += each.tokens
            case Reasoning():
                self.reasoning += each.text
            case ToolCall():
                self.calls.append(call_body(each))
            case Finished():
                self.reason = each.reason

    def body(self, *, with_logprobs: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
            message["content"] = self.text or None
        logprobs = {"content": [logprob_body(token) for token in self.tokens], "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs if with_logprobs else None,
            "finish_reason": self.reason,
        }


def call_body(call: ToolCall) -> dict[str, Any]:
    """Return a call as OpenAI writes it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprob_body(token: TokenText) -> dict[str, Any]:
    """Return a token with its probability as OpenAI writes it."""
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw),
        "top_logprobs": [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, raw, logprob in token.top],
    }


async def chunks(
    chat: Chat, model: Model, events: AsyncGenerator[Event, None], *, include_usage: bool, show_route: bool
) -> AsyncGenerator[bytes, None]:
    """Write an answer as server-sent events. show_route: whether changes of the route are told, as comments."""
    beginning = {**head("chatcmpl", "chat.completion.chunk", model), "service_tier": "default"}
    usage = Usage()
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    async with aclosing(events):
        async for each in events:
            usage.take(each)
            if isinstance(each, RouteChanged):
                if show_route:
                    route = {"choice": each.choice, "left": each.left, "hops": each.hops, "took_s": each.took_s}
                    yield event({**beginning, "choices": [], **no_usage, "swarm_route": route})
                continue
            yield event({**beginning, "choices": [_delta(each, chat)], **no_usage})
    if include_usage:
        yield event({**beginning, "choices": [], "usage": usage.body()})
    yield DONE


def _delta(each: Event, chat: Chat) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    reason, logprobs = None, None
    match each:
        case PromptDone():
            delta = {"role": "assistant", "content": ""}
        case Text():
            delta = {"content": each.text}
            if chat.sampling.logprobs is not None:
                logprobs = {"content": [logprob_body(token) for token in each.tokens], "refusal": None}
        case Reasoning():
            delta = {"reasoning_content": each.text}
        case ToolCall():
            delta = {"tool_calls": [{"index": each.index, **call_body(each)}]}
        case Finished():
            reason = each.reason
    return {"index": each.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def error_body(problem: Problem) -> dict[str, Any]:
    """Return an error as OpenAI writes it."""
    kind = {
        "invalid_request": "invalid_request_error",
        "not_found": "invalid_request_error",
        "authentication": "invalid_request_error",
        "permission": "invalid_request_error",
        "rate_limit": "rate_limit_error",
    }.get(problem.kind, "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.field, "code": problem.code}}


def error_event(problem: Problem) -> bytes:
    """Return the last event of a stream that has failed."""
    return event(error_body(problem))
