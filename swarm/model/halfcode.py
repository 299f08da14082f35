"""Writes the loops over weights in half precision in LLVM's language, for processors that multiply float32 alone.

Eight weights of an output become float32 in a register, and are multiplied by the activations of several positions,
whose sums each have a register of their own: of 16, as many as AVX2 has, four positions of three outputs take 12. So
weights are read in half precision, once, and nothing is written in between.

Every sum adds up the same numbers in the same order, in however many positions: eight sums of every eighth product,
then these. So a position gets the same bits in any batch.
"""

from typing import Literal

from swarm.model.llvmtext import Code, Values, module_of, order_of

Half = Literal["bfloat16", "float16"]

_DECLARED = """
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


def outputs_of() -> dict[int, int]:
    """Return for how many positions at once there are loops, most first, and how many outputs each takes."""
    return {4: 3, 2: 4, 1: 8}


def half_code(dtype: Half) -> str:
    """Return a module with `multiply_N` for N positions at once, N of `outputs_of`.

    weights: halves [outputs, inputs]; inputs are a multiple of 8. rows: float32 [groups * N, inputs]. output: float32,
    a position's first number `stride` behind that of the one before.
    """
    return module_of([_Products(dtype, tile, most).text() for tile, most in outputs_of().items()], _DECLARED)


class _Products:
    """Writes the loop for groups of `tile` positions: a few outputs for all groups, then the next outputs."""

    def __init__(self, dtype: Half, tile: int, most: int) -> None:
        self._dtype, self._tile, self._most = dtype, tile, most
        self._code = Code(
            f"@multiply_{tile}(ptr noalias %weights, ptr noalias %rows, ptr noalias %output, "
            "i64 %groups, i64 %outputs, i64 %inputs, i64 %stride)"
        )

    def text(self) -> str:
        """Return the function."""
        code, most = self._code, self._most
        whole = code.times(code.let(f"udiv i64 %outputs, {most}"), most)

        def some(first: str, count: int) -> Values:
            def group(at: str) -> Values:
                self._group(first, count, code.times(at, self._tile))
                return ()

            code.loop("0", "%groups", 1, (), group)
            return ()

        code.loop("0", whole, most, (), lambda first: some(first, most))
        code.loop(whole, "%outputs", 1, (), lambda first: some(first, 1))
        return code.text()

    def _group(self, first: str, count: int, position: str) -> None:
        """Multiply whole rows of `count` outputs, and write what they are."""
        code, tile = self._code, self._tile
        weights = [self._row("i16", "%weights", code.let(f"add i64 {first}, {more}")) for more in range(count)]
        positions = [code.let(f"add i64 {position}, {more}") for more in range(tile)]
        rows = [self._row("float", "%rows", each) for each in positions]
        later = code.times("%inputs", count)  # as far behind lie the weights that come next

        def eight(at: str, *sums: str) -> Values:
            theirs = [self._widened(code.at("i16", each, at)) for each in weights]
            results = []
            for number, row in enumerate(rows):
                ours = code.let(f"load <8 x float>, ptr {code.at('float', row, at)}, align 4")
                for each, total in zip(theirs, sums[number * count :], strict=False):
                    product = f"<8 x float> {each}, <8 x float> {ours}, <8 x float> {total}"
                    results.append(code.let(f"call <8 x float> @llvm.fma.v8f32({product})"))
            return tuple(results)

        def several(at: str, *sums: str) -> Values:
            ahead = code.let(f"add i64 {at}, {later}")
            for each in weights:
                code.do(f"call void @llvm.prefetch.p0(ptr {code.at('i16', each, ahead)}, i32 0, i32 3, i32 1)")
            for more in range(0, 32, 8):
                sums = eight(code.let(f"add i64 {at}, {more}"), *sums)
            return sums

        line = code.let("and i64 %inputs, -32")
        sums = code.loop("0", line, 32, [("<8 x float>", "zeroinitializer")] * (tile * count), several)
        sums = code.loop(line, "%inputs", 8, [("<8 x float>", total) for total in sums], eight)
        for number, each in enumerate(positions):
            place = code.let(f"add i64 {code.times(each, '%stride')}, {first}")
            for output in range(count):
                target = code.at("float", "%output", code.let(f"add i64 {place}, {output}"))
                code.do(f"store float {self._summed(sums[number * count + output])}, ptr {target}, align 4")

    def _row(self, type_: str, base: str, number: str) -> str:
        return self._code.at(type_, base, self._code.times(number, "%inputs"))

    def _widened(self, place: str) -> str:
        """Read eight weights as float32."""
        code = self._code
        if self._dtype == "float16":
            return code.let(f"fpext <8 x half> {code.let(f'load <8 x half>, ptr {place}, align 2')} to <8 x float>")
        wide = code.let(f"zext <8 x i16> {code.let(f'load <8 x i16>, ptr {place}, align 2')} to <8 x i32>")
        return code.let(f"bitcast <8 x i32> {code.let(f'shl <8 x i32> {wide}, splat (i32 16)')} to <8 x float>")

    def _summed(self, vector: str) -> str:
        """Add up a vector's eight numbers, half by half."""
        code, count = self._code, 8
        while count > 1:
            count //= 2
            halves = []
            for first in (0, count):
                order = f"<{count} x i32> {order_of(range(first, first + count), count)}"
                both = f"<{2 * count} x float> {vector}, <{2 * count} x float> poison"
                halves.append(code.let(f"shufflevector {both}, {order}"))
            vector = code.let(f"fadd <{count} x float> {halves[0]}, {halves[1]}")
        return code.let(f"extractelement <1 x float> {vector}, i64 0")
