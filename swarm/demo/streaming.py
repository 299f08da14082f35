"""The demo beside its text: the times of the tokens, and the local model to compare with."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer


class TimedStreamer(TextStreamer):
    """Prints text as it comes, remembers when each token came, and does something half-way."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, half_way: int, then: Callable[[], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._half_way = half_way
        self._then = then
        self._began = time.perf_counter()
        self._times: list[float] = []  # of the prompt, then of each token

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token at a time."""
        self._times.append(time.perf_counter() - self._began)
        super().put(value)  # type: ignore[no-untyped-call]
        if len(self._times) == self._half_way + 1:  # the prompt came first
            self._then()

    @property
    def first_s(self) -> float:
        """Seconds from the start of the generation to its first token; the route is opened in it."""
        return self._times[1] - self._times[0]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first."""
        return (len(self._times) - 2) / max(self._times[-1] - self._times[1], 1e-9)

    @property
    def longest_s(self) -> float:
        """The longest time between two tokens, in seconds."""
        return max((later - earlier for earlier, later in pairwise(self._times[1:])), default=0.0)


def local_model(checkpoint: Path) -> PreTrainedModel:
    """Load the whole model here, as without a swarm."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    model.eval()
    return model
