"""What a draft head is trained for: the model's own next tokens, also where the head takes its own states.

A guess of depth d takes the head's states of depth d - 1, and so on down to the model's. Training does the same, so
guesses are about as right at every depth (2408.15766, 2503.01840). In the window of one text, entry i of depth d sees

    the entries of depth 1 up to i - d + 1, and of each depth e from 2 to d the entry i - d + e

which is what it has in its cache where guesses began behind entry i - d + 1.
"""

import torch
from torch import Tensor
from torch.nn import functional

from swarm.model.drafthead import DraftHead, within


class SelfFed:
    """Attention of one depth after the other, over one batch of windows."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._depths: list[dict[int, tuple[Tensor, Tensor]]] = []  # of each depth, by layer: its keys and values

    def begin(self) -> None:
        """The next calls are of one more depth."""
        self._depths.append({})

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `Attend`."""
        self._depths[-1][layer] = keys, values
        depth, count = len(self._depths), queries.shape[2]
        mask = within(count, count, self._window, queries.device)
        first_keys, first_values = self._depths[0][layer]
        if depth == 1:
            return functional.scaled_dot_product_attention(queries, first_keys, first_values, attn_mask=mask)
        scale = queries.shape[-1] ** -0.5
        mask = mask.tril(1 - depth)
        scores = [(queries @ first_keys.transpose(-1, -2)).masked_fill(~mask, float("-inf"))]
        back = [depth - each for each in range(2, depth + 1)]  # how far behind i each depth's entry is
        later = [each[layer] for each in self._depths[1:]]
        scores += [
            (queries * _moved(keys, by)).sum(-1, keepdim=True).masked_fill(_early(count, by, queries), float("-inf"))
            for (keys, _), by in zip(later, back, strict=True)
        ]
        weights = torch.softmax(torch.cat(scores, dim=-1) * scale, dim=-1)
        seen = weights[..., :count] @ first_values
        for place, ((_, last), by) in enumerate(zip(later, back, strict=True)):
            seen = seen + weights[..., count + place, None] * _moved(last, by)
        return seen


def foreseen(head: DraftHead, states: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
    """Return the head's states of each depth, [rows, entries, hidden_size].

    states: the model's, [rows, entries, hidden_size]. embedded: the tokens behind them. The first d - 1 entries of
    depth d mean nothing.
    """
    attend, found = SelfFed(head.shape.window), list[Tensor]()
    for _ in range(depths):
        attend.begin()
        found.append(head(states, embedded, 1, attend))
        states = _moved(found[-1], 1)
    return found


def _moved(entries: Tensor, by: int) -> Tensor:
    """Move entries, [..., entries, size], to later places; zeros come in."""
    return functional.pad(entries, (0, 0, by, 0))[..., : entries.shape[-2], :]


def _early(count: int, by: int, like: Tensor) -> Tensor:
    """Which entries have none so far before them, [entries, 1]."""
    return (torch.arange(count, device=like.device) < by)[:, None]
