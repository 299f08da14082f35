"""The tasks of the gateway's compute thread: the head of many generations at once, and embeddings of prompts."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.compute.batch import Ready
from swarm.compute.task import Tenure
from swarm.gateway.generation import Token
from swarm.gateway.sampler import Sampler, choose, reported
from swarm.model.tokens import TokenEnds


class Next(NamedTuple):
    """A sampled token with those that a grammar forces behind it, and the embeddings that the route takes next.

    embedding: [1, tokens, hidden_size].
    """

    tokens: tuple[Token, ...]
    embedding: Tensor


class Head:
    """One generation's next token: norm, head, sampling and embedding. All that are ready run as one batch."""

    __slots__ = ("_ends", "_hidden", "_position", "_result", "_sampler", "cost", "done", "is_given_up", "owner")

    tenure: Tenure | None = None
    rows = tokens = 1
    has_past = is_skipped = False

    def __init__(self, ends: TokenEnds, sampler: Sampler, hidden: Tensor, position: int, owner: str) -> None:
        """hidden: the last block's output, [1, 1, hidden_size]. position: of the token that is sampled."""
        self.owner = owner
        self.cost: Hashable | None = id(ends)
        self.done = 0
        self.is_given_up = False  # the generation was cancelled: its sampler is not to be touched
        self._ends = ends
        self._sampler = sampler
        self._hidden = hidden
        self._position = position
        self._result: Next | None = None

    def ready(self, *, decodes: bool) -> Ready:
        """For the scheduler: heads of one model run together."""
        return Ready(self.owner, id(self._ends), 1, 1, packs=True, decodes=decodes)

    def segment(self, tokens: int) -> "Head | None":
        """Return itself, for the batch; None if it was given up."""
        self.done = tokens
        return None if self.is_given_up else self

    def forward_packed(self, segments: Sequence["Head"]) -> list[Next]:
        """Sample for each, with one multiplication by the head."""
        hidden = torch.cat([each._hidden[:, -1] for each in segments])
        chosen = choose(self._ends.logits(hidden), [each._sampler for each in segments])
        ids = torch.tensor([[token.id] for token in chosen])
        embeddings = self._ends.embed(ids, torch.tensor([each._position for each in segments]))
        return [
            each._with_forced(Next((token,), embeddings[at : at + 1]))
            for at, (each, token) in enumerate(zip(segments, chosen, strict=True))
        ]

    def _with_forced(self, sampled: Next) -> Next:
        """Add the tokens that the grammar leaves no choice of: they travel in the same step."""
        forced = self._sampler.force()
        if not forced:
            return sampled
        embedding = self._ends.embed(torch.tensor([forced]), self._position + 1)
        return Next(
            (*sampled.tokens, *(Token(token) for token in forced)), torch.cat([sampled.embedding, embedding], dim=1)
        )

    def take(self, output: Next) -> None:
        """Keep its own token."""
        self._result = output

    def run(self, tokens: int) -> None:
        """Sample alone."""
        segment = self.segment(tokens)
        if segment is not None:
            self.take(self.forward_packed([segment])[0])

    def result(self) -> Next | None:
        """Return the token and its embedding; None if it was given up."""
        return self._result

    def complete(self) -> Next | None:
        """Sample alone, and return the token."""
        self.run(1)
        return self._result


def echoed(ends: TokenEnds, hidden: Tensor, ids: Sequence[int], top: int, rows: int) -> list[Token]:
    """Return tokens with their probabilities, from the last block's outputs [tokens, hidden_size] right before them.

    rows: positions whose logits are in memory at once.
    """
    tokens: list[Token] = []
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows]
        tokens += reported(ends.logits(hidden[start : start + len(part)]), part, [top] * len(part))
    return tokens
