"""Writes functions in LLVM's language, one line after the other."""

import struct
from collections.abc import Callable, Sequence
from typing import Literal

Values = tuple[str, ...]
Dtype = Literal["float32", "bfloat16"]  # of numbers that loops read


class Code:
    """Lines of a function, in the order in which they run."""

    def __init__(self, signature: str) -> None:
        self._lines = [f"define void {signature} {{", "entry:"]
        self._count, self._block = 0, "entry"

    def let(self, operation: str) -> str:
        """Name the result of an operation."""
        self._count += 1
        self._lines.append(f"  %v{self._count} = {operation}")
        return f"%v{self._count}"

    def do(self, instruction: str) -> None:
        """Append an instruction without a result."""
        self._lines.append(f"  {instruction}")

    def at(self, type_: str, base: str, index: str) -> str:
        """Return the address of an element."""
        return self.let(f"getelementptr {type_}, ptr {base}, i64 {index}")

    def splat(self, type_: str, value: str, count: int) -> str:
        """Return a vector that has a value `count` times."""
        first = self.let(f"insertelement <{count} x {type_}> poison, {type_} {value}, i64 0")
        vector = f"<{count} x {type_}>"
        return self.let(f"shufflevector {vector} {first}, {vector} poison, <{count} x i32> zeroinitializer")

    def times(self, a: str, b: str | int) -> str:
        """Multiply two numbers of 64 bits."""
        return self.let(f"mul i64 {a}, {b}")

    def loop(
        self, start: str, stop: str, step: int, carried: Sequence[tuple[str, str]], body: Callable[..., Values]
    ) -> Values:
        """Run the body for start, start + step, ... below stop. carried: types and first values of what it hands on.

        body: gets the index and the carried values, and returns the next ones. Returns the last ones.
        """
        self._count += 1
        head, end, before, index = f"loop{self._count}", f"end{self._count}", self._block, f"%i{self._count}"
        any_ = self.let(f"icmp ult i64 {start}, {stop}")
        self.do(f"br i1 {any_}, label %{head}, label %{end}")
        self._lines.append(f"{head}:")
        self._block = head
        names = tuple(f"%c{self._count}x{number}" for number in range(len(carried)))
        place = len(self._lines)
        values = body(index, *names)
        following = self.let(f"add i64 {index}, {step}")
        more = self.let(f"icmp ult i64 {following}, {stop}")
        last = self._block
        self.do(f"br i1 {more}, label %{head}, label %{end}")
        phis = [f"  {index} = phi i64 [{start}, %{before}], [{following}, %{last}]"]
        results = []
        self._lines.append(f"{end}:")
        self._block = end
        for name, value, (type_, first) in zip(names, values, carried, strict=True):
            phis.append(f"  {name} = phi {type_} [{first}, %{before}], [{value}, %{last}]")
            results.append(self.let(f"phi {type_} [{first}, %{before}], [{value}, %{last}]"))
        self._lines[place:place] = phis
        return tuple(results)

    def text(self) -> str:
        """Return the function."""
        return "\n".join([*self._lines, "  ret void", "}"])


def float32(number: float) -> str:
    """Write a number as a float32: LLVM takes the octets of the double that is equal to it."""
    single = struct.unpack("f", struct.pack("f", number))[0]
    return f"0x{struct.unpack('Q', struct.pack('d', single))[0]:016X}"


def order_of(order: Sequence[int], count: int = 32) -> str:
    """Write a shuffle's order, of `count` elements."""
    assert len(order) == count
    return "<" + ", ".join(f"i32 {index}" for index in order) + ">"


def module_of(functions: Sequence[str], declared: str) -> str:
    """Return a module with these functions, and those lines of declarations that they use."""
    text = "\n".join(functions)
    used = [line for line in declared.splitlines() if line.partition("@")[2].partition("(")[0] in text]
    return "\n".join([*used, text])
