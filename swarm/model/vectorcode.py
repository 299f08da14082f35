"""Writes the loops over integer weights in LLVM's language, for the vectors of one kind of processor.

A loop unpacks 32 weights of an output into a vector of octets, once, and multiplies them by the activations of several
positions, whose sums each have a register. Processors have instructions for dot products of octets without a sign, here
the weights, and octets with one:

    avx512vnni, avxvnni    vpdpbusd           adds up four products in 32 bits; the former has 32 registers, not 16
    avx2                   vpmaddubsw, ...    adds up two in 16 bits: 2 * 255 * 63 < 2^15, so activations have 7 bits
    ssse3, neon            plain vectors      LLVM takes what the processor has

A step of -127 to 127 gets 128 more, so that it has no sign. 128 times the sum of the activations is taken away from the
sum of a chunk of inputs. That is exact, so all processors compute the same bits. Chunks are then added up in float32,
one after the other.
"""

from collections.abc import Sequence
from typing import Literal

from swarm.model.llvmtext import Code, Values, float32, module_of, order_of

Kind = Literal["avx512vnni", "avxvnni", "avx2", "ssse3", "neon"]
Weights = Literal["int8", "int4", "own4"]

_DECLARED = """
declare <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32>, <32 x i8>, <32 x i8>)
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)
declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)
declare <16 x i8> @llvm.aarch64.neon.tbl1.v16i8(<16 x i8>, <16 x i8>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i32 @llvm.vector.reduce.add.v8i32(<8 x i32>)
declare float @llvm.maximum.f32(float, float)
declare float @llvm.fabs.f32(float)
declare float @llvm.roundeven.f32(float)
declare i8 @llvm.fptosi.sat.i8.f32(float)
"""


def tiles_of(kind: Kind) -> tuple[int, ...]:
    """Return for how many positions at once there are loops, most first: their sums and the weights fit registers."""
    return (8, 4, 2, 1) if kind == "avx512vnni" else (4, 2, 1)


def code_of(weights: Weights, kind: Kind) -> str:
    """Return a module with `split`, and with `multiply_N` for N positions at once, N of `tiles_of`."""
    functions = [_split()] + [_multiply(weights, kind, tile) for tile in tiles_of(kind)]
    return module_of(functions, _DECLARED)


def _multiply(weights: Weights, kind: Kind, tile: int) -> str:
    """Write the loop for groups of `tile` positions: all outputs for the first group, then for the next.

    blocks: of 32 inputs, of a row of weights. chunk: how many of them are added up as integers. parts: int8 [positions,
    2, 32 * blocks], high and low. sums: int32 [positions, 2, chunks] of them. factors: float32 [positions]. output:
    float32, a position's first number `stride` behind that of the one before.
    """
    code = Code(
        f"@multiply_{tile}(ptr noalias %weights, ptr noalias %numbers, ptr noalias %scales, ptr noalias %table, "
        "ptr noalias %parts, ptr noalias %sums, ptr noalias %factors, ptr noalias %output, "
        "i64 %groups, i64 %outputs, i64 %blocks, i64 %chunk, i64 %stride)"
    )
    rows = range(2 * tile)
    row_bytes = code.times("%blocks", 32 if weights == "int8" else 16)
    part_bytes = code.times("%blocks", 32)
    rounded_up = code.let("add i64 %blocks, %chunk")
    chunks = code.let(f"udiv i64 {code.let(f'sub i64 {rounded_up}, 1')}, %chunk")
    per_output = code.times("%blocks", 2) if weights == "int4" else chunks

    def group(at: str) -> Values:
        first = code.times(at, tile)
        first_row = code.times(first, 2)
        parts = [
            code.at("i8", "%parts", code.times(code.let(f"add i64 {first_row}, {row}"), part_bytes)) for row in rows
        ]
        sums = [code.at("i32", "%sums", code.times(code.let(f"add i64 {first_row}, {row}"), chunks)) for row in rows]

        def one(output: str) -> Values:
            weight_row = code.at("i8", "%weights", code.times(output, row_bytes))
            number_row = code.at("i8", "%numbers", code.times(output, per_output))
            scale_row = code.at("float", "%scales", code.times(output, chunks) if weights == "own4" else output)

            def part(chunk: str, *totals: str) -> Values:
                start = code.times(chunk, "%chunk")
                end = code.let(f"add i64 {start}, %chunk")
                stop = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, %blocks')}, i64 {end}, i64 %blocks")
                exact = _dots(code, weights, kind, parts, (weight_row, number_row), (start, stop))
                if weights == "own4":
                    zero = code.let(f"load i8, ptr {code.at('i8', number_row, chunk)}, align 1")
                    above = code.let(f"zext i8 {zero} to i32")
                    scale = code.let(f"load float, ptr {code.at('float', scale_row, chunk)}, align 4")
                results = []
                for total, sum_, of_row in zip(totals, exact, sums, strict=True):
                    told = code.let(f"load i32, ptr {code.at('i32', of_row, chunk)}, align 4")
                    less = code.let(f"mul i32 {told}, {above if weights == 'own4' else 128}")
                    number = code.let(f"sitofp i32 {code.let(f'sub i32 {sum_}, {less}')} to float")
                    if weights == "own4":
                        number = code.let(f"fmul float {number}, {scale}")
                    results.append(code.let(f"fadd float {total}, {number}"))
                return tuple(results)

            totals = code.loop("0", chunks, 1, [("float", "0.0")] * len(rows), part)
            if weights != "own4":
                scale = code.let(f"load float, ptr {scale_row}, align 4")
                totals = tuple(code.let(f"fmul float {total}, {scale}") for total in totals)
            for number, (high, low) in enumerate(zip(totals[::2], totals[1::2], strict=True)):
                position = code.let(f"add i64 {first}, {number}")
                factor = code.let(f"load float, ptr {code.at('float', '%factors', position)}, align 4")
                less = code.let(f"fmul float {low}, {float32(1 / 126)}")
                both = code.let(f"fmul float {code.let(f'fadd float {less}, {high}')}, {factor}")
                place = code.let(f"add i64 {code.times(position, '%stride')}, {output}")
                code.do(f"store float {both}, ptr {code.at('float', '%output', place)}, align 4")
            return ()

        code.loop("0", "%outputs", 1, (), one)
        return ()

    code.loop("0", "%groups", 1, (), group)
    return code.text()


def _dots(
    code: Code, weights: Weights, kind: Kind, parts: Sequence[str], rows: tuple[str, str], range_: tuple[str, str]
) -> Values:
    """Multiply blocks of an output's weights by rows of activations. Returns the sums, i32.

    Few rows take several blocks at once: a sum waits for the one before, and there are others to work on meanwhile.
    """
    start, stop = range_
    ahead = max(1, 8 // len(parts))

    def block(at: str, totals: Sequence[str]) -> Values:
        unpacked = _unpacked(code, weights, kind, rows, at)
        place = code.times(at, 32)
        ours = (code.let(f"load <32 x i8>, ptr {code.at('i8', part, place)}, align 1") for part in parts)
        return tuple(_dot(code, kind, total, unpacked, each) for total, each in zip(totals, ours, strict=True))

    def several(at: str, *totals: str) -> Values:
        size = 32 if weights == "int8" else 16
        for line in range(0, ahead * size, 64):
            later = code.let(f"add i64 {code.times(at, size)}, {4096 + line}")  # else memory stands idle meanwhile
            code.do(f"call void @llvm.prefetch.p0(ptr {code.at('i8', rows[0], later)}, i32 0, i32 3, i32 1)")
        results: Values = ()
        for number in range(ahead):
            mine = totals[number * len(parts) : (number + 1) * len(parts)]
            results += block(code.let(f"add i64 {at}, {number}"), mine)
        return results

    zero = ("<8 x i32>", "zeroinitializer")
    count = code.let(f"sub i64 {stop}, {start}")
    even = code.let(f"add i64 {start}, {code.let(f'and i64 {count}, {-ahead}')}")
    many = code.loop(start, even, ahead, [zero] * len(parts) * ahead, several)
    totals = []
    for number in range(len(parts)):
        total = many[number]
        for other in many[number + len(parts) :: len(parts)]:
            total = code.let(f"add <8 x i32> {total}, {other}")
        totals.append(total)
    if ahead > 1:
        carried = [("<8 x i32>", total) for total in totals]
        totals = list(code.loop(even, stop, 1, carried, lambda at, *sums: block(at, sums)))
    return tuple(code.let(f"call i32 @llvm.vector.reduce.add.v8i32(<8 x i32> {total})") for total in totals)


def _unpacked(code: Code, weights: Weights, kind: Kind, rows: tuple[str, str], block: str) -> str:
    """Unpack 32 weights, each as an octet without a sign: 128 more than a step, or a code of the checkpoint's own."""
    weight_row, number_row = rows
    if weights == "int8":
        steps = code.let(f"load <32 x i8>, ptr {code.at('i8', weight_row, code.times(block, 32))}, align 1")
        return code.let(f"xor <32 x i8> {steps}, splat (i8 -128)")
    both = code.let(f"load <16 x i8>, ptr {code.at('i8', weight_row, code.times(block, 16))}, align 1")
    low = code.let(f"and <16 x i8> {both}, splat (i8 15)")
    high = code.let(f"lshr <16 x i8> {both}, splat (i8 4)")
    in_turn = [half + 16 * which for half in range(16) for which in (0, 1)]
    order = in_turn if weights == "own4" else range(32)
    codes = code.let(f"shufflevector <16 x i8> {low}, <16 x i8> {high}, <32 x i32> {order_of(order)}")
    if weights == "own4":
        return codes
    halves = []
    for number in range(2):
        place = code.at("i8", number_row, code.let(f"add i64 {code.times(block, 2)}, {number}"))
        row = code.let(f"zext i8 {code.let(f'load i8, ptr {place}, align 1')} to i64")
        halves.append(code.let(f"load <16 x i8>, ptr {code.at('[16 x i8]', '%table', row)}, align 16"))
    joined = f"<32 x i32> {order_of(range(32))}"
    if kind in ("ssse3", "neon"):
        look_up = {"ssse3": "@llvm.x86.ssse3.pshuf.b.128", "neon": "@llvm.aarch64.neon.tbl1.v16i8"}[kind]
        pairs = zip(halves, (low, high), strict=True)
        near, far = (code.let(f"call <16 x i8> {look_up}(<16 x i8> {steps}, <16 x i8> {at})") for steps, at in pairs)
        return code.let(f"shufflevector <16 x i8> {near}, <16 x i8> {far}, {joined}")
    steps = code.let(f"shufflevector <16 x i8> {halves[0]}, <16 x i8> {halves[1]}, {joined}")
    return code.let(f"call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> {steps}, <32 x i8> {codes})")


def _dot(code: Code, kind: Kind, total: str, weights: str, activations: str) -> str:
    """Add the products of 32 weights and 32 activations to a vector of eight sums."""
    if kind in ("avx512vnni", "avxvnni"):
        arguments = f"<8 x i32> {total}, <32 x i8> {weights}, <32 x i8> {activations}"
        return code.let(f"call <8 x i32> @llvm.x86.avx512.vpdpbusd.256({arguments})")
    if kind == "avx2":
        arguments = f"<32 x i8> {weights}, <32 x i8> {activations}"
        pairs = code.let(f"call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw({arguments})")
        ones = f"<16 x i16> {pairs}, <16 x i16> splat (i16 1)"
        return code.let(f"add <8 x i32> {total}, {code.let(f'call <8 x i32> @llvm.x86.avx2.pmadd.wd({ones})')}")
    ours = code.let(f"sext <32 x i8> {activations} to <32 x i16>")
    theirs = code.let(f"zext <32 x i8> {weights} to <32 x i16>")
    products = code.let(f"mul <32 x i16> {ours}, {theirs}")
    for first in range(0, 32, 8):
        indices = order_of(range(first, first + 8), 8)
        eight = code.let(f"shufflevector <32 x i16> {products}, <32 x i16> poison, <8 x i32> {indices}")
        total = code.let(f"add <8 x i32> {total}, {code.let(f'sext <8 x i16> {eight} to <8 x i32>')}")
    return total


def _split() -> str:
    """Write the rounding of activations to two parts of 7 bits, as `swarm.model.integer.split` does it.

    rows: float32 [positions, inputs]. parts, sums, factors: as `multiply_N` takes them, zeros behind a row's end;
    factors are a sixty-third of a row's peak. chunk: as there, in inputs.
    """
    code = Code(
        "@split(ptr noalias %rows, ptr noalias %parts, ptr noalias %sums, ptr noalias %factors, i64 %positions, "
        "i64 %inputs, i64 %padded, i64 %chunk)"
    )
    rounded_up = code.let("add i64 %padded, %chunk")
    chunks = code.let(f"udiv i64 {code.let(f'sub i64 {rounded_up}, 1')}, %chunk")

    def position(at: str) -> Values:
        row = code.at("float", "%rows", code.times(at, "%inputs"))
        first = code.times(at, 2)
        second = code.let(f"add i64 {first}, 1")
        high_row, low_row = (code.at("i8", "%parts", code.times(each, "%padded")) for each in (first, second))
        high_sums, low_sums = (code.at("i32", "%sums", code.times(each, chunks)) for each in (first, second))

        def larger(index: str, most: str) -> Values:
            number = code.let(f"load float, ptr {code.at('float', row, index)}, align 4")
            size = code.let(f"call float @llvm.fabs.f32(float {number})")
            return (code.let(f"call float @llvm.maximum.f32(float {most}, float {size})"),)

        (peak,) = code.loop("0", "%inputs", 1, [("float", float32(2.0**-100))], larger)
        unit = code.let(f"fmul float {code.let(f'fdiv float {float32(1)}, {peak}')}, {float32(63)}")  # as torch divides
        factor = code.let(f"fdiv float {peak}, {float32(63)}")
        code.do(f"store float {factor}, ptr {code.at('float', '%factors', at)}, align 4")

        def sums(chunk: str) -> Values:
            start = code.times(chunk, "%chunk")
            end = code.let(f"add i64 {start}, %chunk")
            stop = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, %inputs')}, i64 {end}, i64 %inputs")

            def parts(index: str, *totals: str) -> Values:
                number = code.let(f"load float, ptr {code.at('float', row, index)}, align 4")
                steps = code.let(f"fmul float {number}, {unit}")
                high = code.let(f"call float @llvm.roundeven.f32(float {steps})")
                rest = code.let(f"fmul float {code.let(f'fsub float {steps}, {high}')}, {float32(126)}")
                low = code.let(f"call float @llvm.roundeven.f32(float {rest})")
                results = []
                for total, part, of_row in zip(totals, (high, low), (high_row, low_row), strict=True):
                    octet = code.let(f"call i8 @llvm.fptosi.sat.i8.f32(float {part})")
                    code.do(f"store i8 {octet}, ptr {code.at('i8', of_row, index)}, align 1")
                    results.append(code.let(f"add i32 {total}, {code.let(f'sext i8 {octet} to i32')}"))
                return tuple(results)

            totals = code.loop(start, stop, 1, [("i32", "0")] * 2, parts)
            for total, of_row in zip(totals, (high_sums, low_sums), strict=True):
                code.do(f"store i32 {total}, ptr {code.at('i32', of_row, chunk)}, align 4")
            return ()

        def fill(index: str) -> Values:
            for of_row in (high_row, low_row):
                code.do(f"store i8 0, ptr {code.at('i8', of_row, index)}, align 1")
            return ()

        code.loop("0", chunks, 1, (), sums)
        code.loop("%inputs", "%padded", 1, (), fill)
        return ()

    code.loop("0", "%positions", 1, (), position)
    return code.text()
