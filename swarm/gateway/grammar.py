"""Constrains outputs to a JSON schema, or to calls of tools, with llguidance.

A request's grammar is compiled once, in a thread and within limits, and each of its choices has a copy with a state of
its own. Schemas come with requests, so compiling is a part of the time to the first token: it takes milliseconds.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swarm.errors import BadRequest
from swarm.gateway.chat import Chat
from swarm.gateway.families import family_of, template_of
from swarm.gateway.forms import Forms
from swarm.gateway.schemas import SchemaLimits, closed
from swarm.gateway.writings import writing_of
from swarm.limits import limit

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one request's schemas, and of one mask."""

    given_bytes: int = limit(1 << 20, "bytes", "all schemas of a request together, as JSON")
    schema_bytes: int = limit(64 << 10, "bytes", "of them without titles, descriptions, defaults and examples")
    grammar_symbols: int = limit(100_000, "symbols", "of the compiled grammar")
    lexer_fuel: int = limit(500_000, "steps", "to compile the patterns: about 50,000 a millisecond")
    lexer_states: int = limit(50_000, "states", "of all patterns: about 2 kB each")
    step_fuel: int = limit(100_000, "steps", "of the lexer for one mask: about 14,000 a millisecond")
    step_items: int = limit(50_000, "items", "of the parser for one mask: about 20,000 a millisecond")
    compile_s: float = limit(0.9, "s", "a schema that takes longer is refused")
    compilers: int = limit(2, "threads", "of one model: schemas that are slow to compile hold up other schemas alone")
    calls_max: int = limit(16, "calls", "of one answer: a model that repeats a call ends there")
    schemas: SchemaLimits = field(default_factory=SchemaLimits)

    def parser(self) -> LLParserLimits:
        """Return them as llguidance takes them."""
        return LLParserLimits(
            initial_lexer_fuel=self.lexer_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.grammar_symbols,
            verbose_errors=False,  # they would have parts of schemas in them
        )


class Constraint:
    """A constraint on one output, and its state behind the tokens so far. A `Grammar` of the engine."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, field: str) -> None:
        """field: of the request, which has the schema."""
        self._field = field
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._has_failed = False

    def mask(self) -> Tensor | None:
        """Return which tokens may come next, bool [vocabulary]; None where it is over.

        Raises BadRequest where it has failed, now or before: no token is sampled as if it were free.
        """
        if self.is_over:
            return None
        if not self._has_failed:
            # numpy, because torch would wake its threads for 128k bytes, and wait for them on a busy machine
            allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8, self._vocabulary) != 0
            if not self._failed() and allowed.any():
                return torch.from_numpy(allowed)
            self._fail("no token can follow")
        raise BadRequest(self._field, "its schema takes too long to follow, or leads nowhere; make it simpler")

    def take(self, token: int) -> None:
        """Go on by a token. A token that cannot come fails the grammar."""
        if not self._is_stopped and not self._matcher.consume_token(token):
            self._fail("a token does not fit")

    def forced(self) -> list[int]:
        """Return the tokens that must come next, in the tokenizer's own spelling. They are not taken."""
        if self._is_stopped:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return [] if self._failed() else tokens

    @property
    def is_over(self) -> bool:
        """Whether the output is whole and no token can follow."""
        return not self._has_failed and self._matcher.is_stopped()

    @property
    def _is_stopped(self) -> bool:
        return self._has_failed or self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a whole output."""
        return not self._has_failed and (self._matcher.is_accepting() or self._matcher.is_stopped())

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self._fail("a limit is reached")
        return self._has_failed

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("a grammar failed", why=why)  # its own words have tokens of the answer


class Grammars:
    """Makes the constraints of one model's requests."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        stop_ids: frozenset[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """vocabulary: logits of a position; those that are no tokens are never allowed."""
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._compilers = ThreadPoolExecutor(self.limits.compilers, "grammar")
        self._free = asyncio.Semaphore(self.limits.compilers)  # schemas that wait for others are not slow themselves
        self._own: asyncio.Task[LLTokenizer] | None = None

    async def make(self, chat: Chat, prompt: str) -> Callable[[], Constraint] | None:
        """Return a maker of constraints, one for each choice; None where the output is free.

        prompt: the rendered conversation. Raises BadRequest for a schema that cannot be enforced within the limits.
        """
        wanted = constrained_by(chat)
        if wanted is None:
            return None
        _check_size(chat, wanted, self.limits)
        own = await self._llguidance()
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._compilers, self._compiled, own, chat, prompt, wanted)
        compiling.add_done_callback(self._compiled_one)
        try:
            matcher = await asyncio.wait_for(asyncio.shield(compiling), self.limits.compile_s)
        except TimeoutError:
            raise BadRequest(wanted, "its schema takes too long to compile; make it smaller") from None
        if matcher is None:
            return None
        return lambda: Constraint(matcher.deep_copy(), self._vocabulary, wanted)

    async def _llguidance(self) -> LLTokenizer:
        """Return llguidance's view of the tokenizer; the first request waits for it, seconds for 128k tokens."""
        if self._own is None or (self._own.done() and (self._own.cancelled() or self._own.exception())):
            self._own = asyncio.create_task(asyncio.to_thread(self._viewed))
        return await asyncio.shield(self._own)

    def _compiled_one(self, done: asyncio.Future[LLMatcher | None]) -> None:
        self._free.release()
        if not done.cancelled():
            done.exception()  # of one that is late, which asyncio need not log

    def _viewed(self) -> LLTokenizer:
        known = self._tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        stop: Any = sorted(self._stop_ids) or None
        fast: Any = self._tokenizer
        return from_tokenizer(fast, n_vocab=max(self._vocabulary, known), eos_token=stop)

    def _compiled(self, own: LLTokenizer, chat: Chat, prompt: str, field: str) -> LLMatcher | None:
        try:
            grammar = self._grammar(own, chat, prompt)
            if grammar is None:
                return None
            matcher = LLMatcher(own, grammar, log_level=0, limits=self.limits.parser())
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRequest(field, f"its schema cannot be enforced: {str(error)[:200]}") from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first is the slowest, and shows whether any output is possible
        if matcher.is_error():
            raise BadRequest(field, f"its schema cannot be enforced: {matcher.get_error()[:200]}")
        return matcher

    def _grammar(self, own: LLTokenizer, chat: Chat, prompt: str) -> str | None:
        template = template_of(self._tokenizer)
        added = self._tokenizer.get_added_vocab()
        specials = {text: token for text, token in added.items() if own.is_special_token(token)}
        forms = Forms(writing_of(family_of(template), template), specials, self.limits.calls_max)
        choice = chat.tool_choice
        named = [] if choice.mode == "none" else [tool for tool in chat.tools if choice.name in {None, tool.name}]
        bounds = self.limits.schemas
        tools = [replace(tool, parameters=closed(tool.parameters, bounds)) for tool in named]
        schema = None if chat.schema is None else closed(chat.schema or {"type": "object"}, bounds)
        if len(json.dumps([schema, [tool.parameters for tool in tools]])) > self.limits.schema_bytes:
            raise ValueError(f"it has more than {self.limits.schema_bytes} bytes, descriptions left out")
        parallel = choice.parallel and choice.name is None
        if choice.mode == "required" and tools:
            text = forms.output(None, tools, prompt, parallel=parallel)
        elif schema is not None:
            text = forms.output(schema, tools, prompt, parallel=parallel)
        else:
            free = forms.text_or_calls(tools)
            if free is None:
                raise ValueError("this model's calls begin with no mark of their own; require one, or leave strict out")
            text = free
        return str(LLMatcher.grammar_from_lark(text))


def constrained_by(chat: Chat) -> str | None:
    """Return the field of a request that constrains its output; None where nothing does."""
    if chat.tools and chat.tool_choice.mode == "required":
        return "tools"
    if chat.schema is not None:
        return "response_format"
    if chat.tools and chat.tool_choice.mode == "auto" and any(tool.strict for tool in chat.tools):
        return "tools"
    return None


def _check_size(chat: Chat, field: str, limits: GrammarLimits) -> None:
    """Raise BadRequest for schemas that are not worth compiling."""
    try:
        size = len(json.dumps([chat.schema, [tool.parameters for tool in chat.tools]]))
    except (RecursionError, ValueError):
        raise BadRequest(field, "its schema is nested too deep") from None
    if size > limits.given_bytes:
        raise BadRequest(field, f"schemas have at most {limits.given_bytes} bytes together, not {size}")
