"""The kernels of `swarm.model.ongpu`, in Triton's language."""

import triton
import triton.language as tl

from swarm.model.integer import IntegerFormat

HIGH = tl.constexpr(float(IntegerFormat.high))
LOW = tl.constexpr(IntegerFormat.low)
LOW_UNIT = tl.constexpr(1 / IntegerFormat.low)
LEAST = tl.constexpr(IntegerFormat.least)
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added to a number below 2^22 and taken away again, it leaves the next integer
INPUTS_MAX = tl.constexpr(IntegerFormat.inputs_max)


@triton.jit(do_not_specialize=["count"])
def split(
    rows, parts, peaks, count, n_inputs: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    of_piece = tl.arange(0, PIECE)
    tops = tl.zeros((PIECE,), dtype=tl.float32)
    wrong = tl.zeros((PIECE,), dtype=tl.int32)  # how many are no numbers
    for start in range(0, n_inputs, PIECE):
        at = start + of_piece
        some = tl.load(rows + row * n_inputs + at, mask=at < n_inputs, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, tl.abs(some))
        wrong += (some != some).to(tl.int32)  # noqa: PLR0124 - NaN is not
    peak = tl.maximum(tl.max(tops, axis=0), LEAST)
    peak = tl.where(tl.sum(wrong, axis=0) > 0, float("nan"), peak)  # no output of such a row is a number
    tl.store(peaks + row, peak)
    unit = tl.div_rn(1.0, peak) * HIGH  # as torch divides a number by a tensor
    for start in range(0, n_inputs, PIECE):
        at = start + of_piece
        some = tl.load(rows + row * n_inputs + at, mask=at < n_inputs, other=0.0).to(tl.float32)
        steps = some * unit
        high = (steps + ROUNDER) - ROUNDER
        low = ((steps - high) * LOW + ROUNDER) - ROUNDER
        tl.store(parts + row * n_inputs + at, high.to(tl.int8), mask=at < n_inputs)
        tl.store(parts + (count + row) * n_inputs + at, low.to(tl.int8), mask=at < n_inputs)


@triton.jit
def _store(high, low, peaks, scales, output, row, out, count, n_outputs):
    """Put the sums of both parts together: float32 [rows, outputs], integers in steps of scale and peak."""
    scale = tl.load(scales + out, mask=out < n_outputs, other=0.0)[None, :]
    peak = tl.load(peaks + row, mask=row < count, other=0.0)[:, None]
    both = (low * scale) * LOW_UNIT + (high * scale)
    result = both * tl.div_rn(peak, HIGH)
    place = row.to(tl.int64)[:, None] * n_outputs + out[None, :]
    tl.store(
        output + place, result.to(output.dtype.element_ty), mask=(row < count)[:, None] & (out < n_outputs)[None, :]
    )


@triton.jit(do_not_specialize=["count"])
def int8_products(
    parts, peaks, integers, scales, output, chunk: tl.constexpr, count, n_outputs,
    n_inputs: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply by int8 [outputs, inputs]. chunk: inputs whose products are added up as integers, then in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    of_piece = tl.arange(0, INPUTS)
    activations = parts + row.to(tl.int64)[:, None] * n_inputs + of_piece[None, :]
    weights = integers + out.to(tl.int64)[None, :] * n_inputs + of_piece[:, None]
    second = count.to(tl.int64) * n_inputs
    high_sum = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    low_sum = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for begin in range(0, n_inputs, chunk):
        high = tl.zeros((ROWS, OUTPUTS), dtype=tl.int32)
        low = tl.zeros((ROWS, OUTPUTS), dtype=tl.int32)
        for start in range(begin, min(begin + chunk, n_inputs), INPUTS):
            there = of_piece < n_inputs - start
            seen = (row < count)[:, None] & there[None, :]
            weight = tl.load(weights + start, mask=(out < n_outputs)[None, :] & there[:, None], other=0)
            high = tl.dot(tl.load(activations + start, mask=seen, other=0), weight, high, out_dtype=tl.int32)
            low = tl.dot(tl.load(activations + second + start, mask=seen, other=0), weight, low, out_dtype=tl.int32)
        high_sum += high.to(tl.float32)
        low_sum += low.to(tl.float32)
    _store(high_sum, low_sum, peaks, scales, output, row, out, count, n_outputs)


@triton.jit
def unpack_int4(
    codes, numbers, tables, integers, blocks: tl.constexpr, n_inputs: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Make int8 [outputs, inputs] of codes and numbers: a program for each piece of an output's octets."""
    out = tl.program_id(0).to(tl.int64)
    octet = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    seen = octet < blocks * 16
    both = tl.load(codes + out * (blocks * 16) + octet, mask=seen, other=0)
    number = numbers + out * (blocks * 2) + octet // 16 * 2
    first = octet // 16 * 32 + octet % 16
    place = integers + out * n_inputs + first
    near = _steps(tables, number, both & 15, seen)
    far = _steps(tables, number + 1, both >> 4, seen)
    tl.store(place, near, mask=seen & (first < n_inputs))
    tl.store(place + 16, far, mask=seen & (first + 16 < n_inputs))


@triton.jit
def _steps(tables, numbers, codes, seen):
    """Look weights up: int8."""
    number = tl.load(numbers, mask=seen, other=0).to(tl.int32)
    return tl.load(tables + number * 16 + codes.to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def int4_products(
    parts, peaks, codes, numbers, tables, scales, output, blocks: tl.constexpr, count, n_outputs,
    n_inputs: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    # An octet has a weight of a block's first half, and one of its second: they meet other inputs, 16 further on.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    octet = tl.arange(0, INPUTS // 2)
    first = octet // 16 * 32 + octet % 16
    activations = parts + row.to(tl.int64)[:, None] * n_inputs + first[None, :]
    second = count.to(tl.int64) * n_inputs
    packed = codes + out.to(tl.int64)[None, :] * (blocks * 16) + octet[:, None]
    near_numbers = numbers + out.to(tl.int64)[None, :] * (blocks * 2) + (octet // 16 * 2)[:, None]
    high_sum = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    low_sum = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for chunk in range(0, n_inputs, INPUTS_MAX):  # whose sums are exact in float32, and are added up in this order
        high = tl.zeros((ROWS, OUTPUTS), dtype=tl.int32)
        low = tl.zeros((ROWS, OUTPUTS), dtype=tl.int32)
        for start in range(chunk, min(chunk + INPUTS_MAX, n_inputs), INPUTS):
            seen = (out < n_outputs)[None, :] & (start // 2 + octet < blocks * 16)[:, None]
            both = tl.load(packed + start // 2, mask=seen, other=0)
            near = _steps(tables, near_numbers + start // 16, both & 15, seen)
            far = _steps(tables, near_numbers + start // 16 + 1, both >> 4, seen)
            is_near = (row < count)[:, None] & (first < n_inputs - start)[None, :]
            is_far = (row < count)[:, None] & (first + 16 < n_inputs - start)[None, :]
            at = activations + start
            high = tl.dot(tl.load(at, mask=is_near, other=0), near, high, out_dtype=tl.int32)
            high = tl.dot(tl.load(at + 16, mask=is_far, other=0), far, high, out_dtype=tl.int32)
            low = tl.dot(tl.load(at + second, mask=is_near, other=0), near, low, out_dtype=tl.int32)
            low = tl.dot(tl.load(at + second + 16, mask=is_far, other=0), far, low, out_dtype=tl.int32)
        high_sum += high.to(tl.float32)
        low_sum += low.to(tl.float32)
    _store(high_sum, low_sum, peaks, scales, output, row, out, count, n_outputs)
