"""A model whose every output is a cheap exact function of everything that came before it.

Each block keeps one number per row, a rolling hash modulo a prime over all that it has seen: the activations, the
position ids and the attention mask of every position, in their order. What it puts out depends on that number and on
what came in. So one wrong, missing, doubled or misplaced position anywhere changes everything after it, for good.
The numbers are below 2**20 and travel as float32, which holds them exactly.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.errors import BadBlocks

PRIME = 524_287  # 2**19 - 1
HIDDEN_SIZE = 4
VOCABULARY = 4093
NUMERIC_CLASS = "float32"
POSITIONS_MAX = 4096
MASK_BASE = 256

Row = list[int]  # [HIDDEN_SIZE]


def _power_sums(count: int) -> list[int]:
    """Return the hash of masks of 0, 1, ... ones."""
    sums = [0]
    for _ in range(count):
        sums.append((sums[-1] * MASK_BASE + 1) % PRIME)
    return sums


_ONES = _power_sums(POSITIONS_MAX)


class HashCache:
    """One session's past on one span: for each block and row, the hash after every position."""

    def __init__(self, n_blocks: int) -> None:
        self.length = 0
        self.blocks: list[list[list[int]]] = [[] for _ in range(n_blocks)]  # [block][row][1 + position]

    def keep(self, n_positions: int) -> None:
        """Roll back."""
        assert 0 <= n_positions <= self.length
        self.length = n_positions
        if n_positions == 0:
            self.blocks = [[] for _ in self.blocks]
        for rows in self.blocks:
            for states in rows:
                del states[n_positions + 1 :]

    def gather(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was."""
        index = rows.tolist()
        self.blocks = [[list(states[row]) for row in index] for states in self.blocks]


class HashSpan:
    """Stands for `swarm.model.span.Span`. cost: counts what it computes, for whoever turns that into time."""

    dtype = torch.float32
    device = torch.device("cpu")
    numeric_class = NumericClass(NUMERIC_CLASS)
    hidden_size = HIDDEN_SIZE
    traits = SimpleNamespace(positions_max=POSITIONS_MAX)

    def __init__(self, blocks: Blocks, whole: Blocks | None = None, cost: "Cost | None" = None) -> None:
        self.blocks = blocks
        self.cost = cost if cost is not None else Cost()
        self._whole = whole or blocks

    def part(self, blocks: Blocks) -> "HashSpan":
        """As `Span.part`. Raises BadBlocks."""
        if blocks not in self._whole:
            raise BadBlocks(str(blocks), f"this span has {self._whole}")
        return HashSpan(blocks, self._whole, self.cost)

    def new_cache(self, rollback_max: int = 0) -> HashCache:
        """An empty past."""
        del rollback_max
        return HashCache(len(self.blocks))

    def forward(
        self, hidden: Tensor, *, cache: HashCache, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """As `Span.forward`: [rows, tokens, HIDDEN_SIZE] of whole numbers in and out."""
        n_rows, tokens, _ = hidden.shape
        past = cache.length
        self.cost.add(tokens, len(self.blocks))
        rows = hidden.to(torch.int64).tolist()
        ids = [list(range(past, past + tokens))] if positions is None else positions.tolist()
        masks = None if mask is None else mask.tolist()
        assert masks is None or len(masks[0]) == past + tokens
        for block, states in zip(self.blocks, cache.blocks, strict=True):
            if not past:
                states.extend([0] for _ in range(n_rows))
            assert len(states) == n_rows, f"{n_rows} rows came, the cache has {len(states)}"
            for row in range(n_rows):
                seen = _ONES[past + 1 : past + 1 + tokens] if masks is None else _mask_hashes(masks[row], past)
                rows[row] = _run_row(block, rows[row], ids[row % len(ids)], seen, states[row])
        cache.length += tokens
        return torch.tensor(rows, dtype=torch.float32)


class Cost:
    """What was computed since somebody last asked: blocks times tokens, and blocks."""

    def __init__(self) -> None:
        self.block_tokens = 0
        self.block_calls = 0

    def add(self, tokens: int, blocks: int) -> None:
        """Note one call of so many blocks."""
        self.block_tokens += tokens * blocks
        self.block_calls += blocks

    def take(self) -> tuple[int, int]:
        """Return blocks times tokens and blocks, and begin anew."""
        taken = self.block_tokens, self.block_calls
        self.block_tokens = self.block_calls = 0
        return taken


def _run_row(block: int, inputs: list[Row], ids: Sequence[int], masks: Sequence[int], states: list[int]) -> list[Row]:
    """Run one block on one row's new positions; `states` grows by as many."""
    state = states[-1]
    factor, weight = 48_271 + 2 * block, 69_621 + 30 * block
    outputs = []
    for (a, b, c, d), position, mask in zip(inputs, ids, masks, strict=True):
        word = a + 3_571 * b + 12_553 * c + 90_001 * d
        state = (state * factor + word * weight + (position + 1) * 7_919 + mask * 331 + block + 1) % PRIME
        states.append(state)
        outputs.append(
            [
                (state * 16_807 + a + block) % PRIME,
                (state * 31_337 + b) % PRIME,
                (state * 40_692 + c) % PRIME,
                (state * 65_539 + d) % PRIME,
            ]
        )
    return outputs


def _mask_hashes(mask: Sequence[int], past: int) -> list[int]:
    """Return, for each new position, the hash of the mask up to it."""
    value, hashes = int.from_bytes(mask[:past], "big") % PRIME, []
    for column in mask[past:]:
        value = (value * MASK_BASE + column) % PRIME
        hashes.append(value)
    return hashes


def embed(tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return the activations of token ids: [rows, tokens, HIDDEN_SIZE]."""
    rows = [[[(token * k + 17 * k + 1) % PRIME for k in (1, 911, 7_841, 52_361)] for token in row] for row in tokens]
    return torch.tensor(rows, dtype=torch.float32)


def greedy(output: Tensor) -> list[int]:
    """Return each row's next token: a function of the last position's output."""
    return [(int(a) + 3 * int(b) + 7 * int(c) + 11 * int(d)) % VOCABULARY for a, b, c, d in output[:, -1].tolist()]
