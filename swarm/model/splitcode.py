"""Writes the rounding of activations to two parts of 7 bits, in LLVM's language, for products with integer weights."""

import struct
from collections.abc import Sequence

from swarm.model.llvmtext import Code, Values, float32, module_of, order_of

_DECLARED = """
declare <32 x i32> @llvm.smax.v32i32(<32 x i32>, <32 x i32>)
declare <1 x i32> @llvm.smax.v1i32(<1 x i32>, <1 x i32>)
declare i32 @llvm.vector.reduce.smax.v32i32(<32 x i32>)
declare <32 x float> @llvm.roundeven.v32f32(<32 x float>)
declare <1 x float> @llvm.roundeven.v1f32(<1 x float>)
declare i32 @llvm.vector.reduce.add.v32i32(<32 x i32>)
"""


def split_code(*, in_pairs: bool = False) -> str:
    """Return a module with `split`, which rounds as `swarm.model.integer.split` does.

    rows: float32 [positions, inputs]. parts, sums, factors: as `multiply_N` takes them; factors are a sixty-third of a
    row's peak. padded: a multiple of 64 inputs; behind a row's end there are zeros. chunk: as there, in inputs.

    A group of N positions has 2N rows. A row's `octets` inputs lie behind those of the row before, and then come the
    next inputs of all rows: so a loop reads from one end to the other, and its lines fit into a cache together.

    in_pairs: of 64 octets, those of 32 inputs and of the next 32, the first halves of both come first.
    """
    apart = 16 if in_pairs else 0  # octets of the other block between the halves of a block
    code = Code(
        "@split(ptr noalias %rows, ptr noalias %parts, ptr noalias %sums, ptr noalias %factors, i64 %positions, "
        "i64 %inputs, i64 %padded, i64 %chunk, i64 %tile, i64 %octets, i64 %all)"
    )
    rounded_up = code.let("add i64 %inputs, %chunk")
    chunks = code.let(f"udiv i64 {code.let(f'sub i64 {rounded_up}, 1')}, %chunk")
    group_rows = code.times("%tile", 2)
    group_bytes, step = code.times(group_rows, "%padded"), code.times(group_rows, "%octets")
    full = code.let("and i64 %inputs, -32")

    def position(at: str) -> Values:
        row = code.at("float", "%rows", code.times(at, "%inputs"))
        group = code.at("i8", "%parts", code.times(code.let(f"udiv i64 {at}, %tile"), group_bytes))
        first = code.times(code.let(f"urem i64 {at}, %tile"), code.times("%octets", 2))
        sums = code.at("i32", "%sums", code.times(at, 2))

        def places(start: str) -> Values:
            """Return where the block of 32 inputs that starts here is: of high ones, and of low ones."""
            before = code.times(code.let(f"udiv i64 {start}, %octets"), step)
            behind = code.let(f"urem i64 {start}, %octets")
            within = code.let(f"add i64 {first}, {code.let(f'lshr i64 {behind}, {1 if in_pairs else 0}')}")
            high = code.at("i8", group, code.let(f"add i64 {before}, {within}"))
            return high, code.at("i8", high, "%octets")

        def single(index: str) -> Values:
            """Return where one input is: its high part, and its low part."""
            behind = code.let(f"urem i64 {index}, 32")
            within = code.let(f"add i64 {behind}, {code.let(f'and i64 {behind}, {apart}')}")
            high, low = places(code.let(f"sub i64 {index}, {behind}"))
            return code.at("i8", high, within), code.at("i8", low, within)

        peak = _peak(code, row, full)
        unit = code.let(f"fmul float {code.let(f'fdiv float {float32(1)}, {peak}')}, {float32(63)}")  # as torch divides
        factor = code.let(f"fdiv float {peak}, {float32(63)}")
        code.do(f"store float {factor}, ptr {code.at('float', '%factors', at)}, align 4")

        def chunk(number: str) -> Values:
            start = code.times(number, "%chunk")
            end = code.let(f"add i64 {start}, %chunk")
            stop = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, %inputs')}, i64 {end}, i64 %inputs")
            whole = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, {full}')}, i64 {end}, i64 {full}")

            def many(index: str, *totals: str) -> Values:
                return _rounded(code, code.at("float", row, index), places(index), unit, totals, 32, apart)

            def one(index: str, *totals: str) -> Values:
                return _rounded(code, code.at("float", row, index), single(index), unit, totals, 1)

            vectors = code.loop(start, whole, 32, [("<32 x i32>", "zeroinitializer")] * 2, many)
            added = [code.let(f"call i32 @llvm.vector.reduce.add.v32i32(<32 x i32> {each})") for each in vectors]
            rest = code.let(f"select i1 {code.let(f'icmp ult i64 {whole}, {start}')}, i64 {start}, i64 {whole}")
            singles = [("<1 x i32>", code.splat("i32", each, 1)) for each in added]
            place = code.at("i32", sums, code.times(number, "%all"))
            for half, total in enumerate(code.loop(rest, stop, 1, singles, one)):
                code.do(f"store <1 x i32> {total}, ptr {code.at('i32', place, str(half))}, align 4")
            return ()

        def fill(index: str) -> Values:
            for place in single(index):
                code.do(f"store i8 0, ptr {place}, align 1")
            return ()

        code.loop("0", chunks, 1, (), chunk)
        code.loop("%inputs", "%padded", 1, (), fill)
        return ()

    code.loop("0", "%positions", 1, (), position)
    return module_of([code.text()], _DECLARED)


def _peak(code: Code, row: str, whole: str) -> str:
    """Return the largest size of a row's numbers, and 2^-100 at least. whole: how many of them are in full blocks.

    Sizes are compared as integers, which order them alike: one instruction does. What is no number is the largest.
    """

    def larger(index: str, most: str, count: int) -> Values:
        integers = f"<{count} x i32>"
        numbers = code.let(f"load {integers}, ptr {code.at('float', row, index)}, align 4")
        sizes = code.let(f"and {integers} {numbers}, splat (i32 {0x7FFFFFFF})")
        return (code.let(f"call {integers} @llvm.smax.v{count}i32({integers} {most}, {integers} {sizes})"),)

    least = struct.unpack("i", struct.pack("f", 2.0**-100))[0]
    many = [("<32 x i32>", f"splat (i32 {least})")]
    (most,) = code.loop("0", whole, 32, many, lambda index, most: larger(index, most, 32))
    one = code.splat("i32", code.let(f"call i32 @llvm.vector.reduce.smax.v32i32(<32 x i32> {most})"), 1)
    (last,) = code.loop(whole, "%inputs", 1, [("<1 x i32>", one)], lambda index, most: larger(index, most, 1))
    return code.let(f"bitcast <1 x i32> {last} to float")


def _rounded(
    code: Code, from_: str, to: Sequence[str], unit: str, totals: Sequence[str], count: int, apart: int = 0
) -> Values:
    """Round some numbers to both of their parts; what is no number becomes zero. Returns totals with these added.

    apart: octets between the halves of 32 numbers, in memory.
    """
    floats, octets, integers = f"<{count} x float>", f"<{count} x i8>", f"<{count} x i32>"
    numbers = code.let(f"load {floats}, ptr {from_}, align 4")
    steps = code.let(f"fmul {floats} {numbers}, {code.splat('float', unit, count)}")
    high = code.let(f"call {floats} @llvm.roundeven.v{count}f32({floats} {steps})")
    rest = code.let(f"fmul {floats} {code.let(f'fsub {floats} {steps}, {high}')}, splat (float {float32(126)})")
    low = code.let(f"call {floats} @llvm.roundeven.v{count}f32({floats} {rest})")
    results = []
    for total, part, place in zip(totals, (high, low), to, strict=True):
        is_none = code.let(f"fcmp uno {floats} {part}, zeroinitializer")
        number = code.let(f"select <{count} x i1> {is_none}, {floats} zeroinitializer, {floats} {part}")
        rounded = code.let(f"fptosi {floats} {number} to {integers}")
        small = code.let(f"trunc {integers} {rounded} to {octets}")
        if apart:
            _store_halves(code, small, place, count // 2, apart)
        else:
            code.do(f"store {octets} {small}, ptr {place}, align 1")
        results.append(code.let(f"add {integers} {total}, {rounded}"))
    return tuple(results)


def _store_halves(code: Code, octets: str, place: str, half: int, apart: int) -> None:
    for first in (0, half):
        order = order_of(range(first, first + half), half)
        both = f"<{2 * half} x i8> {octets}, <{2 * half} x i8> poison, <{half} x i32> {order}"
        there = code.at("i8", place, str(first + apart if first else 0))
        code.do(f"store <{half} x i8> {code.let(f'shufflevector {both}')}, ptr {there}, align 1")
