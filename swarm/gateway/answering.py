"""Answers chats and completions with one model: template, tokens, text, stop strings, finish reasons.

A choice is one generation. Its text passes a detokenizer, the stop strings, and the parser that takes reasoning and
tool calls out. All choices of a request run at the same time, and their events come as they happen.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm.errors import BadRequest, PromptTooLong
from swarm.gateway.chat import (
    Chat,
    Completion,
    Event,
    Finished,
    FinishReason,
    PromptDone,
    Reasoning,
    RouteChanged,
    Text,
    TokenText,
    ToolCall,
)
from swarm.gateway.generation import Backend, Emitted, Generation, Rerouted, Started, Token
from swarm.gateway.grammar import Constraint, Grammars
from swarm.gateway.output import Output
from swarm.gateway.parsing import parser_for
from swarm.gateway.parts import Called, OutputParser, Parsed, Thought
from swarm.gateway.text import HeldTokens, TokenTexts
from swarm.gateway.tokenizing import Tokenizing

# no names of a request's template variables: these would change the rendering, or replace the template
RENDERING = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is loaded. name: as requests say it. stop_ids: the tokens that end its answers."""

    name: str
    root: str
    backend: Backend
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    texts: TokenTexts
    grammars: Grammars = field(init=False)
    tokenizing: Tokenizing = field(init=False)

    def __post_init__(self) -> None:
        grammars = Grammars(self.tokenizer, self.backend.vocabulary, self.stop_ids)
        object.__setattr__(self, "grammars", grammars)
        object.__setattr__(self, "tokenizing", Tokenizing(self.tokenizer))

    def served_by(self, backend: Backend) -> "Model":
        """Return this model with another backend. It has the same grammars, whose tables take a while to make."""
        other = replace(self, backend=backend)
        object.__setattr__(other, "grammars", self.grammars)
        object.__setattr__(other, "tokenizing", self.tokenizing)
        return other

    async def chat(self, chat: Chat) -> AsyncGenerator[Event, None]:
        """Answer a conversation. Raises UsageError for a request that cannot be answered, or another SwarmError."""
        prompt = await self._rendered(chat)
        ids = await self._tokenized(prompt, special=False)
        constraints = await self.grammars.make(chat, prompt)
        parsers = partial(parser_for, self.tokenizer, chat, prompt)
        async with aclosing(self._choices(chat, ids, parsers, constraints)) as events:
            async for event in events:
                yield event

    async def complete(self, completion: Completion) -> AsyncGenerator[Event, None]:
        """Continue a text. Raises as `chat` does."""
        prompt = completion.prompt
        ids = await self._tokenized(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            start = self.tokenizer.bos_token_id
            if start is None:
                raise BadRequest("prompt", "it is empty, and the model has no token that begins a text")
            ids = (start,)
        self._check(ids)
        async with aclosing(self._choices(completion, ids, lambda: None)) as events:
            async for event in events:
                yield event

    async def count(self, chat: Chat) -> int:
        """Return how many tokens a conversation has as a prompt."""
        return len(await self._tokenized(await self._rendered(chat), special=False))

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are no text even where special tokens are read: they begin, end or fill sequences."""
        known = self.tokenizer
        control = {known.bos_token_id, known.eos_token_id, known.pad_token_id, *self.stop_ids}
        return frozenset(token for token in control if token is not None)

    def text_of(self, prompt: str | tuple[int, ...]) -> str:
        """Return a prompt as text. Raises BadRequest for ids that the model has not."""
        if isinstance(prompt, str):
            return prompt
        self._check(prompt)
        return str(self.tokenizer.decode(list(prompt)))

    # Prompts

    def _check(self, ids: tuple[int, ...]) -> None:
        if any(not 0 <= token < self.backend.vocabulary for token in ids):
            raise BadRequest("prompt", f"token ids are from 0 to {self.backend.vocabulary - 1}")

    async def _rendered(self, chat: Chat) -> str:
        """Put a conversation into the model's template."""
        if chat.continues and chat.messages[-1]["role"] != "assistant":
            raise BadRequest("continue_final_message", "the last message is not the assistant's")
        if taken := RENDERING & set(chat.template):
            raise BadRequest("chat_template_kwargs", f"the gateway itself says {', '.join(sorted(taken))}")
        if not self.tokenizer.chat_template:
            raise BadRequest("messages", f"{self.name} has no chat template; use /v1/completions")
        tools: list[Any] = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in chat.tools
        ]
        shown = tools if tools and chat.tool_choice.mode != "none" else None
        messages: Any = [dict(message) for message in chat.messages]
        variables: dict[str, Any] = dict(chat.template)
        variables.setdefault("xml_tools", shown)  # SmolLM3's name for them
        render = partial(
            self.tokenizer.apply_chat_template,
            messages,
            tools=shown,
            add_generation_prompt=not chat.continues,
            continue_final_message=chat.continues,
            tokenize=False,
            **variables,
        )
        try:
            return str(await asyncio.to_thread(render))
        except Exception as error:  # noqa: BLE001 - a template is a program, and says what it does not take
            raise BadRequest("messages", f"the model's template refuses them: {str(error)[:200]}") from None

    async def _tokenized(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return await self.tokenizing.ids(text, self.backend.positions_max, special=special)

    def _room(self, asked: int | None, prompt: int) -> int:
        """Return how many tokens the output may have. Raises PromptTooLong."""
        room = self.backend.positions_max - prompt + 1  # the last token is never fed
        if room < 1:
            raise PromptTooLong(prompt, self.backend.positions_max, "the model")
        return room if asked is None else min(asked, room)

    # Choices

    async def _choices(
        self,
        request: Chat | Completion,
        ids: tuple[int, ...],
        parsers: Callable[[], OutputParser | None],
        constraints: Callable[[], Constraint] | None = None,
    ) -> AsyncGenerator[Event, None]:
        if any(token >= self.backend.vocabulary for token in request.sampling.logit_bias):
            raise BadRequest("logit_bias", f"token ids are from 0 to {self.backend.vocabulary - 1}")
        tokens_max = self._room(request.tokens_max, len(ids))
        generation = Generation(
            prompt=ids,
            tokens_max=tokens_max,
            sampling=request.sampling,
            stop_ids=frozenset() if request.ignore_eos else self.stop_ids,
            owner=request.owner,
            conversation=request.conversation,
            echo=isinstance(request, Completion) and request.echo and request.sampling.logprobs is not None,
        )
        choices = [
            _Choice(self, index, _of_choice(generation, index, constraints), request, parsers()).events()
            for index in range(request.n)
        ]
        async with aclosing(merged(choices)) as events:
            async for event in events:
                yield event


def _of_choice(generation: Generation, index: int, constraints: Callable[[], Constraint] | None) -> Generation:
    """Return the generation of one choice: each has its own state of a grammar, and of a seed its own one."""
    sampling = generation.sampling
    if sampling.seed is not None and index > 0:
        sampling = replace(sampling, seed=sampling.seed + index)
    return replace(generation, sampling=sampling, grammar=None if constraints is None else constraints())


class _Choice:
    """One answer."""

    def __init__(
        self,
        model: Model,
        index: int,
        generation: Generation,
        request: Chat | Completion,
        parser: OutputParser | None,
    ) -> None:
        self._model = model
        self._index = index
        self._generation = generation
        self._output = Output(model.tokenizer, request.stop, parser, model.control_ids)
        self._calls_one = isinstance(request, Chat) and not request.tool_choice.parallel
        self._calls = 0
        self._count = 0  # tokens of the output
        self._reasoning = 0  # of them, tokens that the model only thinks
        self._thinks = False  # whether the last event was reasoning
        self._ended = False  # by a token that ends answers
        self._held = HeldTokens()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Generate, and turn tokens into events."""
        async with aclosing(self._model.backend.generate(self._generation)) as emitted:
            async for each in emitted:
                for event in self._of(each):
                    yield event
                if self._is_enough:
                    break
            if self._is_enough:
                with suppress(StopAsyncIteration):
                    await emitted.asend(True)
        for event in self._rest():
            yield event
        yield Finished(self._index, self._reason(), self._count, self._output.stop, self._reasoning)

    @property
    def _is_enough(self) -> bool:
        """Whether the answer ends here, whatever the model would say: a stop string, or the only call."""
        return self._output.stop is not None or (self._calls_one and self._calls > 0)

    def _of(self, emitted: Emitted) -> list[Event]:
        match emitted:
            case Started(cached, echo):
                return [PromptDone(self._index, len(self._generation.prompt), cached, self._echoed(echo))]
            case Rerouted(left, hops, took_s):
                return [RouteChanged(self._index, left, hops, took_s)]
            case Token():
                self._count += 1
                self._ended = emitted.id in self._generation.stop_ids
                events = [] if self._ended else self._of_token(emitted)
                if events:
                    self._thinks = isinstance(events[-1], Reasoning)
                self._reasoning += self._thinks
                return events

    def _reason(self) -> FinishReason:
        grammar = self._generation.grammar
        is_whole = grammar is not None and grammar.is_complete and grammar.is_over
        if self._ended or self._is_enough or is_whole:
            return "tool_calls" if self._calls else "stop"
        return "length"

    def _of_token(self, token: Token) -> list[Event]:
        if token.logprob is not None:
            self._held.add(self._model.texts.report(token))
        return self._events(self._output.feed(token.id))

    def _rest(self) -> list[Event]:
        """Return the events that are held back, at the end."""
        events = self._events(self._output.close())
        if tokens := self._held.rest():
            events.append(Text(self._index, "", tokens))
        return events

    def _events(self, parts: Sequence[Parsed]) -> list[Event]:
        """Return the events of parts of the output, up to the only call."""
        events: list[Event] = []
        for at, part in enumerate(parts, 1):
            if self._calls_one and self._calls:
                break
            behind = list(takewhile(lambda each: isinstance(each, str), parts[at:]))
            if isinstance(part, str):
                is_last = at + len(behind) == len(parts)
                events.append(Text(self._index, part, self._held.said(part, is_last=is_last)))
                continue
            self._held.drop("".join(str(each) for each in behind))
            match part:
                case Thought(text):
                    events.append(Reasoning(self._index, text))
                case Called(call_id, name, arguments):
                    events.append(ToolCall(self._index, self._calls, call_id, name, arguments))
                    self._calls += 1
        return events

    def _echoed(self, echo: Sequence[Token]) -> tuple[TokenText, ...]:
        texts = self._model.texts
        return tuple(
            texts.report(token) if token.logprob is not None else TokenText(*texts.of(token.id), float("nan"))
            for token in echo
        )


async def merged(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Yield the events of several streams as they come. The first error ends all."""
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def drain(stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put(event)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - raised below, in the consumer's task
            await queue.put(error)

    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for event in only:
                yield event
        return
    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        over = 0
        while over < len(streams):
            taken = await queue.get()
            if isinstance(taken, Exception):
                raise taken
            if taken is None:
                over += 1
            else:
                yield taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
