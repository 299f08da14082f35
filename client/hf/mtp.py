"""The model's own blocks for multi-token prediction guess the next tokens (DeepSeek-V3, section 2.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from swarm.client.hf.statedraft import Entries


@dataclass(frozen=True, slots=True)
class MtpPredictor:
    """The first of these blocks: a `Predictor`."""

    model: MtpModel

    @property
    def device(self) -> torch.device:
        """As of `Predictor`."""
        return self.model.device

    def new_cache(self) -> Entries:
        """As `Predictor.new_cache`."""
        return MtpCache()

    def follow(self, states: Tensor, tokens: list[int], first: int, cache: Entries) -> Tensor:
        """As `Predictor.follow`."""
        assert isinstance(cache, MtpCache)
        positions = torch.arange(first, first + len(tokens), device=states.device)[None]
        ids = torch.tensor([tokens], device=states.device)
        output: Tensor = self.model.forward_layer(0, states, positions, cache, input_ids=ids)
        return output[:, -1:]

    def logits(self, state: Tensor) -> Tensor:
        """As `Predictor.logits`."""
        logits: Tensor = self.model._project_to_logits(state)
        return logits[0, -1]
