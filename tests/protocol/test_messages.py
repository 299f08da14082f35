"""Messages and tensors: what goes in comes out, and nothing else gets in."""

import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.activations import Activations
from swarm.errors import InvalidMessage
from swarm.protocol.codec import decode, encode
from swarm.protocol.messages import Close, Open, Output, Refused, Step
from swarm.protocol.tensors import TENSOR_BYTES_MAX, TensorMeta, decode_tensors, encode_tensor, meta_of

SESSION = "0123456789abcdef" * 2


def frame(parts):
    return memoryview(bytearray(b"".join(parts)))


def raw_frame(header, payload=b""):
    text = json.dumps(header).encode()
    return memoryview(bytearray(len(text).to_bytes(2, "big") + text + payload))


def step(hidden, **fields):
    return Step(session=SESSION, epoch=0, step=1, keep=0, budget_ms=1, want=1, hidden=meta_of(hidden), **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_step_comes_out_as_it_went_in(dtype):
    hidden = torch.randn(2, 3, 8).to(dtype)
    positions = torch.arange(3)[None]
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.uint8)
    message = step(hidden, rows=(1, 0), positions=meta_of(positions), mask=meta_of(mask))
    decoded, got = decode(frame(encode(message, Activations(hidden, positions, mask))))
    assert decoded == message
    for sent, received in zip((hidden, positions, mask), (got.hidden, got.positions, got.mask), strict=True):
        assert torch.equal(sent, received)
        assert sent.dtype == received.dtype


def test_tensors_lie_aligned_and_are_not_copied():
    hidden = torch.randn(1, 4, 16)
    plaintext = frame(encode(step(hidden), Activations(hidden)))
    got = decode(plaintext)[1].hidden
    assert got.data_ptr() % 16 == torch.frombuffer(plaintext, dtype=torch.uint8).data_ptr() % 16
    plaintext[-1] ^= 0xFF
    assert not torch.equal(hidden, got)


def test_a_strided_tensor_is_sent_as_what_it_shows():
    whole = torch.randn(2, 6, 8)
    part = whole[:, 2:4]
    (got,) = decode_tensors((meta_of(part),), memoryview(bytearray(encode_tensor(part))))
    assert torch.equal(part, got)


def test_an_output_may_carry_nothing():
    message = Output(session=SESSION, epoch=0, step=3)
    assert decode(frame(encode(message))) == (message, None)


def test_an_unknown_optional_field_is_ignored():
    message, _ = decode(raw_frame({"kind": "close", "session": SESSION, "colour": "blue"}))
    assert message == Close(session=SESSION)


@pytest.mark.parametrize(
    "header",
    [
        {"kind": "close"},
        {"kind": "close", "session": "x" * 32},
        {"kind": "close", "session": 7},
        {"kind": "nonsense", "session": SESSION},
        {"kind": "refused", "session": SESSION, "epoch": 0, "code": "because", "why": ""},
        {"kind": "refused", "session": SESSION, "epoch": 0, "code": "no_room", "why": "x" * 301},
        {"kind": "refused", "session": SESSION, "epoch": -1, "code": "no_room", "why": ""},
        {"kind": "refused", "session": SESSION, "epoch": True, "code": "no_room", "why": ""},
        {"kind": "output", "session": SESSION, "epoch": 0, "step": 1 << 41},
        {"kind": "output", "session": SESSION, "epoch": 0, "step": 1, "hidden": {"dtype": "object", "shape": [1]}},
        {"kind": "output", "session": SESSION, "epoch": 0, "step": 1, "hidden": {"dtype": "float32", "shape": []}},
        {"kind": "output", "session": SESSION, "epoch": 0, "step": 1, "hidden": {"dtype": "float32", "shape": [0]}},
        {"kind": "output", "session": SESSION, "epoch": 0, "step": 1, "hidden": {"dtype": "float32", "shape": [-1]}},
        {"kind": "output", "session": SESSION, "epoch": 0, "step": 1, "hidden": {"dtype": "uint8", "shape": [1] * 4}},
        [],
        None,
    ],
)
def test_a_header_out_of_its_ranges_is_invalid(header):
    with pytest.raises(InvalidMessage):
        decode(raw_frame(header))


def test_a_shape_that_claims_more_than_there_is_allocates_nothing():
    claims = TensorMeta(dtype="float32", shape=(TENSOR_BYTES_MAX, TENSOR_BYTES_MAX, TENSOR_BYTES_MAX))
    with pytest.raises(InvalidMessage):
        decode_tensors((claims,), memoryview(bytearray(64)))


@pytest.mark.parametrize("change", [-1, 1, 16])
def test_bytes_that_do_not_match_the_shape_are_invalid(change):
    hidden = torch.randn(1, 2, 8)
    plaintext = b"".join(encode(step(hidden), Activations(hidden)))
    plaintext = plaintext[:change] if change < 0 else plaintext + bytes(change)
    with pytest.raises(InvalidMessage):
        decode(memoryview(bytearray(plaintext)))


def test_a_record_in_an_open_is_bounded():
    with pytest.raises(ValueError, match="next_record"):
        Open(
            session=SESSION,
            epoch=0,
            root="0" * 64,
            numeric_class="float32",
            start=0,
            stop=1,
            positions_max=1,
            rollback_max=0,
            next_record="A" * 5000,
        )


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_message_or_invalid(data):
    with contextlib.suppress(InvalidMessage):
        decode(memoryview(bytearray(data)))


@given(
    st.dictionaries(
        st.sampled_from(["kind", "session", "epoch", "step", "keep", "rows", "want", "hidden", "code", "why", "nonce"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False),
            st.sampled_from(["step", "output", "open", "ping", SESSION]),
            st.lists(st.integers(), max_size=4),
            st.fixed_dictionaries(
                {"dtype": st.sampled_from(["float32", "int64", "x"]), "shape": st.lists(st.integers())}
            ),
        ),
    ),
    st.binary(max_size=64),
)
def test_arbitrary_headers_are_a_message_or_invalid(header, payload):
    with contextlib.suppress(InvalidMessage):
        decode(raw_frame(header, payload))


def test_refusals_carry_when_to_come_back():
    message = Refused(session=SESSION, epoch=0, step=4, code="no_room", why="full", retry_after_ms=250)
    assert decode(frame(encode(message))) == (message, None)
