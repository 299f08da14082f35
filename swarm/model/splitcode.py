"""Writes the rounding of activations to two parts of 7 bits, in LLVM's language, for products with integer weights.

Activations are float32, or bfloat16 as they are. Then results become bfloat16 in the end: a cast by torch takes up to
10 us, with all that leaves the processor's cache while weights pass, and a block has 14 of them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.model.llvmtext import Code, Dtype, Values, float32, module_of, order_of

_DECLARED = """
declare <32 x i32> @llvm.smax.v32i32(<32 x i32>, <32 x i32>)
declare <1 x i32> @llvm.smax.v1i32(<1 x i32>, <1 x i32>)
declare i32 @llvm.vector.reduce.smax.v32i32(<32 x i32>)
declare <32 x float> @llvm.roundeven.v32f32(<32 x float>)
declare <1 x float> @llvm.roundeven.v1f32(<1 x float>)
declare i32 @llvm.vector.reduce.add.v32i32(<32 x i32>)
"""


def split_code(*, in_pairs: bool = False) -> str:
    """Return a module with `split_float32` and `split_bfloat16`, and with `narrow`.

    `split_...` round as `swarm.model.integer.split` does. rows: [positions, inputs], of that dtype. parts, sums,
    factors: as `multiply_N` takes them; factors are a sixty-third of a row's peak. padded: a multiple of 64 inputs;
    behind a row's end there are zeros. chunk: as there, in inputs.

    A group of N positions has 2N rows. A row's `octets` inputs lie behind those of the row before, and then come the
    next inputs of all rows: so a loop reads from one end to the other, and its lines fit into a cache together.

    in_pairs: of 64 octets, those of 32 inputs and of the next 32, the first halves of both come first.

    `narrow` rounds `count` numbers from float32 to bfloat16, halves to the even one.
    """
    splits = [_Split(dtype, in_pairs=in_pairs).text() for dtype in ("float32", "bfloat16")]
    return module_of([*splits, _narrow()], _DECLARED)


@dataclass(frozen=True, slots=True)
class _Row:
    """The addresses of a position: of its numbers, of its group's parts and of its sums. first: octets of the former
    positions' inputs that lie before each of its own. unit: what its numbers are multiplied by.
    """

    numbers: str
    group: str
    sums: str
    first: str
    unit: str


class _Split:
    """Writes the loop over positions of one dtype."""

    def __init__(self, dtype: Dtype, *, in_pairs: bool) -> None:
        self._type = {"float32": "float", "bfloat16": "i16"}[dtype]
        self._in_pairs = in_pairs
        self._apart = 16 if in_pairs else 0  # octets of the other block between the halves of a block
        self._code = code = Code(
            f"@split_{dtype}(ptr noalias %rows, ptr noalias %parts, ptr noalias %sums, ptr noalias %factors, "
            "i64 %positions, i64 %inputs, i64 %padded, i64 %chunk, i64 %tile, i64 %octets, i64 %all)"
        )
        rounded_up = code.let("add i64 %inputs, %chunk")
        self._chunks = code.let(f"udiv i64 {code.let(f'sub i64 {rounded_up}, 1')}, %chunk")
        group_rows = code.times("%tile", 2)
        self._group_bytes, self._step = code.times(group_rows, "%padded"), code.times(group_rows, "%octets")
        self._full = code.let("and i64 %inputs, -32")  # inputs of whole blocks

    def text(self) -> str:
        """Return the function."""
        self._code.loop("0", "%positions", 1, (), self._position)
        return self._code.text()

    def _position(self, at: str) -> Values:
        """Round one position."""
        code = self._code
        numbers = code.at(self._type, "%rows", code.times(at, "%inputs"))
        group = code.at("i8", "%parts", code.times(code.let(f"udiv i64 {at}, %tile"), self._group_bytes))
        first = code.times(code.let(f"urem i64 {at}, %tile"), code.times("%octets", 2))
        sums = code.at("i32", "%sums", code.times(at, 2))
        peak = self._peak(numbers)
        unit = code.let(f"fmul float {code.let(f'fdiv float {float32(1)}, {peak}')}, {float32(63)}")  # as torch divides
        factor = code.let(f"fdiv float {peak}, {float32(63)}")
        code.do(f"store float {factor}, ptr {code.at('float', '%factors', at)}, align 4")
        row = _Row(numbers, group, sums, first, unit)

        def chunk(number: str) -> Values:
            self._chunk(row, number)
            return ()

        def fill(index: str) -> Values:
            for place in self._single(row, index):
                code.do(f"store i8 0, ptr {place}, align 1")
            return ()

        code.loop("0", self._chunks, 1, (), chunk)
        code.loop("%inputs", "%padded", 1, (), fill)
        return ()

    def _chunk(self, row: _Row, number: str) -> None:
        """Round the inputs of one chunk, and write the sums of their parts."""
        code = self._code
        start = code.times(number, "%chunk")
        end = code.let(f"add i64 {start}, %chunk")
        stop = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, %inputs')}, i64 {end}, i64 %inputs")
        whole = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, {self._full}')}, i64 {end}, i64 {self._full}")

        def many(index: str, *totals: str) -> Values:
            return self._rounded(row, index, self._places(row, index), totals, 32)

        def one(index: str, *totals: str) -> Values:
            return self._rounded(row, index, self._single(row, index), totals, 1)

        vectors = code.loop(start, whole, 32, [("<32 x i32>", "zeroinitializer")] * 2, many)
        added = [code.let(f"call i32 @llvm.vector.reduce.add.v32i32(<32 x i32> {each})") for each in vectors]
        rest = code.let(f"select i1 {code.let(f'icmp ult i64 {whole}, {start}')}, i64 {start}, i64 {whole}")
        singles = [("<1 x i32>", code.splat("i32", each, 1)) for each in added]
        place = code.at("i32", row.sums, code.times(number, "%all"))
        for half, total in enumerate(code.loop(rest, stop, 1, singles, one)):
            code.do(f"store <1 x i32> {total}, ptr {code.at('i32', place, str(half))}, align 4")

    def _places(self, row: _Row, start: str) -> Values:
        """Return where the block of 32 inputs that starts here is: of high ones, and of low ones."""
        code = self._code
        before = code.times(code.let(f"udiv i64 {start}, %octets"), self._step)
        behind = code.let(f"urem i64 {start}, %octets")
        within = code.let(f"add i64 {row.first}, {code.let(f'lshr i64 {behind}, {1 if self._in_pairs else 0}')}")
        high = code.at("i8", row.group, code.let(f"add i64 {before}, {within}"))
        return high, code.at("i8", high, "%octets")

    def _single(self, row: _Row, index: str) -> Values:
        """Return where one input is: its high part, and its low part."""
        code = self._code
        behind = code.let(f"urem i64 {index}, 32")
        within = code.let(f"add i64 {behind}, {code.let(f'and i64 {behind}, {self._apart}')}")
        high, low = self._places(row, code.let(f"sub i64 {index}, {behind}"))
        return code.at("i8", high, within), code.at("i8", low, within)

    def _bits(self, numbers: str, index: str, count: int) -> str:
        """Load some numbers. Returns the bits that they have in float32."""
        code, integers = self._code, f"<{count} x i32>"
        place = code.at(self._type, numbers, index)
        if self._type == "float":
            return code.let(f"load {integers}, ptr {place}, align 4")
        loaded = code.let(f"load <{count} x i16>, ptr {place}, align 2")
        return code.let(f"shl {integers} {code.let(f'zext <{count} x i16> {loaded} to {integers}')}, splat (i32 16)")

    def _peak(self, numbers: str) -> str:
        """Return the largest size of a row's numbers, and 2^-100 at least.

        Sizes are compared as integers, which order them alike: one instruction does. What is no number is the largest.
        """
        code = self._code

        def larger(index: str, most: str, count: int) -> Values:
            integers = f"<{count} x i32>"
            sizes = code.let(f"and {integers} {self._bits(numbers, index, count)}, splat (i32 {0x7FFFFFFF})")
            return (code.let(f"call {integers} @llvm.smax.v{count}i32({integers} {most}, {integers} {sizes})"),)

        least = struct.unpack("i", struct.pack("f", 2.0**-100))[0]
        many = [("<32 x i32>", f"splat (i32 {least})")]
        (most,) = code.loop("0", self._full, 32, many, lambda index, most: larger(index, most, 32))
        one = code.splat("i32", code.let(f"call i32 @llvm.vector.reduce.smax.v32i32(<32 x i32> {most})"), 1)
        singles = [("<1 x i32>", one)]
        (last,) = code.loop(self._full, "%inputs", 1, singles, lambda index, most: larger(index, most, 1))
        return code.let(f"bitcast <1 x i32> {last} to float")

    def _rounded(self, row: _Row, index: str, to: Sequence[str], totals: Sequence[str], count: int) -> Values:
        """Round 32 numbers or one to both of their parts; what is no number becomes zero.

        Returns totals with these added.
        """
        code, floats, integers = self._code, f"<{count} x float>", f"<{count} x i32>"
        numbers = code.let(f"bitcast {integers} {self._bits(row.numbers, index, count)} to {floats}")
        steps = code.let(f"fmul {floats} {numbers}, {code.splat('float', row.unit, count)}")
        high = code.let(f"call {floats} @llvm.roundeven.v{count}f32({floats} {steps})")
        rest = code.let(f"fmul {floats} {code.let(f'fsub {floats} {steps}, {high}')}, splat (float {float32(126)})")
        low = code.let(f"call {floats} @llvm.roundeven.v{count}f32({floats} {rest})")
        results = []
        for total, part, place in zip(totals, (high, low), to, strict=True):
            is_none = code.let(f"fcmp uno {floats} {part}, zeroinitializer")
            number = code.let(f"select <{count} x i1> {is_none}, {floats} zeroinitializer, {floats} {part}")
            rounded = code.let(f"fptosi {floats} {number} to {integers}")
            self._store(code.let(f"trunc {integers} {rounded} to <{count} x i8>"), place, count)
            results.append(code.let(f"add {integers} {total}, {rounded}"))
        return tuple(results)

    def _store(self, octets: str, place: str, count: int) -> None:
        """Write a part of 32 inputs or one; halves of 32 lie apart where they come in pairs."""
        code, half = self._code, 16
        if count == 1 or not self._apart:
            code.do(f"store <{count} x i8> {octets}, ptr {place}, align 1")
            return
        for first in (0, half):
            order = order_of(range(first, first + half), half)
            both = f"<{2 * half} x i8> {octets}, <{2 * half} x i8> poison, <{half} x i32> {order}"
            there = code.at("i8", place, str(first + self._apart if first else 0))
            code.do(f"store <{half} x i8> {code.let(f'shufflevector {both}')}, ptr {there}, align 1")


def _narrow() -> str:
    """Return the function that rounds to bfloat16: the upper half, and one more where the lower one is above half."""
    code = Code("@narrow(ptr noalias %wide, ptr noalias %narrow, i64 %count)")

    def some(index: str, count: int) -> Values:
        integers, floats = f"<{count} x i32>", f"<{count} x float>"
        bits = code.let(f"load {integers}, ptr {code.at('float', '%wide', index)}, align 4")
        odd = code.let(f"and {integers} {code.let(f'lshr {integers} {bits}, splat (i32 16)')}, splat (i32 1)")
        half = code.let(f"add {integers} {odd}, splat (i32 {0x7FFF})")
        rounded = code.let(f"add {integers} {bits}, {half}")
        is_none = code.let(f"fcmp uno {floats} {code.let(f'bitcast {integers} {bits} to {floats}')}, zeroinitializer")
        none = f"{integers} splat (i32 {0x7FC00000})"
        chosen = code.let(f"select <{count} x i1> {is_none}, {none}, {integers} {rounded}")
        upper = code.let(f"lshr {integers} {chosen}, splat (i32 16)")
        small = code.let(f"trunc {integers} {upper} to <{count} x i16>")
        code.do(f"store <{count} x i16> {small}, ptr {code.at('i16', '%narrow', index)}, align 2")
        return ()

    whole = code.let("and i64 %count, -16")
    code.loop("0", whole, 16, (), lambda index: some(index, 16))
    code.loop(whole, "%count", 1, (), lambda index: some(index, 1))
    return code.text()
