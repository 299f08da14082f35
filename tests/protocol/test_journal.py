"""A journal's past as messages: the same as if gathers and rollbacks had been carried out when they came."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from swarm.activations import Activations
from swarm.protocol.journal import (
    Entry,
    Expansion,
    Journal,
    JournalLimits,
    Past,
    cut_off,
    past_bytes,
    rebuild_messages,
)
from swarm.protocol.tensors import CHUNK_BYTES

WIDTH = 4
logs = settings(max_examples=40)
RANDOM = st.randoms(use_true_random=False)


def steps_of(rng: Random) -> Iterator[tuple[Entry, Activations]]:
    """Some steps with gathers, rollbacks, positions and padding; and with each what should be the past after it."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    rows = rng.randint(1, 3)
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
        new = {
            "hidden": hidden,
            "positions": torch.arange(keep, keep + tokens).expand(rows, -1) if positions is None else positions,
            "mask": torch.ones(rows, tokens, dtype=torch.uint8) if mask is None else mask,
        }
        kept = {name: value[:, :keep] if order is None else value[list(order), :keep] for name, value in past.items()}
        past = {name: torch.cat([kept[name], new[name]], dim=1) for name in past}
        yield Entry(step, order, Past(keep, Activations(hidden, positions, mask))), Activations(**past)


def hidden_after(journal: Journal, step: int) -> torch.Tensor:
    """The past of a journal, in one piece."""
    return torch.cat([piece.in_order().activations.hidden for piece in journal.past_after(step)], dim=1)


@logs
@given(RANDOM, st.sampled_from([4, 5]))
def test_journal_knows_before_a_step_how_large_it_becomes(rng, steps_unfolded_max):
    journal = Journal(JournalLimits(steps_unfolded_max))
    for entry, _ in steps_of(rng):
        expected, before = journal.n_bytes_with(entry), journal.n_bytes
        grown = journal.add(entry)
        pieces = sum(piece.n_bytes for piece in journal.past_after(entry.step))
        assert pieces <= expected == journal.n_bytes == before + grown


@logs
@given(RANDOM)
def test_folded_journal_tells_the_same_past(rng):
    unfolded, folded = Journal(), Journal(JournalLimits(steps_unfolded_max=4))
    for entry, past in steps_of(rng):
        unfolded.add(entry)
        folded.add(entry)
        assert torch.equal(hidden_after(unfolded, entry.step), past.hidden)
        assert torch.equal(hidden_after(folded, entry.step), past.hidden)


def test_a_long_past_is_not_copied_again_and_again():
    journal, copied = Journal(JournalLimits(steps_unfolded_max=8)), 0
    places: set[int] = set()
    for step in range(1, 401):
        journal.add(Entry(step, None, Past(step - 1, Activations(torch.full((1, 1, WIDTH), float(step))))))
        pieces = [piece for piece in journal.past_after(step) if piece.activations.tokens > 1]
        copied += sum(piece.activations.tokens for piece in pieces if piece.activations.hidden.data_ptr() not in places)
        places = {piece.activations.hidden.data_ptr() for piece in pieces}
    assert hidden_after(journal, 400)[0, :, 0].tolist() == list(range(1, 401))
    assert copied <= 400


@logs
@given(RANDOM, st.sampled_from([1, 40, 1 << 20]))
def test_messages_tell_the_past_as_it_is(rng, chunk_bytes):
    journal = Journal()
    for entry, expected in steps_of(rng):  # noqa: B007 - the last one's
        journal.add(entry)
    told: dict[str, list[torch.Tensor]] = {"hidden": [], "positions": [], "mask": []}
    start = 0
    for message, part in rebuild_messages("ab" * 16, 1, journal.past_after(99), 1, chunk_bytes):
        assert (message.start, message.total) == (start, expected.tokens)
        rows, tokens, _ = message.hidden.shape
        assert rows * tokens * WIDTH * 4 <= max(chunk_bytes, rows * WIDTH * 4)
        assert (message.positions is None) == (part.positions is None)
        assert (message.mask is None) == (part.mask is None)
        told["hidden"].append(part.hidden)
        positions = torch.arange(start, start + tokens)[None] if part.positions is None else part.positions
        told["positions"].append(positions.expand(rows, -1))
        told["mask"].append(torch.ones(rows, tokens, dtype=torch.uint8) if part.mask is None else part.mask)
        start += tokens
    for name, parts in told.items():
        assert torch.equal(torch.cat(parts, dim=1), getattr(expected, name)), name


@logs
@given(RANDOM, st.sampled_from([1, 40, 1 << 20]), st.sampled_from([4, 256]))
def test_ids_expand_to_the_past_that_embeddings_would_be(rng, chunk_bytes, steps_unfolded_max):
    """A token's embedding here depends on its position too, as learned positions do."""
    table = torch.randn(50, WIDTH)

    def embed(ids: torch.Tensor, start: int) -> torch.Tensor:
        return table[ids.long()] + torch.arange(start, start + ids.shape[1])[:, None]

    expansion = Expansion(lambda ids, start: embed(ids[:, :, 0], start), position_bytes=WIDTH * 4)
    limits = JournalLimits(steps_unfolded_max)
    of_ids, of_embeddings = Journal(limits), Journal(limits)
    for entry, _ in steps_of(rng):
        rows, tokens, _ = entry.past.activations.hidden.shape
        ids = torch.tensor([[rng.randrange(50) for _ in range(tokens)] for _ in range(rows)], dtype=torch.int32)
        start, activations = entry.past.start, entry.past.activations
        of_ids.add(Entry(entry.step, entry.rows, Past(start, activations.with_hidden(ids[:, :, None]))))
        of_embeddings.add(Entry(entry.step, entry.rows, Past(start, activations.with_hidden(embed(ids, start)))))
    pieces, expected = of_ids.past_after(99), of_embeddings.past_after(99)
    told = list(rebuild_messages("ab" * 16, 1, pieces, 1, chunk_bytes, expansion))
    as_ever = list(rebuild_messages("ab" * 16, 1, expected, 1, chunk_bytes))
    assert [message for message, _ in told] == [message for message, _ in as_ever]
    for (_, part), (_, known) in zip(told, as_ever, strict=True):
        assert torch.equal(part.hidden, known.hidden)
    rows = pieces[0].rows
    assert past_bytes(pieces, expansion) == rows * pieces[-1].stop * WIDTH * 4
    positions = max(1, chunk_bytes // (rows * WIDTH * 4))
    assert len(told) == -(-pieces[-1].stop // positions)


def test_session_without_a_past_has_nothing_to_rebuild():
    assert past_bytes((Past(0, Activations(torch.zeros(2, 3, WIDTH))),)) == 2 * 3 * WIDTH * 4
    assert past_bytes(()) == 0
    assert list(rebuild_messages("ab" * 16, 1, (), 1)) == []


@logs
@given(RANDOM, st.integers(0, 20))
def test_truncated_journal_is_as_before_those_steps(rng, forgotten):
    entries = list(steps_of(rng))
    after = max(1, len(entries) - forgotten)
    journal = Journal()
    sizes = []
    for entry, _ in entries:
        journal.add(entry)
        sizes.append(journal.n_bytes)
    journal.truncate(after)
    assert torch.equal(hidden_after(journal, 99), entries[after - 1][1].hidden)
    assert journal.n_bytes == sizes[after - 1]
    for entry, _ in entries[after:]:
        journal.add(entry)
    assert torch.equal(hidden_after(journal, 99), entries[-1][1].hidden)


@logs
@given(RANDOM, st.integers(1, 6))
def test_skipped_steps_leave_the_past_before_them(rng, skipped):
    """A hop that computed them has more positions; cut off where the client's past ends, it is the same."""
    client, hop = Journal(), Journal()
    past = torch.randn(1, rng.randint(2, 9), WIDTH)
    steps = [Entry(1, None, Past(0, Activations(past)))]
    stop = keep = past.shape[1] - rng.randint(0, 1)
    for step in range(2, 2 + skipped):
        tokens = rng.randint(1, 4)
        steps.append(Entry(step, None, Past(stop, Activations(torch.randn(1, tokens, WIDTH)))))
        stop += tokens
    for entry in steps:
        client.add(entry)
        hop.add(entry)
    for entry in steps[1:]:
        client.void(entry.step)
        pieces = client.past_after(entry.step)
        assert torch.equal(hidden_after(client, entry.step), past[:, :keep])
        assert torch.equal(
            torch.cat([piece.activations.hidden for piece in cut_off(hop.past_after(entry.step), pieces[-1].stop)], 1),
            past[:, :keep],
        )
    assert client.n_bytes == past.nbytes
    last = Entry(99, None, Past(keep, Activations(torch.randn(1, 1, WIDTH))))
    client.add(last)
    assert torch.equal(hidden_after(client, 99), torch.cat([past[:, :keep], last.past.activations.hidden], 1))


def test_past_of_many_rows_is_gathered_piece_by_piece():
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


def test_past_of_many_gathers_is_found_in_one_walk():
    """Not in one for each step: a server's event loop does that."""
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
