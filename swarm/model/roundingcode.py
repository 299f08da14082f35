"""Writes the loops that round weights in LLVM's language, to the bits of `swarm.model.eightbits` and `.fourbits`.

In int4 a half block's 16 weights are looked up in the errors of 64 tables at once, and the 16 rows are added up.
Errors have 16 bits and stay at their largest number. So do sums: a table that is chosen has far less.
"Weighed" errors are multiplied by 16 bits of their input first, and the upper half of each product is added up.
"""

from swarm.model.llvmtext import Code, Dtype, Values, float32, module_of

_DECLARED = """
declare float @llvm.maximum.f32(float, float)
declare float @llvm.roundeven.f32(float)
declare i16 @llvm.umax.i16(i16, i16)
declare i32 @llvm.umax.i32(i32, i32)
declare i32 @llvm.smax.i32(i32, i32)
declare i32 @llvm.smin.i32(i32, i32)
declare <16 x i16> @llvm.abs.v16i16(<16 x i16>, i1)
declare i16 @llvm.vector.reduce.umax.v16i16(<16 x i16>)
declare <32 x i16> @llvm.uadd.sat.v32i16(<32 x i16>, <32 x i16>)
declare <32 x i16> @llvm.umin.v32i16(<32 x i16>, <32 x i16>)
declare i16 @llvm.vector.reduce.umin.v32i16(<32 x i16>)
declare i64 @llvm.cttz.i64(i64, i1)
"""


def int8_code(dtype: Dtype, steps: int, least: float) -> str:
    """Return a module with `round`. dtype: of the weights. steps: of the largest weight of a row. least: a scale.

    rows: [outputs, inputs]. integers: int8 [outputs, inputs]. scales: float32 [outputs].
    """
    code = Code("@round(ptr noalias %rows, ptr noalias %integers, ptr noalias %scales, i64 %outputs, i64 %inputs)")

    def output(at: str) -> Values:
        first = code.times(at, "%inputs")
        row = _Row(code, dtype, first)
        scale = _scale(code, row, steps, least)
        code.do(f"store float {scale}, ptr {code.at('float', '%scales', at)}, align 4")
        integers = code.at("i8", "%integers", first)

        def one(index: str) -> Values:
            integer = _nearest(code, code.let(f"fdiv float {row.number(index)}, {scale}"), steps)
            code.do(f"store i8 {code.let(f'trunc i32 {integer} to i8')}, ptr {code.at('i8', integers, index)}, align 1")
            return ()

        code.loop("0", "%inputs", 1, (), one)
        return ()

    code.loop("0", "%outputs", 1, (), output)
    return module_of([code.text()], _DECLARED)


def int4_code(dtype: Dtype, steps: int, least: float, *, weighed: bool = False) -> str:
    """Return a module with `round`. dtype: of the weights. steps: of the largest weight of a row. least: a scale.

    rows: [outputs, inputs]. errors: uint16 [8 * steps + 1, 256], of weights in quarters of a step, from the
    least on. ends: int16 [256, 16], the last weight of each table's codes. starts: uint8 [4 * steps + 1], the first
    size that is sought, by a half block's largest weight. shares: uint16 [32 * blocks], how much each input's errors
    count; not read unless `weighed`. quarters: int16 [32 * blocks], to work with. codes, numbers and scales: as
    `fourbits.packed` returns them.
    """
    zero = 4 * steps
    code = Code(
        "@round(ptr noalias %rows, ptr noalias %errors, ptr noalias %ends, ptr noalias %starts, ptr noalias %shares, "
        "ptr noalias %quarters, ptr noalias %codes, ptr noalias %numbers, ptr noalias %scales, "
        "i64 %outputs, i64 %inputs, i64 %blocks)"
    )
    padded, row_bytes, row_halves = (code.times("%blocks", size) for size in (32, 16, 2))

    def output(at: str) -> Values:
        row = _Row(code, dtype, code.times(at, "%inputs"))
        code_row = code.at("i8", "%codes", code.times(at, row_bytes))
        number_row = code.at("i8", "%numbers", code.times(at, row_halves))
        scale = _scale(code, row, steps, least)
        code.do(f"store float {scale}, ptr {code.at('float', '%scales', at)}, align 4")
        _quarters(code, row, scale, zero, padded)

        def block(number: str) -> Values:
            halves = []
            for half in range(2):
                which = code.let(f"add i64 {code.times(number, 2)}, {half}")
                first = code.at("i16", "%quarters", code.times(which, 16))
                shares = code.at("i16", "%shares", code.times(which, 16)) if weighed else None
                chosen = _sought(code, first, shares, zero)
                octet = code.let(f"trunc i64 {chosen} to i8")
                code.do(f"store i8 {octet}, ptr {code.at('i8', number_row, which)}, align 1")
                halves.append(_placed(code, first, code.at("i16", "%ends", code.times(chosen, 16))))
            high = code.let(f"shl <16 x i8> {halves[1]}, splat (i8 4)")
            place = code.at("i8", code_row, code.times(number, 16))
            code.do(f"store <16 x i8> {code.let(f'or <16 x i8> {halves[0]}, {high}')}, ptr {place}, align 1")
            return ()

        code.loop("0", "%blocks", 1, (), block)
        return ()

    code.loop("0", "%outputs", 1, (), output)
    return module_of([code.text()], _DECLARED)


class _Row:
    """Numbers of a row of weights."""

    def __init__(self, code: Code, dtype: Dtype, first: str) -> None:
        """first: the place of the row's first number."""
        self._code = code
        self.bits = 32 if dtype == "float32" else 16
        self._place = code.at(f"i{self.bits}", "%rows", first)

    def size(self, index: str) -> str:
        """Load a number without its sign, as the integer of its bits: in the order of sizes, and NaN above all."""
        code, type_ = self._code, f"i{self.bits}"
        bits = code.let(f"load {type_}, ptr {code.at(type_, self._place, index)}, align {self.bits // 8}")
        return code.let(f"and {type_} {bits}, {(1 << self.bits - 1) - 1}")

    def number(self, index: str) -> str:
        """Load a number, as a float32."""
        code, type_ = self._code, f"i{self.bits}"
        return self.whole(code.let(f"load {type_}, ptr {code.at(type_, self._place, index)}, align {self.bits // 8}"))

    def whole(self, bits: str) -> str:
        """Return the float32 of a number's bits."""
        if self.bits == 16:
            bits = self._code.let(f"shl i32 {self._code.let(f'zext i16 {bits} to i32')}, 16")
        return self._code.let(f"bitcast i32 {bits} to float")


def _scale(code: Code, row: _Row, steps: int, least: float) -> str:
    """Return a row's scale. Sizes are compared as integers, of which more fit into a vector."""
    type_ = f"i{row.bits}"

    def larger(index: str, most: str) -> Values:
        return (code.let(f"call {type_} @llvm.umax.{type_}({type_} {most}, {type_} {row.size(index)})"),)

    (most,) = code.loop("0", "%inputs", 1, [(type_, "0")], larger)
    scale = code.let(f"fdiv float {row.whole(most)}, {float32(steps)}")
    return code.let(f"call float @llvm.maximum.f32(float {scale}, float {float32(least)})")


def _nearest(code: Code, number: str, most: int) -> str:
    """Round to the nearest integer, i32, of at most this size. What is no number becomes zero."""
    rounded = code.let(f"call float @llvm.roundeven.f32(float {number})")
    is_none = code.let(f"fcmp uno float {rounded}, {rounded}")
    integer = code.let(f"fptosi float {code.let(f'select i1 {is_none}, float {float32(0)}, float {rounded}')} to i32")
    inside = code.let(f"call i32 @llvm.smax.i32(i32 {integer}, i32 {-most})")
    return code.let(f"call i32 @llvm.smin.i32(i32 {inside}, i32 {most})")


def _quarters(code: Code, row: _Row, scale: str, zero: int, padded: str) -> None:
    """Round a row's weights to quarters of a step, from 0 on, and fill it up."""

    def one(index: str) -> Values:
        four = code.let(f"fmul float {code.let(f'fdiv float {row.number(index)}, {scale}')}, {float32(4)}")
        inside = _nearest(code, four, zero)
        store(index, code.let(f"trunc i32 {code.let(f'add i32 {inside}, {zero}')} to i16"))
        return ()

    def fill(index: str) -> Values:
        store(index, str(zero))
        return ()

    def store(index: str, quarters: str) -> None:
        code.do(f"store i16 {quarters}, ptr {code.at('i16', '%quarters', index)}, align 2")

    code.loop("0", "%inputs", 1, (), one)
    code.loop("%inputs", padded, 1, (), fill)


def _sought(code: Code, first: str, shares: str | None, zero: int) -> str:
    """Return the number of the table of least error, i64: of several that are equal, the lowest.

    first: the place of 16 weights. shares: that of their inputs' shares; None: each error counts in full.
    """
    together = code.let(f"load <16 x i16>, ptr {first}, align 2")
    away = code.let(f"sub <16 x i16> {together}, splat (i16 {zero})")
    sizes = code.let(f"call <16 x i16> @llvm.abs.v16i16(<16 x i16> {away}, i1 false)")
    peak = code.let(f"call i16 @llvm.vector.reduce.umax.v16i16(<16 x i16> {sizes})")
    start = code.times(_loaded(code, "i8", "%starts", code.let(f"zext i16 {peak} to i64")), 8)
    sums = ["zeroinitializer", "zeroinitializer"]
    for each in range(16):
        place = code.let(f"add i64 {code.times(_loaded(code, 'i16', first, str(each)), 256)}, {start}")
        share = None if shares is None else code.let(f"load i16, ptr {code.at('i16', shares, str(each))}, align 2")
        for part in range(2):
            at = code.at("i16", "%errors", code.let(f"add i64 {place}, {32 * part}"))
            errors = code.let(f"load <32 x i16>, ptr {at}, align 2")
            if share is not None:
                errors = _weighed(code, errors, share)
            arguments = f"<32 x i16> {sums[part]}, <32 x i16> {errors}"
            sums[part] = code.let(f"call <32 x i16> @llvm.uadd.sat.v32i16({arguments})")
    both = code.let(f"call <32 x i16> @llvm.umin.v32i16(<32 x i16> {sums[0]}, <32 x i16> {sums[1]})")
    least = code.splat("i16", code.let(f"call i16 @llvm.vector.reduce.umin.v32i16(<32 x i16> {both})"), 32)
    masks = []
    for sum_ in sums:
        equal = code.let(f"icmp eq <32 x i16> {sum_}, {least}")
        masks.append(code.let(f"zext i32 {code.let(f'bitcast <32 x i1> {equal} to i32')} to i64"))
    mask = code.let(f"or i64 {masks[0]}, {code.let(f'shl i64 {masks[1]}, 32')}")
    return code.let(f"add i64 {code.let(f'call i64 @llvm.cttz.i64(i64 {mask}, i1 true)')}, {start}")


def _weighed(code: Code, errors: str, share: str) -> str:
    """Return the upper halves of the products of 32 errors with a share, all of them i16 without a sign."""
    wide = code.let(f"zext <32 x i16> {errors} to <32 x i32>")
    times = code.let(f"zext <32 x i16> {code.splat('i16', share, 32)} to <32 x i32>")
    high = code.let(f"lshr <32 x i32> {code.let(f'mul <32 x i32> {wide}, {times}')}, splat (i32 16)")
    return code.let(f"trunc <32 x i32> {high} to <32 x i16>")


def _placed(code: Code, first: str, ends: str) -> str:
    """Return the codes of 16 weights, <16 x i8>: how many codes of a table end below each."""
    weights, codes = code.let(f"load <16 x i16>, ptr {first}, align 2"), "zeroinitializer"
    for number in range(15):
        end = code.splat("i16", code.let(f"load i16, ptr {code.at('i16', ends, str(number))}, align 2"), 16)
        beyond = code.let(f"sext <16 x i1> {code.let(f'icmp sgt <16 x i16> {weights}, {end}')} to <16 x i16>")
        codes = code.let(f"sub <16 x i16> {codes}, {beyond}")
    return code.let(f"trunc <16 x i16> {codes} to <16 x i8>")


def _loaded(code: Code, type_: str, base: str, index: str) -> str:
    """Load an integer without a sign, as 64 bits."""
    return code.let(f"zext {type_} {code.let(f'load {type_}, ptr {code.at(type_, base, index)}')} to i64")
