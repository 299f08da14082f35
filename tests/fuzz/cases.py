"""What Hypothesis feeds a parser: any bytes, real inputs that were damaged, and real inputs with other JSON in them."""

import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.parsers.base import Parser

BYTES_MAX = 600
NESTED = tuple(depth * b"[" + depth * b"]" for depth in (50, 400, 990, 1500, 15_000))
ODD = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**40, 0.5, 1e308, -0.0, float("nan"), float("inf")),
    *("", " ", "x" * 400, "0" * 32, "0123456789abcdef" * 4, "\0", "\ud800", "\u00fc", "1.2.3.4:5", "[::1]:1", "a:1"),
    *("step", "open", "float32", "online", [], {}, [[]], [0, 1], [1, 0], [-1] * 300, ["x"] * 20, [[0, 4]], {"x": {}}),
    {"dtype": "uint8", "shape": [1, 1 << 26, 1 << 26]},
    {"dtype": "float32", "shape": [1]},
)

_values = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=40)
EDITS = ("flip", "cut", "delete", "insert", "repeat", "splice", "number")
EDIT_BYTES = 6


def cases(parser: Parser) -> st.SearchStrategy[bytes]:
    """Inputs for one parser."""
    seeds = st.sampled_from(parser.seeds)
    damaged = st.builds(_damaged, seeds, seeds, st.binary(min_size=1, max_size=4 * EDIT_BYTES))
    if parser.opened is None:
        return st.one_of(st.binary(max_size=BYTES_MAX), damaged, damaged)
    one = st.builds(_changed, st.just(parser), seeds, st.integers(0, 1 << 24), st.just(...) | _values)
    two = st.builds(_changed, st.just(parser), one, st.integers(0, 1 << 24), _values)
    nested = st.builds(lambda seed, text: parser.opened(seed)[1](text), seeds, st.sampled_from(NESTED))
    return st.one_of(st.binary(max_size=BYTES_MAX), damaged, one, one, two, nested)


def _damaged(seed: bytes, other: bytes, recipe: bytes) -> bytes:
    """Carry out edits: of each EDIT_BYTES of the recipe the first says what, two say where, the others are put in."""
    data = bytearray(seed)
    for first in range(0, len(recipe), EDIT_BYTES):
        edit = recipe[first : first + EDIT_BYTES]
        number, extra = int.from_bytes(edit[1:3], "big"), edit[3:]
        at = number % (len(data) + 1)
        match EDITS[edit[0] % len(EDITS)]:
            case "flip":
                data[at : at + 1] = bytes(byte ^ (edit[-1] or 1) for byte in data[at : at + 1])
            case "cut":
                del data[at:]
            case "delete":
                del data[at : at + 1 + edit[-1] % 64]
            case "insert":
                data[at:at] = extra
            case "repeat":
                data[at:at] = data[at : at + 32] * (1 + edit[-1] % 16)
            case "splice":
                data[at:] = other[number % (len(other) + 1) :]
            case "number":  # a length or a count, of 1 to 4 bytes
                size = 1 + number % 4
                data[at : at + size] = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4))[edit[-1] % 3][:size]
    return bytes(data)


def _changed(parser: Parser, data: bytes, number: int, new: Any) -> bytes:
    """Give one field of the JSON, at any depth, another value; `...` takes it away, or all of them."""
    assert parser.opened is not None
    try:
        value, close = parser.opened(data)
    except (ValueError, RecursionError):
        return data  # it is no JSON any more
    holder, key = _place(value, number)
    if holder is None:
        value = [] if new is ... else new
    elif new is ...:
        del holder[key]
    else:
        holder[key] = new
    return close(_json(value))


def _place(value: Any, number: int) -> tuple[Any, Any]:
    """Choose a field by a number: its dictionary or list, and its key."""
    holder, key = None, None
    while isinstance(value, (dict, list)) and len(value):
        number, index = divmod(number, len(value))
        holder, key = value, sorted(value)[index] if isinstance(value, dict) else index
        value = holder[key]
        if number % 2:
            break
    return holder, key


def _json(value: Any) -> bytes:
    """The canonical form, where there is one; strangers send NaN and half characters as well."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")
