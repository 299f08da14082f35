"""Tallies and receipts: two ends of a wire have the same digests, whatever wires and repairs do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.activations import Activations
from swarm.identity import Identity
from swarm.protocol import receipts
from swarm.protocol.codec import decode, encode
from swarm.protocol.inbox import Again, Inbox, New
from swarm.protocol.journal import Entry, Journal, JournalLimits, Past, rebuild_messages
from swarm.protocol.messages import Rebuild, Step
from swarm.protocol.receipts import Receipt, ReceiptLimits, Statement, Tally
from swarm.protocol.tensors import metas_of
from tests.protocol.test_journal import steps_of
from tests.protocol.test_messages import SESSION, frame

often = settings(max_examples=30, deadline=None)
RANDOM = st.randoms(use_true_random=False)
CODINGS = st.sampled_from([None, "int8"])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ALICE = Identity(b"a" * 32)


def travelled(message, activations):
    """The activations as the other end of a wire decodes them."""
    received = decode(frame(encode(message, activations)))[1]
    assert received is not None
    return received


def step_of(entry, activations, coding):
    metas = metas_of(activations, coding)
    return Step(
        session=SESSION, epoch=1, step=entry.step, keep=entry.past.start, rows=entry.rows, budget_ms=1, want=1,
        hidden=metas.hidden, positions=metas.positions, mask=metas.mask,
    )  # fmt: skip


def steps_without_gathers(rng, dtype=torch.float32):
    """Steps of one session with rollbacks, positions and padding, and what a hop makes of each."""
    for entry, _ in steps_of(rng):
        if entry.rows is None or entry.past.start == 0:
            given = entry.past.activations
            yield entry, Activations(given.hidden.to(dtype), given.positions, given.mask)
        else:
            return


@often
@given(RANDOM, CODINGS, DTYPES)
def test_outputs_of_a_hop_are_the_inputs_of_the_next_one(rng, coding, dtype):
    """Over a wire that loses and repeats: each step is noted once at either end, when it was computed."""
    first, second = Tally(coding), Tally(coding)
    inbox: Inbox[str] = Inbox()
    for entry, given_ in steps_without_gathers(rng, dtype):
        output = Activations(given_.hidden * 2 + 1, given_.positions, given_.mask)
        first.add(entry.past.start, given_, output.hidden, gathered=entry.rows is not None)
        message = step_of(entry, output, coding)
        for _ in range(rng.randint(1, 3)):
            verdict = inbox.offer(message.step)
            if isinstance(verdict, New):
                inbox.accept(message.step)
                received = travelled(message, output)
                second.add(message.keep, received, None, gathered=message.rows is not None)
                inbox.computed(message.step, "answer", 0, lambda _: True)
            else:
                assert isinstance(verdict, Again)
    assert (first.outputs, first.length) == (second.inputs, second.length)
    assert first.told == first.length
    assert second.told == 0
    assert first.inputs != first.outputs


@often
@given(RANDOM, CODINGS, DTYPES, st.integers(1, 400))
def test_a_past_that_is_rebuilt_has_the_digests_that_it_had(rng, coding, dtype, chunk_bytes):
    """A replacement gets the journal's past in other pieces, and its tally says what the one before it would say."""
    before, after, journal = Tally(coding), Tally(coding), Journal(JournalLimits(steps_unfolded_max=6))
    last = 0
    for entry, sent in steps_without_gathers(rng, dtype):
        journal.add(Entry(entry.step, entry.rows, Past(entry.past.start, sent)))
        before.add(entry.past.start, travelled(step_of(entry, sent, coding), sent), None)
        last = entry.step
    after.add(0, Activations(torch.randn(2, 3, 4)), None)  # of an older route
    after.reset()
    for message, piece in rebuild_messages(SESSION, 2, journal.past_after(last), 1, chunk_bytes, None, coding):
        assert isinstance(message, Rebuild)
        after.add(message.start, travelled(message, piece), None)
    assert (after.inputs, after.length, after.lost) == (before.inputs, before.length, "")
    assert after.told == 0, "nothing of it went on"


@often
@given(RANDOM, CODINGS, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.booleans()), max_size=24))
def test_positions_hashed_together_have_the_digests_of_each_alone(rng, coding, script):
    """Of steps with rollbacks, some of two positions, some whose outputs go nowhere, of one dtype or of two."""
    torch.manual_seed(rng.randrange(1 << 30))
    tallies = [Tally(coding, ReceiptLimits(together=n)) for n in (1, 3, 16)]
    at = 0
    for back, tokens, is_told in script:
        at = max(0, at - back)
        hidden = torch.randn(2, tokens, 128).to(rng.choice([torch.bfloat16] * 5 + [torch.float32]))
        for tally in tallies:
            tally.add(at, Activations(hidden), -hidden if is_told else None)
        at += tokens
        if rng.random() < 0.2:
            assert len({tally.outputs for tally in tallies}) == 1
    assert len({(tally.length, tally.told, tally.inputs, tally.outputs) for tally in tallies}) == 1
    assert tallies[0].length == at


@pytest.mark.parametrize("odd", ["dtype", "position", "mask"])
def test_a_step_unlike_the_others_keeps_its_own_digest(odd):
    hidden = torch.randn(1, 1, 64)
    steps = [Activations(hidden.clone()) for _ in range(3)]
    steps[1] = {
        "dtype": Activations(hidden.bfloat16()),
        "position": Activations(hidden, positions=torch.tensor([[7]])),
        "mask": Activations(hidden, mask=torch.zeros(1, 1, dtype=torch.uint8)),
    }[odd]
    alone, together = Tally(limits=ReceiptLimits(together=1)), Tally()
    for at, step in enumerate(steps):
        for tally in (alone, together):
            tally.add(at, step, step.hidden)
    assert (together.inputs, together.outputs) == (alone.inputs, alone.outputs)


@pytest.mark.parametrize(("rows", "held"), [(1, 15), (32, 0)])
def test_only_small_activations_are_held_until_they_are_hashed(rows, held):
    tally, hidden = Tally(), torch.zeros(rows, 1, 2048)
    for at in range(15):
        tally.add(at, Activations(hidden.clone()), None)
    assert len(tally._noted) == held
    assert tally.length == 15


def test_a_tally_is_summed_once_until_it_has_more(monkeypatch):
    tally, hidden, summed = Tally(), torch.randn(1, 4, 8), []
    whole = receipts._whole
    monkeypatch.setattr(receipts, "_whole", lambda parts: summed.append(len(parts)) or whole(parts))
    tally.add(0, Activations(hidden), hidden)
    for _ in range(3):
        first = tally.told, tally.inputs, tally.outputs
    assert len(summed) == 2
    tally.add(4, Activations(hidden[:, :1]), hidden[:, :1])
    assert (tally.told, tally.inputs) != first[:2]
    tally.add(4, Activations(hidden[:, 1:2]), None)  # taken back
    assert tally.told == 4
    assert len(summed) == 6


def test_outputs_that_were_not_wanted_are_told_as_such():
    tally, other = Tally(), Tally()
    hidden = torch.randn(1, 4, 8)
    tally.add(0, Activations(hidden), hidden[:, 3:] + 1)
    other.add(0, Activations(hidden), hidden + 1)
    assert (tally.told, other.told) == (1, 4)
    assert tally.inputs == other.inputs
    assert tally.outputs != other.outputs


@pytest.mark.parametrize("change", ["a number", "two positions", "an id", "padding", "the dtype", "the rows"])
def test_any_change_of_an_input_changes_the_digest(change):
    hidden, ids = torch.randn(2, 3, 4), torch.arange(3)[None]
    mask = torch.ones(2, 3, dtype=torch.uint8)
    plain, told, other = Tally(), Tally(), Tally()
    plain.add(0, Activations(hidden), None)
    told.add(0, Activations(hidden, ids, mask), None)
    assert plain.inputs == told.inputs, "what is left out means the same as what is said"
    changed, ids, mask = hidden.clone(), ids.clone(), mask.clone()
    match change:
        case "a number":
            changed[1, 2, 3] = changed[1, 2, 3].nextafter(torch.tensor(9.0))
        case "two positions":
            changed[:, [0, 1]] = changed[:, [1, 0]]
        case "an id":
            ids[0, 1] = 2
        case "padding":
            mask[1, 0] = 0
        case "the dtype":
            changed = changed.view(torch.int32).view(torch.float32).to(torch.float64).to(torch.bfloat16)
        case "the rows":
            changed = changed[[1, 0]]
    other.add(0, Activations(changed, ids, mask), None)
    assert other.inputs != plain.inputs


def test_a_tally_that_cannot_be_told_is_lost_until_the_session_begins_anew():
    some = Activations(torch.randn(2, 3, 4))
    tally = Tally(limits=ReceiptLimits(positions_max=5))
    for spoil, why in (
        (lambda: tally.add(3, some, None, gathered=True), "gathered"),
        (lambda: tally.add(4, some, None), "past"),
        (lambda: tally.add(3, Activations(torch.randn(1, 1, 4)), None), "past"),
        (lambda: tally.add(3, some, None), "more than 5"),
        (lambda: tally.lose("it began with a kept past"), "kept"),
    ):
        tally.add(0, some, None)
        assert (tally.length, tally.lost) == (3, "")
        spoil()
        assert why in tally.lost
        tally.add(3, some, None)
        assert tally.length == 0


def statement(**changes):
    digest = "0" * 64
    fields = {
        "peer": ALICE.public_key.hex(), "session": SESSION, "root": digest, "numeric_class": "float32", "start": 0,
        "stop": 4, "rows": 1, "length": 3, "told": 3, "inputs": digest, "outputs": digest, "issued": 1_800_000_000,
    }  # fmt: skip
    return Statement(**fields | changes)


def test_a_receipt_is_read_as_it_was_signed():
    receipt = Receipt.sign(statement(), ALICE)
    assert Receipt.read(receipt.text, receipt.signature) == receipt
    assert receipt.statement.peer_id == ALICE.peer_id


@pytest.mark.parametrize(
    "changes",
    [{"length": 2}, {"outputs": "1" * 64}, {"stop": 5}, {"root": "1" * 64}, {"numeric_class": "bfloat16"}, {"told": 2},
     {"peer": Identity(b"b" * 32).public_key.hex()}, {"session": "1" * 32}, {"issued": 1}],
)  # fmt: skip
def test_a_receipt_with_another_word_is_not_signed(changes):
    signature = Receipt.sign(statement(), ALICE).signature
    with pytest.raises(ValueError, match="signature"):
        Receipt.read(statement(**changes).model_dump_json(), signature)


@pytest.mark.parametrize("name", ["x\nserver   12D3KooW", "float32\x1b[1A", "a+b+c+d", ""])
def test_a_receipt_of_no_numeric_class_is_refused(name):
    receipt = Receipt.sign(statement().model_copy(update={"numeric_class": name}), ALICE)
    with pytest.raises(ValueError, match="numeric_class"):
        Receipt.read(receipt.text, receipt.signature)


def test_a_signature_for_another_purpose_is_none():
    text = statement().model_dump_json()
    with pytest.raises(ValueError, match="signature"):
        Receipt.read(text, ALICE.sign(b"swarm channel responder", text.encode()).hex())
