"""What the demo shows beside the text: when tokens came, and what the local model says."""

import time
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer


class TimedStreamer(TextStreamer):
    """Prints text as it comes and remembers when each token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._began = time.perf_counter()
        self._times: list[float] = []  # of the prompt, then of each token

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token at a time."""
        self._times.append(time.perf_counter() - self._began)
        super().put(value)  # type: ignore[no-untyped-call]

    @property
    def first_s(self) -> float:
        """Seconds from the start of the generation to its first token; the route is opened in it."""
        return self._times[1] - self._times[0]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first."""
        return (len(self._times) - 2) / max(self._times[-1] - self._times[1], 1e-9)


def local_model(checkpoint: Path) -> PreTrainedModel:
    """Load the whole model here, as everybody else would."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.eval()
    return model
