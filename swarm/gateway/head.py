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

    __slots__ = (
        "_ends",
        "_hidden",
        "_position",
        "_result",
        "_sampler",
        "_tokens",
        "cost",
        "done",
        "is_given_up",
        "owner",
    )

    tenure: Tenure | None = None
    rows = tokens = 1
    has_past = replays = is_skipped = is_chore = False

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
        self._tokens: tuple[Token, ...] = ()  # sampled and forced: when a batch fails behind it, it runs again
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
        if new := [each for each in segments if not each._tokens]:
            logits = self._ends.logits(torch.cat([each._hidden[:, -1] for each in new]))
            for each, token in zip(new, choose(logits, [each._sampler for each in new]), strict=True):
                # Forced tokens are those that the grammar leaves no choice of: they travel in the same step.
                each._tokens = (token, *(Token(forced) for forced in each._sampler.force()))
        ids = torch.tensor([[each._tokens[0].id] for each in segments])
        embeddings = self._ends.embed(ids, torch.tensor([each._position for each in segments]))
        return [each._with_forced(embeddings[at : at + 1]) for at, each in enumerate(segments)]

    def _with_forced(self, embedding: Tensor) -> Next:
        """Return the tokens, with the embedding of the first one and of those that are forced behind it."""
        if forced := [token.id for token in self._tokens[1:]]:
            behind = self._ends.embed(torch.tensor([forced]), self._position + 1)
            embedding = torch.cat([embedding, behind], dim=1)
        return Next(self._tokens, embedding)

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
