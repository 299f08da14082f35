"""A model that says what its grammar lets it: random logits, with a leaning to end strings, lists and answers."""

# ruff: noqa: RUF001 - marks of some families have wide characters

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm.gateway.answering import Model
from swarm.gateway.generation import Emitted, Generation, Grammar, Sampling, Started
from swarm.gateway.sampler import Sampler, choose
from swarm.gateway.text import TokenTexts
from tests.support.swarms import DEMO_CHECKPOINT

NAME = "random"
PADDING = 64  # rows of the logits that are no tokens


def tokenizer_of(template: str, marks: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """The demo's tokenizer, with a template and with marks that are special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    tokenizer.chat_template = template
    if marks:
        tokenizer.add_tokens(list(marks), special_tokens=True)
    return tokenizer


def leaning(tokenizer: PreTrainedTokenizerBase, strength: float = 6.0) -> torch.Tensor:
    """Bias [vocabulary] to tokens that end something: outputs would have no end otherwise."""
    bias = torch.zeros(len(tokenizer) + PADDING)
    for text, token in tokenizer.get_vocab().items():
        if any(end in text for end in ('"', "}", "]", "</", "<|", "<｜")):
            bias[token] = strength
    bias[tokenizer.eos_token_id] = 2 * strength
    return bias


def walk(
    grammar: Grammar, bias: torch.Tensor, seed: int, tokens_max: int = 400, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Tokens of one output, until it is over."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(Sampling(seed=seed), [0], grammar)
    for _ in range(tokens_max):
        logits = bias + torch.randn(len(bias), generator=generator)
        token = choose(logits[None], [sampler])[0].id
        yield token
        if token in stop or grammar.is_over:
            return


@dataclass
class RandomBackend:
    """The engine's interface, with random logits."""

    tokenizer: PreTrainedTokenizerBase
    positions_max: int = 8192
    asked: list[Generation] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        return len(self.tokenizer) + PADDING

    async def generate(self, generation: Generation) -> AsyncGenerator[Emitted, bool | None]:
        self.asked.append(generation)
        yield Started()
        bias, sampler = leaning(self.tokenizer), Sampler(generation.sampling, generation.prompt, generation.grammar)
        for _ in range(generation.tokens_max):
            (token,) = choose((bias + torch.randn(len(bias)))[None], [sampler])
            if (yield token):
                return
            if token.id in generation.stop_ids or (generation.grammar is not None and generation.grammar.is_over):
                return


def random_model(template: str, marks: tuple[str, ...] = ()) -> Model:
    """A loaded model with this template."""
    tokenizer = tokenizer_of(template, marks)
    stop = frozenset({tokenizer.eos_token_id})
    return Model(NAME, "0" * 64, RandomBackend(tokenizer), tokenizer, stop, TokenTexts(tokenizer))
