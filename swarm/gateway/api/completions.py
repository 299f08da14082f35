"""OpenAI's completions: `POST /v1/completions`, for texts and token ids without a template."""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from swarm.errors import BadRequest
from swarm.gateway.answering import Model, merged
from swarm.gateway.api.chat_events import head
from swarm.gateway.api.requests import REQUEST, SampledRequest
from swarm.gateway.api.sse import DONE, event
from swarm.gateway.chat import Completion, Event, Finished, PromptDone, Text, TokenText

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[str], Field(min_length=1, max_length=REQUEST.prompts_max, fail_fast=True)]
PromptIds = Annotated[list[Ids], Field(min_length=1, max_length=REQUEST.prompts_max, fail_fast=True)]


class CompletionRequest(SampledRequest):
    """The body of a request."""

    prompt: str | Prompts | Ids | PromptIds = ""
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=REQUEST.logprobs_max)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    def completions(self, owner: str, conversation: str | None) -> list[Completion]:
        """Return one for each prompt. Raises BadRequest."""
        if self.suffix:
            raise BadRequest("suffix", "a text between two others is not supported")
        if self.best_of not in {None, 1, self.n or 1}:
            raise BadRequest("best_of", "only as many completions are made as are returned")
        base = Completion(
            model=self.model,
            prompt="",
            tokens_max=16 if self.max_tokens is None else self.max_tokens,  # OpenAI's default
            stop=self.stops,
            sampling=self.sampling(self.logprobs),
            n=self.n or 1,
            echo=bool(self.echo),
            ignore_eos=bool(self.ignore_eos),
            owner=owner,
            conversation=self.prompt_cache_key or conversation,
        )
        prompts = self._prompts()
        if len(prompts) * base.n > REQUEST.sequences_max:
            raise BadRequest("n", f"prompts times n are at most {REQUEST.sequences_max}, not {len(prompts) * base.n}")
        return [replace(base, prompt=prompt) for prompt in prompts]

    def _prompts(self) -> list[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(token, int) for token in self.prompt):
            return [tuple(token for token in self.prompt if isinstance(token, int))]
        return [each if isinstance(each, str) else tuple(each) for each in self.prompt if not isinstance(each, int)]


def all_of(answers: Sequence[AsyncGenerator[Event, None]], n: int) -> AsyncGenerator[Event, None]:
    """Return the events of the answers to all prompts: choice c of prompt p is p n + c."""
    return merged([_shifted(answer, at * n) for at, answer in enumerate(answers)])


async def _shifted(events: AsyncGenerator[Event, None], by: int) -> AsyncGenerator[Event, None]:
    async with aclosing(events):
        async for each in events:
            yield replace(each, choice=each.choice + by) if by else each


class Usage:
    """Counts the tokens of all prompts and completions."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt = self._completion = self._cached = 0

    def take(self, each: Event) -> None:
        """Count an event."""
        if isinstance(each, PromptDone) and each.choice % self._n == 0:
            self._prompt += each.tokens
            self._cached += each.cached
        elif isinstance(each, Finished):
            self._completion += each.tokens

    def body(self) -> dict[str, Any]:
        """Return it as OpenAI writes it."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


class _Choice:
    """One completion, whole. offset: characters before its next piece, as `text_offset` counts them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.tokens: list[TokenText] = []
        self.reason: str | None = None

    def body(self, *, with_logprobs: bool) -> dict[str, Any]:
        return _choice_body(self.index, self.text, logprobs_body(self.tokens) if with_logprobs else None, self.reason)


def logprobs_body(tokens: Sequence[TokenText], offset: int = 0) -> dict[str, Any]:
    """Return tokens with their probabilities as OpenAI's completions write them; the first of an echo has none."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if math.isnan(token.logprob) else token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": offsets,
    }


def _top(token: TokenText) -> dict[str, float] | None:
    """Return the likeliest tokens, and always the sampled one: OpenAI returns up to one more than were asked for."""
    if math.isnan(token.logprob):
        return None
    return {**{text: logprob for text, _, logprob in token.top}, token.text: token.logprob}


def _choice_body(index: int, text: str, logprobs: Mapping[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class Writer:
    """Writes the events of one request's answers."""

    def __init__(self, completions: Sequence[Completion], model: Model, prompts: Sequence[str]) -> None:
        """prompts: their texts, for the echo."""
        self._n = completions[0].n
        self._prompts = prompts
        self._echo = completions[0].echo
        self._with_logprobs = completions[0].sampling.logprobs is not None
        self._offsets: dict[int, int] = {}
        self._head = head("cmpl", "text_completion", model)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return all answers."""
        usage = Usage(self._n)
        choices = [_Choice(index) for index in range(self._n * len(self._prompts))]
        for each in events:
            usage.take(each)
            choice = choices[each.choice]
            match each:
                case PromptDone():
                    choice.text += self._echoed(each.choice)
                    choice.tokens += each.echo
                case Text():
                    choice.text += each.text
                    choice.tokens += each.tokens
                case Finished():
                    choice.reason = each.reason
        bodies = [choice.body(with_logprobs=self._with_logprobs) for choice in choices]
        return {**self._head, "choices": bodies, "usage": usage.body()}

    async def chunks(self, events: AsyncGenerator[Event, None], *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Write the answers as server-sent events."""
        usage = Usage(self._n)
        beside: dict[str, Any] = {"usage": None} if include_usage else {}
        async with aclosing(events):
            async for each in events:
                usage.take(each)
                choice = self._chunk(each)
                if choice is not None:
                    yield event({**self._head, "choices": [choice], **beside})
        if include_usage:
            yield event({**self._head, "choices": [], "usage": usage.body()})
        yield DONE

    def _chunk(self, each: Event) -> dict[str, Any] | None:
        match each:
            case PromptDone():
                return self._piece(each.choice, self._echoed(each.choice), each.echo)
            case Text():
                return self._piece(each.choice, each.text, each.tokens)
            case Finished():
                return _choice_body(each.choice, "", None, each.reason)
        return None

    def _piece(self, choice: int, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        offset = self._offsets.get(choice, 0)
        self._offsets[choice] = offset + sum(len(token.text) for token in tokens)
        return _choice_body(choice, text, logprobs_body(tokens, offset) if self._with_logprobs else None, None)

    def _echoed(self, choice: int) -> str:
        return self._prompts[choice // self._n] if self._echo else ""
