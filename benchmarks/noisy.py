"""Guesses of a noisy copy of a model: a draft that is as right as is wanted, and no surer of a guess than it can be.

The copy's weights are the model's and normal noise. Its guesses for a text that is known are made beforehand, by the
same rule as those of a draft model (`swarm.client.hf.draws`): the likeliest tokens, or those of the same draws.
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from swarm.client.hf.draws import Draws
from swarm.client.speculation.drafts import Guess

NOISES = [0.01 * n for n in range(60, 0, -1)]  # of each weight's standard deviation


class Played:
    """Makes guesses that were made beforehand. Sleeps for each, as if on hardware of its own."""

    def __init__(self, guesses: Sequence[Guess], guess_s: float) -> None:
        """guesses: for each position of the text."""
        self._guesses = guesses
        self._guess_s = guess_s

    def propose(self, text: Sequence[int], guesses: Sequence[int], count: int) -> list[Guess]:
        """As `Draft.propose`."""
        known = len(text) + len(guesses)
        found = list(self._guesses[known : known + count])
        time.sleep(self._guess_s * len(found))
        return found


class Copies:
    """Noisy copies of one model."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._seed = seed

    def guesses(self, text: list[int], new: int, right: float, drawn_by: LogitsProcessorList | None) -> list[Guess]:
        """Return the guesses of the noisiest copy that is right in so many of a text's last `new` tokens.

        drawn_by: as the text was sampled, from this seed; None where it was taken greedily.
        """
        for noise in NOISES:
            found = self._by(self._copy(noise), text, new, drawn_by)
            hits = sum(guess.token == token for guess, token in zip(found, text, strict=True)) - (len(text) - new)
            if hits >= right * new:
                return found
        raise ValueError(f"no copy is right in {right} of its guesses")

    @torch.no_grad()
    def _copy(self, noise: float) -> PreTrainedModel:
        copy, generator = deepcopy(self._model), torch.Generator().manual_seed(self._seed)
        for weight in copy.parameters():
            if weight.ndim == 2:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
        return copy

    @torch.no_grad()
    def _by(
        self, model: PreTrainedModel, text: list[int], new: int, drawn_by: LogitsProcessorList | None
    ) -> list[Guess]:
        draws, first = Draws(), len(text) - new
        if drawn_by is not None:
            torch.manual_seed(self._seed)
            draws.at(first, drawn_by)
        logits: Tensor = model(torch.tensor([text])).logits[0]
        chosen = [draws.choose(text[:at], logits[at - 1]) for at in range(first, len(text))]
        return [*(Guess(token, 0) for token in text[:first]), *(Guess(token, -1, sure) for token, sure in chosen)]
