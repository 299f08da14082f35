"""A small model of the same vocabulary guesses the next tokens of a large one.

Its KV cache follows the text by rollback: what it has of the text and the guesses stays, and the rest is computed.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from swarm.client.hf.outputs import Context
from swarm.client.speculation.drafts import Guess
from swarm.errors import BadConfiguration
from swarm.model.traits import cache_argument_of


def unfit(draft: str, name: str, why: str) -> BadConfiguration:
    """Return the error for a draft that cannot guess for a model."""
    return BadConfiguration("draft", f"{draft!r} cannot draft for {name!r}: {why}")


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A small model, for one text after the other."""

    model: PreTrainedModel
    positions_max: int | None
    takes_keep: bool  # whether its forward can compute the last position's logits alone
    cache_argument: str  # its forward's keyword for the cache

    @classmethod
    def of(cls, model: PreTrainedModel, vocabulary: int, name: str) -> "DraftModel":
        """Check a model. vocabulary, name: of the model that it drafts for. Raises BadConfiguration."""
        config = model.config.get_text_config(decoder=True)
        draft = str(getattr(model, "name_or_path", "")) or type(model).__name__
        if config.vocab_size != vocabulary:
            raise unfit(draft, name, f"it has {config.vocab_size} tokens, and not {vocabulary}")
        # The layers are empty, so this costs nothing. Those with a window are replaced by ones that keep everything.
        if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
            raise unfit(draft, name, f"{config.model_type} models have a recurrent state that cannot be rolled back")
        limit = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        return cls(model.eval(), limit, "logits_to_keep" in parameters, cache_argument_of(parameters))

    def draft(self, context: Context) -> "ModelDraft":
        """Return a draft for one text."""
        return ModelDraft(self, context)


class ModelDraft:
    """The guesses of a small model for one text: what the caller would take if the small model were the large one."""

    def __init__(self, small: DraftModel, context: Context) -> None:
        self._small = small
        self._draws = context.draws
        self._cache = DynamicCache()
        self._held: list[int] = []  # the tokens in the cache
        self._next: Guess | None = None  # behind them

    def propose(self, text: Sequence[int], guesses: Sequence[int], count: int) -> list[Guess]:
        """As `Draft.propose`. A guess costs a forward of one token; the first one also the text that is new."""
        path, found = [*text, *guesses], list[Guess]()
        limit = self._small.positions_max
        while path and len(found) < count and (limit is None or len(path) < limit):
            found.append(self._behind(path))
            path.append(found[-1].token)
        return found

    @torch.no_grad()
    def _behind(self, path: list[int]) -> Guess:
        if self._next is not None and path == self._held:
            return self._next
        stay = min(_common(self._held, path), len(path) - 1)
        if stay < len(self._held):
            self._cache.crop(stay - len(self._held))
            self._held, self._next = self._held[:stay], None
        model: Callable[..., Any] = self._small.model
        ids = torch.tensor([path[stay:]], device=self._small.model.device)
        more: dict[str, Any] = {self._small.cache_argument: self._cache}
        if self._small.takes_keep:
            more["logits_to_keep"] = 1
        logits = model(input_ids=ids, use_cache=True, **more).logits[0, -1]
        token, confidence = self._draws.choose(path, logits)
        self._held, self._next = list(path), Guess(token, -1, confidence)  # kinds of look-up are positive
        return self._next


def _common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two texts have in common from their beginning."""
    if other[: len(one)] == one:
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
