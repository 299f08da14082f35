"""Values that models write: parameters as plain text, without the quotation marks of JSON, and text beyond UTF-8."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def typed(text: str, kind: str | None, schema: object) -> Any:  # noqa: ANN401 - JSON
    """Return the value that a parameter's text stands for.

    kind: the type as the model has written it: "string" or "true" for a string, anything else for JSON. Without it,
    the parameter's schema decides, and text that is of none of its types stays a string.
    """
    if kind is not None:
        return text if kind in {"string", "true"} else _json_or(text)
    types = types_of(schema)
    if types == {"string"}:
        return text
    literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    value = _json_or(literal)
    if value is literal:
        return text
    if not types or any(_is(value, each) for each in types):
        return value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return text


def _json_or(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def types_of(schema: object) -> set[str]:
    """Return the types that a schema names; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    words = [named] if isinstance(named, str) else named if isinstance(named, Sequence) else ()
    types = {each for each in words if isinstance(each, str)}
    for word in ("anyOf", "oneOf"):
        parts = schema.get(word)
        for part in parts if isinstance(parts, Sequence) else ():
            types |= types_of(part)
    if not types and isinstance(schema.get("enum"), Sequence):
        return {"string"} if all(isinstance(each, str) for each in schema["enum"]) else set()
    return types | ({"null"} if schema.get("nullable") is True else set())


def _is(value: Any, kind: str) -> bool:  # noqa: ANN401 - JSON
    if isinstance(value, bool):
        return kind == "boolean"
    classes: dict[str, Any] = {
        "integer": int,
        "number": (int, float),
        "string": str,
        "null": type(None),
        "object": dict,
        "array": list,
    }
    return isinstance(value, classes.get(kind, ()))


def read(text: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of JSON, with texts that UTF-8 can have. Raises ValueError, also where it nests too deep."""
    try:
        value = json.loads(text)
        return json.loads(encodable(json.dumps(value, ensure_ascii=False))) if "\\u" in text else value
    except RecursionError:
        raise ValueError("it nests too deep") from None


def encodable(text: str) -> str:
    """Return a text that UTF-8 can have: U+FFFD replaces each lone surrogate, which escapes of JSON can write."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
