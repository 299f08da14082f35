"""The model's own blocks for multi-token prediction guess the next tokens (DeepSeek-V3, section 2.2).

The client has all that they need: the final hidden states come back to it anyway, and it holds embeddings and head. A
block predicts one token behind the one that is known. For each further one it takes its own output in the place of the
hidden state that the model would have, as EAGLE does (2401.15077); so guesses are the less sure the deeper they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from swarm.client.hf.outputs import Context
from swarm.client.speculation.drafts import Guess
from swarm.errors import BadConfiguration
from swarm.model.hollow import decoder_of


@dataclass(frozen=True, slots=True)
class MtpDraft:
    """The first of these blocks, for one text after the other."""

    model: MtpModel
    norm: nn.Module  # the decoder's last one: the blocks take its output
    dtype: torch.dtype  # of both: hops may compute in others

    @classmethod
    def of(cls, model: MtpModel, ends: PreTrainedModel) -> "MtpDraft":
        """model: the blocks. ends: the client's part of the model that they belong to. Raises BadConfiguration."""
        norm = getattr(decoder_of(ends)[0], "norm", None)
        if not isinstance(norm, nn.Module):
            raise BadConfiguration("draft", f"{ends.config.model_type} models do not say which norm is their last one")
        return cls(model, norm, ends.dtype)

    def draft(self, context: Context) -> "MtpGuesses":
        """Return a draft for one text."""
        return MtpGuesses(self, context)


class MtpGuesses:
    """The guesses for one text. Entry i of the cache is of position start + i: its output, and the token behind it."""

    def __init__(self, mtp: MtpDraft, context: Context) -> None:
        self._mtp = mtp
        self._context = context
        self._cache = MtpCache()
        self._start = 0
        self._tokens: list[int] = []  # of each entry
        self._sure = 0  # entries that were made from the model's own outputs; the others from the block's
        self._last: Tensor | None = None  # the block's output for the last entry, [1, 1, hidden_size]

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
            outputs = self._mtp.norm(outputs.to(self._mtp.model.device, self._mtp.dtype))
            self._feed(behind[self._sure : len(known)], outputs[None])
            self._sure = len(known)
        while len(self._tokens) < len(behind):
            assert self._last is not None
            self._feed([behind[len(self._tokens)]], self._last)
        return True

    def _crop(self, entries: int) -> None:
        if entries < len(self._tokens):
            self._cache.crop(entries - len(self._tokens))
            del self._tokens[entries:]
            self._sure, self._last = min(self._sure, entries), None

    def _feed(self, tokens: list[int], hidden: Tensor) -> None:
        """Add entries. hidden: the outputs of their positions, [1, tokens, hidden_size]."""
        model = self._mtp.model
        first = self._start + len(self._tokens) + 1
        positions = torch.arange(first, first + len(tokens), device=hidden.device)[None]
        ids = torch.tensor([tokens], device=hidden.device)
        output = model.forward_layer(0, hidden, positions, self._cache, input_ids=ids)
        self._tokens += tokens
        self._last = output[:, -1:]

    @torch.no_grad()
    def _next(self, path: list[int]) -> Guess:
        assert self._last is not None
        logits = self._mtp.model._project_to_logits(self._last)[0, -1]
        token, confidence, is_drawn = self._context.draws.choose(path, logits)
        depth = min(len(self._tokens) - self._sure, 9)
        kind = -100 - 10 * depth - int(10 * min(confidence, 0.99))
        return Guess(token, kind, None if is_drawn else confidence)
