"""A generation: token ids in, sampled tokens out. The engine works on this level, below all text.

    async with aclosing(backend.generate(generation)) as tokens:
        async for token in tokens: ...

A backend yields `Started` once, when the prompt has been computed, then a `Token` for each sampled one, and between
them `Rerouted` where the route is another one. It ends behind
a token of `stop_ids`, at `tokens_max`, or where the grammar is complete. `asend(True)` ends it earlier in good order:
its session is kept for the next turn. Closing it frees everything on all servers.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

TEMPERATURE_MIN = 1e-4  # a lower one takes the likeliest token: logits that are divided by it would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen, in the order in which the fields are applied.

    logit_bias: added to logits, by token id. repetition_penalty: as `transformers` applies it, to tokens of prompt and
    output; 1 for none. presence_penalty, frequency_penalty: as OpenAI defines them, for tokens of the output.
    temperature: 0 takes the likeliest token. top_k: 0 for all. top_p, min_p: as in `transformers`; 1 and 0 for all.
    seed: of this generation's own generator; None draws one. logprobs: likeliest tokens that are reported beside the
    sampled one; None reports no probability at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


class Grammar(Protocol):
    """A constraint on the output, with a state of its own: one for each generation."""

    def mask(self) -> Tensor | None:
        """Return which tokens may come next, bool [vocabulary]; None for all. Raises BadRequest if it has failed."""
        ...

    def take(self, token: int) -> None:
        """Go on by a token."""
        ...

    def forced(self) -> list[int]:
        """Return tokens that must come next, none of them taken yet; none where there is a choice."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the output is whole and no token can follow. A failed grammar is not over: its next mask raises."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a whole output."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sequence to generate.

    prompt: token ids, at least one. tokens_max: of the output; the caller has clamped it to the model's context.
    stop_ids: the output ends with any of them. grammar: constrains the output. owner: whose sessions may be continued
    and whose turn it takes. conversation: which of them most likely; None for any. echo: whether the probabilities of
    the prompt's own tokens are reported, too.
    """

    prompt: tuple[int, ...]
    tokens_max: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    owner: str = ""
    conversation: str | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Likely:
    """A token and its natural logarithm of probability, before temperature and the cuts."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token. logprob, top: if the sampling asks for them."""

    id: int
    logprob: float | None = None
    top: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is computed. cached: how many of its tokens a kept session had. echo: its tokens, if asked for."""

    cached: int = 0
    echo: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Rerouted:
    """The route as it is: once at the beginning, and after each change. For the chat page; other dialects leave it out.

    left: peers that are not on it any more. hops: "peer blocks". took_s: of the step that the change held up.
    """

    left: tuple[str, ...]
    hops: tuple[str, ...]
    took_s: float


Emitted = Started | Token | Rerouted


class Backend(Protocol):
    """Generates tokens with one model: the engine, or a script in tests."""

    @property
    def positions_max(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[Emitted, bool | None]:
        """Generate until the end. Raises SwarmError."""
        ...
