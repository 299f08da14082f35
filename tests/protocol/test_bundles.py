"""Steps of several sessions in one frame come out as if each had come by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.activations import Activations
from swarm.errors import InvalidMessage
from swarm.protocol.bundles import bundled, fits, unbundled
from swarm.protocol.codec import decode, encode
from swarm.protocol.messages import BUNDLE_MAX, Output, Step, Steps
from swarm.protocol.tensors import meta_of
from tests.protocol.test_messages import frame, raw_frame

often = settings(max_examples=60)


def hidden_of(seed, width=8, dtype=torch.float32):
    return torch.randn(1, 1, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(number, hidden):
    ids = {"session": f"{number % 7:032x}", "epoch": number % 3, "step": number}
    return Step(**ids, keep=5 * number, budget_ms=1000 + number, want=number % 2, hidden=meta_of(hidden))


def output(number, hidden):
    return Output(session=f"{number % 7:032x}", epoch=number % 3, step=number, hidden=meta_of(hidden))


KINDS = st.tuples(st.sampled_from([step, output]), st.sampled_from([8, 16]), st.sampled_from(["float32", "bfloat16"]))


@often
@given(st.lists(KINDS, max_size=12))
def test_messages_come_out_in_order_and_unchanged(kinds):
    parts = []
    for number, (make, width, dtype) in enumerate(kinds):
        hidden = hidden_of(number, width, getattr(torch, dtype))
        parts.append((make(number, hidden), Activations(hidden)))
    got = []
    for message, activations in bundled(parts):
        read, tensors = decode(frame(encode(message, activations)))
        got += unbundled(read, tensors)
    assert [message for message, _ in got] == [message for message, _ in parts]
    for (_, received), (_, sent) in zip(got, parts, strict=True):
        assert torch.equal(received.hidden, sent.hidden)
        assert received.is_finite()


def test_neighbours_of_one_kind_are_one_message():
    parts = [(step(number, hidden_of(number)), Activations(hidden_of(number))) for number in range(3)]
    (one,) = bundled(parts)
    assert isinstance(one[0], Steps)
    assert one[1].hidden.shape == (3, 1, 8)
    (alone,) = bundled(parts[:1])
    assert alone == parts[0]


def test_frame_has_a_bound():
    parts = [(output(number, hidden_of(number)), Activations(hidden_of(number))) for number in range(BUNDLE_MAX + 1)]
    full, rest = bundled(parts)
    assert len(full[0].sessions) == BUNDLE_MAX
    assert isinstance(rest[0], Output)


def test_one_number_that_is_none_is_found_in_its_row():
    bad = torch.full((1, 1, 8), float("nan"))
    parts = [(step(number, hidden), Activations(hidden)) for number, hidden in enumerate((hidden_of(1), bad))]
    (one,) = bundled(parts)
    message, activations = decode(frame(encode(*one)))
    assert [received.is_finite() for _, received in unbundled(message, activations)] == [True, False]


def test_only_single_positions_of_one_row_fit():
    hidden, wide, long = hidden_of(1), torch.zeros(2, 1, 8), torch.zeros(1, 2, 8)
    assert fits(step(1, hidden))
    assert fits(output(1, hidden))
    assert not fits(step(1, wide))
    assert not fits(step(1, long))
    assert not fits(step(1, hidden).model_copy(update={"rows": (0,)}))
    assert not fits(step(1, hidden).model_copy(update={"positions": meta_of(torch.zeros(1, 1, dtype=torch.int64))}))
    assert not fits(step(1, hidden).model_copy(update={"mask": meta_of(torch.zeros(1, 1, dtype=torch.uint8))}))
    assert not fits(output(1, wide))
    assert not fits(output(1, long))
    assert not fits(Output(session="0" * 32, epoch=0, step=1))


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": [0]},
        {"sessions": ["0" * 32] * 3},
        {"sessions": []},
        {"steps": [-1, 1]},
        {"hidden": {"dtype": "float32", "shape": [2, 2, 8]}},
        {"hidden": {"dtype": "float32", "shape": [2, 8]}},
        {"hidden": None},
    ],
)
def test_columns_that_do_not_fit_are_refused(change):
    header = {
        "kind": "outputs",
        "sessions": ["0" * 32, "1" * 32],
        "epochs": [0, 0],
        "steps": [1, 1],
        "hidden": {"dtype": "float32", "shape": [2, 1, 8]},
    }
    with pytest.raises(InvalidMessage):
        decode(raw_frame({**header, **change}, bytes(64)))
