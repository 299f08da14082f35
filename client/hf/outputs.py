"""The final hidden states of a text, as far as they have come back: some drafts guess from them."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.client.hf.draws import Draws


class Outputs:
    """The last block's outputs at successive positions. The caller's thread adds them, a draft's thread reads them."""

    def __init__(self) -> None:
        self._start = 0
        self._hidden: list[Tensor] = []  # each [hidden_size]
        self._lock = threading.Lock()

    @property
    def known(self) -> range:
        """The positions."""
        with self._lock:
            return range(self._start, self._start + len(self._hidden))

    def note(self, position: int, hidden: Tensor) -> None:
        """Take the outputs from a position on, [tokens, hidden_size]. Those that were there from it on are forgotten.

        Where they are not next to those before, the others are of no use any more.
        """
        with self._lock:
            if self._start <= position <= self._start + len(self._hidden):
                del self._hidden[position - self._start :]
            else:
                self._start, self._hidden = position, []
            self._hidden += hidden.unbind(0)

    def of(self, positions: range) -> Tensor | None:
        """Return outputs, [positions, hidden_size]; None if some of them are not known any more."""
        with self._lock:
            first, last = positions.start - self._start, positions.stop - self._start
            if not 0 <= first < last <= len(self._hidden):
                return None
            return torch.stack(self._hidden[first:last])


@dataclass(frozen=True, slots=True)
class Context:
    """What a draft may know of one text beside its tokens."""

    draws: Draws = field(default_factory=Draws)
    outputs: Outputs = field(default_factory=Outputs)
