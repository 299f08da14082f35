"""A draft head: a few small layers that foresee the next final hidden state of a model, as EAGLE does (2401.15077).

Entry i takes the model's final state at position i, behind its last norm, and the embedding of the token at i + 1. It
returns what the model's final state at i + 1 will be; the model's own head makes tokens of it. For a further token the
head takes its own state in the place of the model's. Attention sees a window of entries, so a text may be long.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

# The number of a layer and its queries, keys and values, each [rows, heads, entries, head_size]; returns what it sees.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

Width = Annotated[int, Field(ge=1, le=1 << 16)]


class HeadShape(BaseModel):
    """The sizes of a draft head. hidden_size, embedding_size: the model's. window: entries that attention sees."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hidden_size: Width
    embedding_size: Width
    width: Width
    mlp: Width
    layers: Annotated[int, Field(ge=1, le=16)]
    heads: Annotated[int, Field(ge=1, le=256)]
    head_size: Annotated[int, Field(ge=2, le=512, multiple_of=2)]
    window: Annotated[int, Field(ge=1, le=4096)]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its weights, by name. Nothing is allocated."""
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in DraftHead(self).state_dict().items()}


class DraftHead(nn.Module):
    """The layers."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.state_norm = _Norm(shape.hidden_size, eps=1e-6)
        self.token_norm = _Norm(shape.embedding_size, eps=1e-6)
        self.join = nn.Linear(shape.hidden_size + shape.embedding_size, shape.width, bias=False)
        self.layers = nn.ModuleList(_Layer(shape, number) for number in range(shape.layers))
        self.norm = _Norm(shape.width, eps=1e-6)
        self.out = nn.Linear(shape.width, shape.hidden_size, bias=False)

    def forward(self, states: Tensor, embedded: Tensor, first: int, attend: Attend) -> Tensor:
        """Return the next states, [rows, entries, hidden_size].

        states: [rows, entries, hidden_size]. embedded: the tokens behind them, [rows, entries, embedding_size].
        first: position of the first of these tokens.
        """
        joined = torch.cat([self.state_norm(states), self.token_norm(embedded)], dim=-1)
        hidden = self.join(joined)
        turns = _turns(first, hidden.shape[1], self.shape.head_size, hidden)
        for layer in self.layers:
            hidden = layer(hidden, turns, attend)
        foreseen: Tensor = self.out(self.norm(hidden))
        return foreseen

    @torch.no_grad()
    def follow(self, states: Tensor, embedded: Tensor, first: int, cache: "HeadCache") -> Tensor:
        """Add the entries of one row to a cache. Returns the state behind the last one, [1, 1, hidden_size]."""
        window, last = self.shape.window, states[:, :0]
        for begin in range(0, states.shape[1], window):  # so that no mask is larger than two windows

            def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                n_new = queries.shape[2]
                keys, values = cache.update(number, keys, values, seen=window + n_new - 1)
                mask = within(n_new, keys.shape[2], window, queries.device) if n_new > 1 else None
                return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

            part = slice(begin, begin + window)
            last = self(states[:, part], embedded[:, part], first + begin, attend)[:, -1:]
        return last


class HeadCache:
    """Keys and values of one text's latest entries: a window that attention sees, and two that may be taken back.

    Behind more that is taken back, attention sees fewer entries, until the text has grown by a window again.
    """

    def __init__(self, shape: HeadShape) -> None:
        self._most = 3 * shape.window
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * shape.layers

    def update(self, layer: int, keys: Tensor, values: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        """Add entries, each [1, heads, entries, head_size]. Returns keys and values of the last `seen`."""
        held = self._layers[layer]
        if held is not None:
            keys, values = torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
        self._layers[layer] = keys[:, :, -self._most :], values[:, :, -self._most :]
        return keys[:, :, -seen:], values[:, :, -seen:]

    def crop(self, change: int, /) -> None:
        """Take back entries: -3 for the last three, as a cache of `transformers` does."""
        self._layers = [held and (held[0][:, :, :change], held[1][:, :, :change]) for held in self._layers]


class _Norm(nn.RMSNorm):
    """Computes in its weight's dtype, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return super().forward(x.to(self.weight.dtype))


class _Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a sum."""

    def __init__(self, shape: HeadShape, number: int) -> None:
        super().__init__()
        inner = shape.heads * shape.head_size
        self.number = number
        self.sizes = (shape.heads, shape.head_size)
        self.attention_norm = _Norm(shape.width, eps=1e-6)
        self.queries = nn.Linear(shape.width, inner, bias=False)
        self.keys = nn.Linear(shape.width, inner, bias=False)
        self.values = nn.Linear(shape.width, inner, bias=False)
        self.attended = nn.Linear(inner, shape.width, bias=False)
        self.mlp_norm = _Norm(shape.width, eps=1e-6)
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.attention_norm(hidden)
        queries, keys, values = (
            part(normed).unflatten(-1, self.sizes).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        seen = attend(self.number, _turned(queries, turns), _turned(keys, turns), values)
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        output: Tensor = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return output


def within(n_queries: int, n_keys: int, window: int, device: torch.device) -> Tensor:
    """Return which keys queries see, bool [queries, keys]: the last `window` up to their own. Both end together."""
    behind = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    return (behind >= 0) & (behind < window)


def _turns(first: int, count: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions (2104.09864), each [positions, size]."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angles = torch.arange(first, first + count, device=like.device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turned(vectors: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    low, high = vectors.chunk(2, dim=-1)
    return vectors * turns[0] + torch.cat([-high, low], dim=-1) * turns[1]
