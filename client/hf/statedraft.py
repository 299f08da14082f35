"""Guesses from the model's final hidden states, as EAGLE makes them (2401.15077).

The client has all that they need: the final hidden states come back to it anyway, and it holds embeddings and head. A
predictor foresees one token behind the one that is known. For each further one it takes its own output in the place of
the state that the model would have. Predictors are the checkpoint's own blocks (`swarm.client.hf.mtp`) and distilled
heads (`swarm.client.hf.distilled`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.client.hf.outputs import Context
from swarm.client.speculation.drafts import Guess
from swarm.errors import BadConfiguration
from swarm.model.hollow import decoder_of


class Entries(Protocol):
    """A predictor's cache."""

    def crop(self, change: int, /) -> None:
        """Take back entries: -3 for the last three."""
        ...


class Predictor(Protocol):
    """Foresees the token behind a known one."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def new_cache(self) -> Entries:
        """Return an empty cache, of one text."""
        ...

    def follow(self, states: Tensor, tokens: list[int], first: int, cache: Entries) -> Tensor:
        """Add entries to a cache. Returns the state that it foresees behind the last one, [1, 1, hidden_size].

        states: final ones behind the model's last norm, [1, entries, hidden_size]. tokens: behind each of them. first:
        the first token's position.
        """
        ...

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits of a foreseen state [1, 1, hidden_size]; [vocabulary]."""
        ...


@dataclass(frozen=True, slots=True)
class StateDraft:
    """A predictor, for one text after the other."""

    predictor: Predictor
    norm: nn.Module  # the decoder's last one: predictors take its output
    dtype: torch.dtype  # of both: hops may compute in others

    @classmethod
    def of(cls, predictor: Predictor, ends: PreTrainedModel) -> "StateDraft":
        """ends: the client's part of the model that the predictor belongs to. Raises BadConfiguration."""
        return cls(predictor, last_norm(ends), ends.dtype)

    def draft(self, context: Context) -> "StateGuesses":
        """Return a draft for one text."""
        return StateGuesses(self, context)


def last_norm(ends: PreTrainedModel) -> nn.Module:
    """Return the decoder's last norm. Raises BadConfiguration for a family that does not name it."""
    norm = getattr(decoder_of(ends)[0], "norm", None)
    if not isinstance(norm, nn.Module):
        raise BadConfiguration("draft", f"{ends.config.model_type} models do not say which norm is their last one")
    return norm


class StateGuesses:
    """The guesses for one text. Entry i of the cache is of position start + i: its output, and the token behind it."""

    def __init__(self, draft: StateDraft, context: Context) -> None:
        self._predictor = draft.predictor
        self._norm, self._dtype = draft.norm, draft.dtype
        self._context = context
        self._cache = draft.predictor.new_cache()
        self._start = 0
        self._tokens: list[int] = []  # of each entry
        self._sure = 0  # entries that were made from the model's own outputs; the others from the predictor's
        self._last: Tensor | None = None  # the predictor's output for the last entry, [1, 1, hidden_size]

    def propose(self, text: Sequence[int], guesses: Sequence[int], count: int) -> list[Guess]:
        """As `Draft.propose`. Finds nothing before the first output has come."""
        path, found = [*text, *guesses], list[Guess]()
        while len(found) < count and self._reaches(len(text), path):
            found.append(self._next(path))
            path.append(found[-1].token)
        return found

    @torch.no_grad()
    def _reaches(self, n_text: int, path: list[int]) -> bool:
        """Bring the cache to the end of a path of which so many tokens are text. Returns False where it cannot be."""
        known = self._context.outputs.known
        known = range(known.start, min(known.stop, n_text - 1))
        if not known:
            return False
        if known.start != self._start:
            self._crop(0)
            self._start = known.start
        behind = path[self._start + 1 :]
        same = next((i for i, pair in enumerate(zip(self._tokens, behind, strict=False)) if pair[0] != pair[1]), None)
        held = min(len(self._tokens), len(behind)) if same is None else same
        is_new = len(known) > self._sure
        # Guesses stay as they are while that costs less than making them anew from what is known by now.
        if held < len(self._tokens) or (is_new and len(known) - self._sure >= len(self._tokens) - len(known)):
            self._crop(min(held, self._sure))
        if len(self._tokens) == self._sure and (is_new or self._last is None):
            self._crop(min(self._sure, len(known) - 1))
            outputs = self._context.outputs.of(range(known.start + self._sure, known.stop))
            if outputs is None:
                return False
            states = self._norm(outputs.to(self._predictor.device, self._dtype))
            self._follow(behind[self._sure : len(known)], states[None])
            self._sure = len(known)
        while len(self._tokens) < len(behind):
            assert self._last is not None
            self._follow([behind[len(self._tokens)]], self._last)
        return True

    def _crop(self, entries: int) -> None:
        if entries < len(self._tokens):
            self._cache.crop(entries - len(self._tokens))
            del self._tokens[entries:]
            self._sure, self._last = min(self._sure, entries), None

    def _follow(self, tokens: list[int], states: Tensor) -> None:
        """Add entries. states: of their positions, [1, tokens, hidden_size]."""
        first = self._start + len(self._tokens) + 1
        self._last = self._predictor.follow(states, tokens, first, self._cache)
        self._tokens += tokens

    @torch.no_grad()
    def _next(self, path: list[int]) -> Guess:
        assert self._last is not None
        logits = self._predictor.logits(self._last)
        token, confidence = self._context.draws.choose(path, logits)
        depth = min(len(self._tokens) - self._sure, 9)
        return Guess(token, -1 - depth, confidence)
