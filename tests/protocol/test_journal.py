"""A journal's past as messages: the same as if gathers and rollbacks had been carried out when they came."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from swarm.activations import Activations
from swarm.protocol import journal as journal_module
from swarm.protocol.journal import Entry, Journal, Past, rebuild_messages
from swarm.protocol.tensors import CHUNK_BYTES

WIDTH = 4


def log(seed: int) -> tuple[Journal, dict[str, torch.Tensor]]:
    """Some steps with gathers, rollbacks, positions and padding; and what should be the past after them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    journal, rows = Journal(), rng.randint(1, 3)
    past = {
        "hidden": torch.zeros(rows, 0, WIDTH),
        "positions": torch.zeros(rows, 0, dtype=torch.int64),
        "mask": torch.zeros(rows, 0, dtype=torch.uint8),
    }
    for step in range(1, rng.randint(3, 40)):
        length = past["hidden"].shape[1]
        keep = rng.randint(0, length) if rng.random() < 0.2 else length
        order = (
            tuple(rng.randrange(rows) for _ in range(rng.randint(1, 4))) if step > 1 and rng.random() < 0.3 else None
        )
        rows = len(order) if order else rows
        tokens = rng.randint(1, 5)
        hidden = torch.randn(rows, tokens, WIDTH, generator=generator)
        positions = torch.randint(0, 99, (rows, tokens), generator=generator) if rng.random() < 0.5 else None
        mask = (
            torch.randint(0, 2, (rows, tokens), generator=generator, dtype=torch.uint8) if rng.random() < 0.5 else None
        )
        journal.add(Entry(step, order, Past(keep, Activations(hidden, positions, mask))))
        new = {
            "hidden": hidden,
            "positions": torch.arange(keep, keep + tokens).expand(rows, -1) if positions is None else positions,
            "mask": torch.ones(rows, tokens, dtype=torch.uint8) if mask is None else mask,
        }
        kept = {name: value[:, :keep] if order is None else value[list(order), :keep] for name, value in past.items()}
        past = {name: torch.cat([kept[name], new[name]], dim=1) for name in past}
    return journal, past


@pytest.mark.parametrize("seed", range(40))
def test_a_journal_knows_before_a_step_how_large_it_will_be_and_is_the_same_when_steps_are_put_together(
    seed, monkeypatch
):
    sizes = []
    add = Journal.add

    def told(journal, entry):
        expected = journal.n_bytes_with(entry)
        add(journal, entry)
        sizes.append((expected, journal.n_bytes, sum(each.past.n_bytes for each in journal._entries)))

    unfolded, past = log(seed)
    monkeypatch.setattr(journal_module, "STEPS_UNFOLDED_MAX", 4)
    monkeypatch.setattr(Journal, "add", told)
    folded, _ = log(seed)
    assert all(expected == n_bytes == held for expected, n_bytes, held in sizes)
    for journal in (unfolded, folded):
        hidden = torch.cat([piece.in_order().activations.hidden for piece in journal.past_after(99)], dim=1)
        assert torch.equal(hidden, past["hidden"])


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("seed", range(40))
def test_messages_tell_the_past_as_it_is(seed, chunk_bytes, monkeypatch):
    monkeypatch.setattr(journal_module, "CHUNK_BYTES", chunk_bytes)
    journal, expected = log(seed)
    told = {name: [] for name in expected}
    start = 0
    for message, sent in rebuild_messages("ab" * 16, 1, journal.past_after(99), 1):
        assert (message.start, message.total) == (start, expected["hidden"].shape[1])
        rows, tokens, _ = message.hidden.shape
        assert rows * tokens * WIDTH * 4 <= max(chunk_bytes, rows * WIDTH * 4)
        rest = iter(sent.tensors)
        told["hidden"].append(next(rest))
        positions = next(rest) if message.positions else torch.arange(start, start + tokens)[None]
        told["positions"].append(positions.expand(rows, -1))
        told["mask"].append(next(rest) if message.mask else torch.ones(rows, tokens, dtype=torch.uint8))
        start += tokens
    for name, parts in told.items():
        assert torch.equal(torch.cat(parts, dim=1), expected[name]), name


def test_a_past_of_many_rows_takes_no_more_memory_than_what_is_kept_of_it():
    """One row became a thousand: as a whole that would be a thousand times as much."""
    journal, prompt = Journal(), torch.randn(1, 4096, 64)
    journal.add(Entry(1, None, Past(0, Activations(prompt))))
    journal.add(Entry(2, (0,) * 1000, Past(4096, Activations(torch.randn(1000, 1, 64)))))
    pieces = journal.past_after(2)
    assert sum(piece.n_bytes for piece in pieces) == journal.n_bytes
    messages = rebuild_messages("ab" * 16, 1, pieces, 1)
    hidden = next(messages)[1].hidden
    assert hidden.shape[0] == 1000
    assert hidden.nbytes <= CHUNK_BYTES
    assert torch.equal(hidden[500], prompt[0, : hidden.shape[1]])


class Counting(TorchFunctionMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_past_that_was_gathered_at_every_step_is_found_in_one_walk():
    """Not in one for each step: whoever asks for it has a server's event loop do that."""
    calls = []
    for steps in (64, 128, 256):
        journal = Journal()
        for step in range(1, steps + 1):
            hidden = torch.full((2, 1, WIDTH), float(step))
            hidden[1] *= -1
            journal.add(Entry(step, (1, 0) if step > 1 else None, Past(step - 1, Activations(hidden))))
        with Counting() as counting:
            pieces = journal.past_after(steps)
        calls.append(counting.calls)
        assert [piece.in_order().activations.hidden[0, 0, 0] for piece in pieces[-3:]] == [steps - 2, 1 - steps, steps]
    assert calls[2] - calls[1] == 2 * (calls[1] - calls[0])
