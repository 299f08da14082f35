"""What sampling is about to draw, so that a draft guesses it.

On a CPU, `torch.multinomial(p, 1)` is a race of exponentials: it draws q from the generator, and takes the token of the
largest p / q. A draft that draws the same q, from a copy of the generator, takes the same token wherever its own p is
near enough (Daliri et al., 2408.07978). The caller's generator is only read.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class Draws:
    """The draws of one text, by position. The caller sets them, a draft's thread reads them."""

    def __init__(self) -> None:
        self._processors: LogitsProcessorList | None = None  # None: the likeliest token is taken
        self._generator = torch.Generator()
        self._states: dict[int, Tensor] = {}  # the generator's, before it draws for a position
        self._noise: dict[int, Tensor] = {}
        self._next = 0  # the position that the generator draws for next
        self._lock = threading.Lock()

    def none(self) -> None:
        """Nothing is drawn."""
        with self._lock:
            self._processors = None

    def at(self, position: int, processors: LogitsProcessorList) -> None:
        """The caller's generator draws for this position next. processors: what changes scores before that."""
        state = torch.get_rng_state()
        with self._lock:
            if self._processors is not processors or not torch.equal(self._states.get(position, state[:0]), state):
                self._processors = processors
                self._states, self._noise, self._next = {position: state}, {}, position
                self._generator.set_state(state)
            for past in [each for each in self._states if each < position]:
                del self._states[past]
                self._noise.pop(past, None)

    def choose(self, path: list[int], logits: Tensor) -> tuple[int, float]:
        """Return the token behind a path by a draft's logits, [vocabulary], and how sure the draft is of it.

        That is its share of all p, or of all p / q where it is drawn: an unlikely token that wins the race by far is
        the model's, too, wherever the model's p is anything like the draft's.
        """
        with self._lock:
            processors, noise = self._processors, self._drawn(len(path), logits.shape[0])
        scores = logits.float().cpu()[None]
        if processors is not None:
            ids = torch.tensor([path])
            for each in processors:
                if _is_stateless(each):
                    warp: Any = each  # its types ask for tensors of old names
                    scores = warp(ids, scores)
        race = torch.softmax(scores, dim=-1)[0]
        if noise is not None:
            race /= noise
        token = int(race.argmax())
        return token, float(race[token] / race.sum())

    def _drawn(self, position: int, vocabulary: int) -> Tensor | None:
        """Return what is drawn for a position; None where nothing is, or it is past."""
        if self._processors is None:
            return None
        while self._next <= position:
            self._states[self._next] = self._generator.get_state()
            noise = torch.empty(1, vocabulary).exponential_(1, generator=self._generator)
            self._noise[self._next] = noise[0]
            self._next += 1
        return self._noise.get(position)


def _is_stateless(processor: LogitsProcessor) -> bool:
    """Whether a draft may call it. Others may count their calls, and are the caller's alone."""
    return type(processor) in {  # a subclass may do anything, and remember how often
        MinPLogitsWarper,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    }
