"""The wire coding int8: coded again it is the same bytes, in whatever pieces; and nothing but sound bytes gets in."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.activations import Activations, NumericClass
from swarm.errors import InvalidMessage
from swarm.protocol.bundles import bundled, unbundled
from swarm.protocol.codec import decode, encode
from swarm.protocol.int8 import Layout, decode_int8, encode_int8
from swarm.protocol.messages import Output, Step
from swarm.protocol.tensors import (
    TENSOR_BYTES_MAX,
    TensorMeta,
    coding_of,
    decode_tensors,
    encode_tensor,
    meta_of,
)
from tests.protocol.test_messages import SESSION, frame

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
often = settings(max_examples=150, deadline=None)


def bytes_of(tensor):
    return bytes(encode_int8(tensor))


def decoded(coded, like):
    return decode_int8(memoryview(bytearray(coded)), like.dtype, tuple(like.shape))


def sent(tensor):
    return decoded(bytes_of(tensor), tensor)


@st.composite
def hidden_states(draw):
    """Rows of any width, with outliers, in magnitudes from far too small to nearly too large."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 100)))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    largest = 14 if dtype is torch.float16 else 120
    exponents = torch.randint(-largest - 8, largest, shape[:2], generator=generator)[..., None]
    numbers = torch.randn(shape, generator=generator) * torch.randint(0, 2, shape, generator=generator)
    numbers[..., 0] *= draw(st.sampled_from([1.0, 3.0, 25.0]))
    bound = torch.finfo(dtype).max / 2
    return torch.ldexp(numbers, exponents).clamp(-bound, bound).to(dtype)


@often
@given(hidden_states())
def test_decoded_numbers_encode_to_the_bytes_they_came_from(hidden):
    once = bytes_of(hidden)
    received = decoded(once, hidden)
    assert bytes_of(received) == once
    assert torch.equal(sent(received), received)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_of_every_scale_encodes_to_itself(dtype):
    """All significands of a 16-bit scale, at both ends of its range and in the middle, with all codes."""
    scales = torch.float16 if dtype is torch.float16 else torch.bfloat16
    bits = 10 if scales is torch.float16 else 7
    least, most = (-14, 15) if scales is torch.float16 else (-119, 127)
    significands = 1 + torch.arange(2**bits) / 2**bits
    for exponent in (least, 0, most):
        every = torch.ldexp(significands, torch.tensor(exponent)).to(scales)
        codes = torch.arange(-127, 128, dtype=torch.int8).view(15, 17)
        codes = torch.cat([torch.full((15, 1), 127, dtype=torch.int8), codes], dim=1)
        shape = (len(every), 15 * 32)
        rows = torch.nn.functional.pad(codes, (0, 14)).reshape(1, -1).expand(len(every), -1)
        coded = every[:, None].expand(-1, 15).contiguous().view(torch.uint8).flatten()
        coded = bytes(torch.cat([coded, rows.contiguous().view(torch.uint8).flatten()]).numpy())
        assert bytes_of(decoded(coded, torch.empty(shape, dtype=dtype))) == coded


@often
@given(hidden_states(), st.data())
def test_a_positions_bytes_depend_on_it_alone(hidden, data):
    """So a past that is replayed in other pieces, gathered rows and bundles decode to the same numbers."""
    whole = sent(hidden)
    cut = data.draw(st.integers(0, hidden.shape[1]))
    parts = [sent(part) for part in (hidden[:, :cut], hidden[:, cut:]) if part.shape[1]]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(hidden) - 1), min_size=1, max_size=4)))
    assert torch.equal(sent(hidden[rows]), whole[rows])


def slow_codes(block):
    """The definition, number by number, of a block whose largest magnitude is a bfloat16."""
    scale = max(map(abs, block))
    return [round(number * 127 / scale) for number in block]


def test_the_codes_are_those_of_the_definition():
    hidden = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    layout = Layout(tuple(hidden.shape))
    codes = torch.frombuffer(bytearray(bytes_of(hidden)), dtype=torch.int8, offset=2 * layout.n_scales).view(6, 70)
    for row, coded in zip(hidden.view(6, 70).tolist(), codes.tolist(), strict=True):
        assert coded == slow_codes(row[:32]) + slow_codes(row[32:64]) + slow_codes(row[64:])


@often
@given(hidden_states())
def test_the_error_is_half_a_step_at_most(hidden):
    least = 2.0**-14 if hidden.dtype is torch.float16 else 2.0**-119
    width = hidden.shape[-1]
    for first in range(0, width, 32):
        block = hidden[..., first : first + 32].double()
        largest = block.abs().amax(dim=-1, keepdim=True)
        rounding = torch.finfo(hidden.dtype).eps if hidden.dtype is not torch.float32 else 2.0**-8
        allowed = torch.where(largest < least, largest, largest * (0.5 / 127 + rounding))
        error = (sent(hidden)[..., first : first + 32].double() - block).abs()
        assert (error <= allowed).all()


def test_a_number_takes_eight_and_a_half_bits():
    assert 8 * meta_of(torch.zeros(1, 4, 8192), "int8").sent_bytes / (4 * 8192) == 8.5


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_none_are_not_made_finite(number, dtype):
    hidden = torch.ones(1, 2, 64, dtype=dtype)
    hidden[0, 1, 40] = number
    received = Activations(sent(hidden))
    assert not received.is_finite()
    assert torch.equal(received.hidden[0, 0], hidden[0, 0])


@pytest.mark.parametrize("scale", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"], ids=["nan", "inf", "-inf"])
def test_scales_that_are_no_numbers_give_no_numbers(scale):
    coded = bytearray(bytes_of(torch.ones(1, 1, 64)))
    coded[:2] = scale
    meta = TensorMeta(dtype="float32", shape=(1, 1, 64), coding="int8")
    (hidden,) = decode_tensors((meta,), memoryview(coded))
    assert not Activations(hidden).is_finite()


@pytest.mark.parametrize("change", [-2, -1, 1, 2, 64])
def test_bytes_that_do_not_fit_the_blocks_are_invalid(change):
    coded = bytes_of(torch.ones(2, 3, 40))
    coded = coded[:change] if change < 0 else coded + bytes(change)
    meta = TensorMeta(dtype="float32", shape=(2, 3, 40), coding="int8")
    with pytest.raises(InvalidMessage):
        decode_tensors((meta,), memoryview(bytearray(coded)))


def test_whole_numbers_do_not_travel_coded():
    meta = TensorMeta(dtype="int64", shape=(1, 32), coding="int8")
    with pytest.raises(InvalidMessage, match="int64"):
        decode_tensors((meta,), memoryview(bytearray(meta.sent_bytes)))


def test_what_would_be_too_large_decoded_is_not_decoded():
    meta = TensorMeta(dtype="float32", shape=(1, 1, TENSOR_BYTES_MAX // 4 + 32), coding="int8")
    with pytest.raises(InvalidMessage, match="once it is decoded"):
        decode_tensors((meta,), memoryview(bytearray(meta.sent_bytes)))


def test_an_unknown_coding_is_refused():
    assert coding_of("") is None
    assert coding_of("int8") == "int8"
    with pytest.raises(ValueError, match="int4"):
        coding_of("int4")
    with pytest.raises(ValueError, match="coding"):
        TensorMeta(dtype="float32", shape=(1,), coding="int4")


def test_a_coded_step_comes_out_with_its_plain_positions_and_mask():
    hidden, positions = torch.randn(2, 3, 40), torch.arange(3)[None]
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.uint8)
    metas = {"hidden": meta_of(hidden, "int8"), "positions": meta_of(positions), "mask": meta_of(mask)}
    message = Step(session=SESSION, epoch=0, step=1, keep=0, budget_ms=1, want=1, **metas)
    again, got = decode(frame(encode(message, Activations(hidden, positions, mask))))
    assert again == message
    assert torch.equal(got.hidden, sent(hidden))
    assert torch.equal(got.positions, positions)
    assert torch.equal(got.mask, mask)
    relayed, passed_on = decode(frame(encode(again, got)))
    assert relayed == message
    assert torch.equal(passed_on.hidden, got.hidden)


def test_steps_in_one_frame_are_coded_as_each_would_be():
    hidden = [torch.randn(1, 1, 40) for _ in range(4)]
    codings = ["int8", "int8", None, "int8"]
    parts = [
        (Output(session=SESSION, epoch=0, step=n, hidden=meta_of(one, coding)), Activations(one))
        for n, (one, coding) in enumerate(zip(hidden, codings, strict=True), 1)
    ]
    frames = [decode(frame(encode(*part))) for part in bundled(parts)]
    got = [one for each in frames for one in unbundled(*each)]
    assert len(frames) == 3
    assert [message for message, _ in got] == [message for message, _ in parts]
    for (_, received), one, coding in zip(got, hidden, codings, strict=True):
        assert torch.equal(received.hidden, sent(one) if coding else one)


def test_a_plain_header_does_not_name_a_coding():
    hidden = torch.randn(1, 1, 8)
    header = encode(Output(session=SESSION, epoch=0, step=1, hidden=meta_of(hidden)), Activations(hidden))[0]
    assert b"coding" not in bytes(header)
    assert bytes(encode_tensor(hidden)) == hidden.numpy().tobytes()


def test_a_coded_session_has_a_numeric_class_of_its_own():
    assert str(NumericClass("bfloat16").sent("int8")) == "bfloat16++int8"
    assert str(NumericClass("bfloat16", "fp8").sent("int8")) == "bfloat16+fp8+int8"
    assert NumericClass.parse("bfloat16++int8") == NumericClass("bfloat16", wire="int8")
    assert NumericClass("bfloat16").sent(None) == NumericClass("bfloat16")
