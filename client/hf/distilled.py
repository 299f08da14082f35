"""A head that was distilled from the model guesses the next tokens (`swarm-draft`)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.client.hf.statedraft import Entries
from swarm.model.drafthead import DraftHead, HeadCache


@dataclass(frozen=True, slots=True)
class DistilledPredictor:
    """A draft head between the model's embeddings and its head: a `Predictor`."""

    head: DraftHead
    embeddings: nn.Module
    to_logits: nn.Module
    device: torch.device

    @classmethod
    def of(cls, head: DraftHead, ends: PreTrainedModel) -> "DistilledPredictor":
        """ends: the client's part of the model that the head was distilled from."""
        return cls(head, ends.get_input_embeddings(), ends.get_output_embeddings(), ends.device)

    def new_cache(self) -> Entries:
        """As `Predictor.new_cache`."""
        return HeadCache(self.head.shape)

    def follow(self, states: Tensor, tokens: list[int], first: int, cache: Entries) -> Tensor:
        """As `Predictor.follow`."""
        assert isinstance(cache, HeadCache)
        embedded = self.embeddings(torch.tensor([tokens], device=self.device))
        return self.head.follow(states, embedded, first, cache)

    def logits(self, state: Tensor) -> Tensor:
        """As `Predictor.logits`."""
        logits: Tensor = self.to_logits(state)
        return logits[0, -1]
