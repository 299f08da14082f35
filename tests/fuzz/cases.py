"""What Hypothesis feeds a parser: any bytes, real inputs that were damaged, and real inputs with other JSON in them."""

import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.parsers import Parser

BYTES_MAX = 600
NESTED = tuple(depth * b"[" + depth * b"]" for depth in (50, 400, 990, 1500, 15_000))
NUMBERS = (0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**40, 0.5, 1e308, -0.0)

_texts = st.text(max_size=40) | st.sampled_from(["0123456789abcdef" * 2, "[::1]:1", "1.2.3.4:5", "a:1", "x" * 400])
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(NUMBERS) | _texts
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_texts, inner, max_size=4), max_leaves=12
)
EDITS = ("flip", "cut", "delete", "insert", "repeat", "splice", "number")
EDIT_BYTES = 6


def cases(parser: Parser) -> st.SearchStrategy[bytes]:
    """Inputs for one parser."""
    seeds = st.sampled_from(parser.seeds)
    damaged = st.builds(_damaged, seeds, seeds, st.binary(min_size=1, max_size=4 * EDIT_BYTES))
    if parser.opened is None:
        return st.one_of(st.binary(max_size=BYTES_MAX), damaged, damaged)
    changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.none() | _texts, st.just(...) | _values), max_size=3)
    changed = st.builds(_changed, st.just(parser), seeds, changes)
    texts = st.sampled_from(NESTED) | _values.map(_json)
    replaced = st.builds(lambda seed, text: parser.opened(seed)[1](text), seeds, texts)
    return st.one_of(st.binary(max_size=BYTES_MAX), damaged, changed, changed, replaced)


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


def _changed(parser: Parser, seed: bytes, changes: list[tuple[int, str | None, Any]]) -> bytes:
    """Give fields of the JSON, at any depth, other values; `...` takes one away."""
    assert parser.opened is not None
    value, close = parser.opened(seed)
    for number, name, new in changes:
        holder, key = _place(value, number)
        if holder is None:
            value = None if new is ... else new
        elif name is not None and isinstance(holder, dict):
            holder[name] = None if new is ... else new
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
