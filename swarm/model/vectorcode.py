"""Writes the loops over integer weights in LLVM's language, for the vectors of one kind of processor.

A loop unpacks 32 weights of an output into a vector of octets, once, and multiplies them by the activations of several
positions, whose sums each have a register. Processors have instructions for dot products of octets without a sign, here
the weights, and octets with one:

    avx512vnni, avxvnni    vpdpbusd           adds up four products in 32 bits; the former has 32 registers, not 16,
                                              and for many positions takes 64 octets at once
    avx2                   vpmaddubsw, ...    adds up two in 16 bits: 2 * 255 * 63 < 2^15, so activations have 7 bits
    ssse3, neon            plain vectors      LLVM takes what the processor has

A step of -127 to 127 gets 128 more, so that it has no sign. 128 times the sum of the activations is taken away from the
sum of a chunk of inputs. That is exact, so all processors compute the same bits. Chunks are then added up in float32,
one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from swarm.model.llvmtext import Code, Values, float32, module_of, order_of
from swarm.model.splitcode import split_code

Kind = Literal["avx512vnni", "avxvnni", "avx2", "ssse3", "neon"]
Weights = Literal["int8", "int4", "own4"]

_DECLARED = """
declare <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32>, <32 x i8>, <32 x i8>)
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)
declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)
declare <16 x i8> @llvm.aarch64.neon.tbl1.v16i8(<16 x i8>, <16 x i8>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


def octets_of(weights: Weights, kind: Kind) -> dict[int, int]:
    """Return for how many positions at once there are loops, most first, and how many inputs a row has together.

    Sums and weights of so many positions fit into registers, and their activations into a cache.
    """
    return {tile: 64 if _in_pairs(weights, kind) else vector for tile, vector in _vectors_of(kind).items()}


def _vectors_of(kind: Kind) -> dict[int, int]:
    """Return how many octets a vector has, by the number of positions."""
    return {4: 64 if kind == "avx512vnni" else 32, 2: 32, 1: 32}


def code_of(weights: Weights, kind: Kind) -> str:
    """Return a module with `split`, and with `multiply_N` for N positions at once, N of `octets_of`."""
    products = [_Products(weights, kind, each).text() for each in octets_of(weights, kind)]
    return split_code(in_pairs=_in_pairs(weights, kind)) + "\n" + module_of(products, _DECLARED)


def _in_pairs(weights: Weights, kind: Kind) -> bool:
    """Whether two blocks are unpacked at once: a vector has the first halves of both, and another one the second ones.

    So 32 octets of codes are taken as they are, where a block's own would have to be spread over a vector first.
    """
    return weights == "int4" and kind in ("avx2", "avxvnni", "avx512vnni")


@dataclass(frozen=True, slots=True)
class _Output:
    """An output's number, and the addresses of its row of weights, of numbers and of scales."""

    number: str
    weights: str
    numbers: str
    scales: str


class _Products:
    """Writes the loop for groups of `tile` positions: all outputs for the first group, then for the next.

    blocks: of 32 inputs, of a row of weights. chunk: how many of them are added up as integers. parts: int8, of each
    position 2 * `padded`, high and low, as `split` lays them. sums: int32 [chunks, positions, 2] of them, those of a
    chunk `rows` behind those of the one before. factors: float32 [positions]. output: float32, a position's first
    number `stride` behind that of the one before.
    """

    def __init__(self, weights: Weights, kind: Kind, tile: int) -> None:
        self._weights, self._kind, self._tile, self._rows = weights, kind, tile, 2 * tile
        self._in_pairs = _in_pairs(weights, kind)
        self._vector = _vectors_of(kind)[tile]  # octets
        self._integers, self._floats = f"<{self._rows} x i32>", f"<{self._rows} x float>"
        self._code = code = Code(
            f"@multiply_{tile}(ptr noalias %weights, ptr noalias %numbers, ptr noalias %scales, ptr noalias %table, "
            "ptr noalias %parts, ptr noalias %sums, ptr noalias %factors, ptr noalias %output, "
            "i64 %groups, i64 %outputs, i64 %blocks, i64 %chunk, i64 %padded, i64 %rows, i64 %stride)"
        )
        self._row_bytes = code.times("%blocks", self._block_bytes)
        rounded_up = code.let("add i64 %blocks, %chunk")
        self._chunks = code.let(f"udiv i64 {code.let(f'sub i64 {rounded_up}, 1')}, %chunk")
        self._numbers = code.times("%blocks", 2) if weights == "int4" else self._chunks

    @property
    def _octets(self) -> int:
        """How many inputs a row has together."""
        return octets_of(self._weights, self._kind)[self._tile]

    @property
    def _block_bytes(self) -> int:
        return 32 if self._weights == "int8" else 16

    def text(self) -> str:
        """Return the function."""
        code, at_once = self._code, self._vector // 32  # outputs: activations are loaded once for all
        group_bytes = code.times("%padded", self._rows)
        whole = code.times(code.let(f"udiv i64 %outputs, {at_once}"), at_once)

        def group(at: str) -> Values:
            first, parts = code.times(at, self._tile), code.at("i8", "%parts", code.times(at, group_bytes))

            def some(output: str, count: int) -> Values:
                outputs = [self._output(code.let(f"add i64 {output}, {more}")) for more in range(count)]
                for each, total in zip(outputs, self._totals(first, parts, outputs), strict=True):
                    self._store(first, each, total)
                return ()

            code.loop("0", whole, at_once, (), lambda output: some(output, at_once))
            if at_once > 1:
                code.loop(whole, "%outputs", 1, (), lambda output: some(output, 1))
            return ()

        code.loop("0", "%groups", 1, (), group)
        return code.text()

    def _output(self, number: str) -> _Output:
        code = self._code
        scales = code.times(number, self._chunks) if self._weights == "own4" else number
        weights = code.at("i8", "%weights", code.times(number, self._row_bytes))
        numbers = code.at("i8", "%numbers", code.times(number, self._numbers))
        return _Output(number, weights, numbers, code.at("float", "%scales", scales))

    def _totals(self, first: str, parts: str, outputs: Sequence[_Output]) -> Values:
        """Multiply whole rows. Returns each output's totals, in float32, before its only scale."""
        code, integers, floats = self._code, self._integers, self._floats
        sums = code.at("i32", "%sums", code.times(first, 2))

        def chunk(number: str, *totals: str) -> Values:
            start = code.times(number, "%chunk")
            end = code.let(f"add i64 {start}, %chunk")
            stop = code.let(f"select i1 {code.let(f'icmp ult i64 {end}, %blocks')}, i64 {end}, i64 %blocks")
            exact = self._dots(parts, outputs, start, stop)
            told = code.let(f"load {integers}, ptr {code.at('i32', sums, code.times(number, '%rows'))}, align 4")
            results = []
            for output, total, sum_ in zip(outputs, totals, exact, strict=True):
                less = code.let(f"mul {integers} {told}, {self._above(output, number)}")
                numbers = code.let(f"sitofp {integers} {code.let(f'sub {integers} {sum_}, {less}')} to {floats}")
                if self._weights == "own4":
                    numbers = code.let(f"fmul {floats} {numbers}, {self._scale(output, number)}")
                results.append(code.let(f"fadd {floats} {total}, {numbers}"))
            return tuple(results)

        return code.loop("0", self._chunks, 1, [(floats, "zeroinitializer")] * len(outputs), chunk)

    def _above(self, output: _Output, chunk: str) -> str:
        """Return how far weights without a sign are above those with one."""
        if self._weights != "own4":
            return "splat (i32 128)"
        zero = self._code.let(f"load i8, ptr {self._code.at('i8', output.numbers, chunk)}, align 1")
        return self._code.splat("i32", self._code.let(f"zext i8 {zero} to i32"), self._rows)

    def _scale(self, output: _Output, chunk: str) -> str:
        scale = self._code.let(f"load float, ptr {self._code.at('float', output.scales, chunk)}, align 4")
        return self._code.splat("float", scale, self._rows)

    def _store(self, first: str, output: _Output, totals: str) -> None:
        """Join high and low parts of the group's positions, and write what they are."""
        code, floats, half = self._code, self._floats, f"<{self._tile} x float>"
        if self._weights != "own4":
            totals = code.let(f"fmul {floats} {totals}, {self._scale(output, '0')}")
        orders = [order_of(range(which, self._rows, 2), self._tile) for which in (0, 1)]
        both = f"shufflevector {floats} {totals}, {floats} poison, <{self._tile} x i32>"
        high, low = (code.let(f"{both} {order}") for order in orders)
        less = code.let(f"fmul {half} {low}, splat (float {float32(1 / 126)})")
        factors = code.let(f"load {half}, ptr {code.at('float', '%factors', first)}, align 4")
        results = code.let(f"fmul {half} {code.let(f'fadd {half} {less}, {high}')}, {factors}")
        for number in range(self._tile):
            position = code.let(f"add i64 {first}, {number}")
            place = code.let(f"add i64 {code.times(position, '%stride')}, {output.number}")
            value = code.let(f"extractelement {half} {results}, i64 {number}")
            code.do(f"store float {value}, ptr {code.at('float', '%output', place)}, align 4")

    def _dots(self, parts: str, outputs: Sequence[_Output], start: str, stop: str) -> list[str]:
        """Multiply blocks of some outputs' weights by a group's activations. Returns each output's sums.

        Few rows take several blocks at once: a sum waits for the one before, and there are others to work on meanwhile.
        """
        code, octets, count = self._code, self._octets, self._rows * len(outputs)
        ahead, at_once = max(1, 8 // self._rows), octets // 32
        step, sums = ahead * at_once, f"<{self._vector // 4} x i32>"

        def several(at: str, *totals: str) -> Values:
            for output, line in product(outputs, range(0, step * self._block_bytes, 64)):
                later = code.let(f"add i64 {code.times(at, self._block_bytes)}, {4096 + line}")
                place = code.at("i8", output.weights, later)
                # To the second cache, else memory stands idle. To the first one it takes up to twice as long.
                code.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 2, i32 1)")
            results: Values = ()
            for number in range(ahead):
                mine = totals[number * count : (number + 1) * count]
                results += self._block(parts, outputs, code.let(f"add i64 {at}, {number * at_once}"), mine, octets)
            return results

        def single(at: str, *totals: str) -> Values:
            if self._vector == 32:
                return self._block(parts, outputs, at, totals, 32)
            eights = self._block(parts, outputs, at, ["zeroinitializer"] * count, 32)
            order = f"<16 x i32> {order_of(range(16), 16)}"
            more = [code.let(f"shufflevector <8 x i32> {each}, <8 x i32> zeroinitializer, {order}") for each in eights]
            return tuple(code.let(f"add {sums} {one}, {other}") for one, other in zip(totals, more, strict=True))

        totals: Values = ("zeroinitializer",) * count
        if at_once == 2:  # the first block of two is an even one
            odd = code.let(f"add i64 {start}, {code.let(f'and i64 {start}, 1')}")
            totals = code.loop(start, odd, 1, [(sums, total) for total in totals], single)
            start = odd
        blocks = code.let(f"sub i64 {stop}, {start}")
        even = code.let(f"add i64 {start}, {code.let(f'and i64 {blocks}, {-step}')}")
        carried = [*totals, *["zeroinitializer"] * count * (ahead - 1)]
        totals = code.loop(start, even, step, [(sums, total) for total in carried], several)
        while len(totals) > count:
            pairs = zip(totals[:count], totals[count : 2 * count], strict=True)
            totals = (*(code.let(f"add {sums} {one}, {other}") for one, other in pairs), *totals[2 * count :])
        if step > 1:
            totals = code.loop(even, stop, 1, [(sums, total) for total in totals], single)
        return [_summed(code, totals[at : at + self._rows], self._vector // 4) for at in range(0, count, self._rows)]

    def _block(self, parts: str, outputs: Sequence[_Output], at: str, totals: Sequence[str], size: int) -> Values:
        """Multiply 32 or 64 inputs. Returns totals with these added: an output's rows, then those of the next."""
        code, results = self._code, list(totals)
        unpacked = [self._unpacked(output, at, size) for output in outputs]
        second = code.let(f"and i64 {at}, {1 if size < self._octets else 0}")  # of two blocks whose inputs lie together
        before = code.times(code.let(f"sub i64 {at}, {second}"), self._rows * 32)
        behind = code.times(second, 16 if self._in_pairs else 32)
        first = code.at("i8", parts, code.let(f"add i64 {before}, {behind}"))
        for row in range(self._rows):
            ours = self._activations(code.at("i8", first, str(row * self._octets)), size)
            for output, theirs in enumerate(unpacked):
                which = output * self._rows + row
                for one, other in zip(theirs, ours, strict=True):
                    results[which] = _dot(code, self._kind, results[which], one, other, min(size, self._vector))
        return tuple(results)

    def _unpacked(self, output: _Output, at: str, size: int) -> list[str]:
        """Unpack 32 or 64 weights of an output, into one vector or two."""
        code = self._code
        if not self._in_pairs or size == 32:
            return [_unpacked(code, self._weights, self._kind, output, at, size)]
        halves = _unpacked_pair(code, output, at)
        return halves if self._vector == 32 else [_joined(code, 32, *halves)]

    def _activations(self, place: str, size: int) -> list[str]:
        """Load 32 or 64 inputs of a row in the order of the weights that they meet."""
        code, vector = self._code, min(size, self._vector)
        if self._in_pairs and size == 32:
            halves = (code.let(f"load <16 x i8>, ptr {code.at('i8', place, at)}, align 1") for at in ("0", "32"))
            return [_joined(code, 16, *halves)]
        places = (code.at("i8", place, str(first)) for first in range(0, size, vector))
        return [code.let(f"load <{vector} x i8>, ptr {each}, align 1") for each in places]


def _summed(code: Code, vectors: Sequence[str], lanes: int) -> str:
    """Add up each vector's numbers. Returns one vector, with a sum for each: two, four, ... of them, `lanes` at most.

    Even and odd numbers are added at a time: of two vectors, whose sums lie in one then, or of the one that is left.
    """
    left = lanes  # numbers that are to be added for each sum
    while left > 1:
        left //= 2
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], "poison")]
        size = lanes if len(vectors) > 1 else lanes // 2
        vectors = []
        for one, other in pairs:
            halves = []
            for which in (0, 1):
                order = f"<{size} x i32> {order_of(range(which, 2 * size, 2), size)}"
                both = f"<{lanes} x i32> {one}, <{lanes} x i32> {other}, {order}"
                halves.append(code.let(f"shufflevector {both}"))
            vectors.append(code.let(f"add <{size} x i32> {halves[0]}, {halves[1]}"))
        lanes = size
    return vectors[0]


def _unpacked(code: Code, weights: Weights, kind: Kind, output: _Output, block: str, octets: int) -> str:
    """Unpack 32 or 64 weights, each as an octet without a sign: 128 more than a step, or a code of the checkpoint's."""
    if weights == "int8":
        steps = code.let(f"load <{octets} x i8>, ptr {code.at('i8', output.weights, code.times(block, 32))}, align 1")
        return code.let(f"xor <{octets} x i8> {steps}, splat (i8 -128)")
    if octets == 64:
        near = _unpacked(code, weights, kind, output, block, 32)
        far = _unpacked(code, weights, kind, output, code.let(f"add i64 {block}, 1"), 32)
        return _joined(code, 32, near, far)
    both = code.let(f"load <16 x i8>, ptr {code.at('i8', output.weights, code.times(block, 16))}, align 1")
    low = code.let(f"and <16 x i8> {both}, splat (i8 15)")
    high = code.let(f"lshr <16 x i8> {both}, splat (i8 4)")
    in_turn = [half + 16 * which for half in range(16) for which in (0, 1)]
    order = in_turn if weights == "own4" else range(32)
    codes = code.let(f"shufflevector <16 x i8> {low}, <16 x i8> {high}, <32 x i32> {order_of(order)}")
    if weights == "own4":
        return codes
    halves = _tables(code, output, block, 2)
    if kind in ("ssse3", "neon"):
        look_up = {"ssse3": "@llvm.x86.ssse3.pshuf.b.128", "neon": "@llvm.aarch64.neon.tbl1.v16i8"}[kind]
        pairs = zip(halves, (low, high), strict=True)
        near, far = (code.let(f"call <16 x i8> {look_up}(<16 x i8> {steps}, <16 x i8> {at})") for steps, at in pairs)
        return _joined(code, 16, near, far)
    return _looked_up(code, _joined(code, 16, *halves), codes)


def _unpacked_pair(code: Code, output: _Output, block: str) -> list[str]:
    """Unpack two blocks' weights of int4, as `_unpacked`: the first halves of both, and the second halves of both."""
    both = code.let(f"load <32 x i8>, ptr {code.at('i8', output.weights, code.times(block, 16))}, align 1")
    codes = code.let(f"and <32 x i8> {both}, splat (i8 15)"), code.let(f"lshr <32 x i8> {both}, splat (i8 4)")
    halves = _tables(code, output, block, 4)
    return [_looked_up(code, _joined(code, 16, *halves[which::2]), codes[which]) for which in (0, 1)]


def _tables(code: Code, output: _Output, block: str, count: int) -> list[str]:
    """Load the tables of so many half blocks."""
    found = []
    for number in range(count):
        place = code.at("i8", output.numbers, code.let(f"add i64 {code.times(block, 2)}, {number}"))
        row = code.let(f"zext i8 {code.let(f'load i8, ptr {place}, align 1')} to i64")
        found.append(code.let(f"load <16 x i8>, ptr {code.at('[16 x i8]', '%table', row)}, align 16"))
    return found


def _looked_up(code: Code, tables: str, codes: str) -> str:
    """Look up 32 codes, each half of them in a table of its own."""
    return code.let(f"call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> {tables}, <32 x i8> {codes})")


def _joined(code: Code, octets: int, one: str, other: str) -> str:
    """Join two vectors of so many octets."""
    half = f"<{octets} x i8>"
    order = f"<{2 * octets} x i32> {order_of(range(2 * octets), 2 * octets)}"
    return code.let(f"shufflevector {half} {one}, {half} {other}, {order}")


def _dot(code: Code, kind: Kind, total: str, weights: str, activations: str, octets: int) -> str:
    """Add the products of weights and activations to a vector with a sum for every four of them."""
    if kind in ("avx512vnni", "avxvnni"):
        sums, bits = f"<{octets // 4} x i32>", 8 * octets
        arguments = f"{sums} {total}, <{octets} x i8> {weights}, <{octets} x i8> {activations}"
        return code.let(f"call {sums} @llvm.x86.avx512.vpdpbusd.{bits}({arguments})")
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
