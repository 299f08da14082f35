"""Makes JSON schemas ready to be enforced: closed, and without words that only explain."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Bounds of one schema."""

    members_max: int = limit(1000, "members", "properties or alternatives in one place: compiling takes their square")
    depth_max: int = limit(64, "levels", "a deeper schema is refused, because Python and llguidance recurse")


def closed(schema: Mapping[str, Any], limits: SchemaLimits | None = None) -> dict[str, Any]:
    """Return a schema whose objects have no other properties than it names, where it does not say that they may.

    Small models would go on with properties of their own until the length ends them. Formats that are not enforced are
    left out. Where several parts of a schema speak of one object, none of its objects is closed: it would be without
    the others' properties. Raises ValueError for a schema beyond the limits.
    """
    return _closed(schema, limits or SchemaLimits(), 0, may_close=not _has_parts(schema))


def _has_parts(schema: Mapping[str, Any]) -> bool:
    """Return whether several parts of a schema name properties of one object, or may."""
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, Mapping):
            continue
        left += value.values()
        own, refers = "properties" in value, isinstance(value.get("$ref"), str)
        branches = json.dumps([value.get("anyOf"), value.get("oneOf")]) if own or refers else ""
        if "allOf" in value or (own and refers) or '"properties"' in branches or '"$ref"' in branches:
            return True
    return False


def _closed(schema: Mapping[str, Any], limits: SchemaLimits, depth: int, *, may_close: bool) -> dict[str, Any]:
    if depth > limits.depth_max:
        raise ValueError(f"it is nested deeper than {limits.depth_max}")

    def inside(value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, list):
            return [inside(each) for each in _counted(value, limits.members_max)]
        return _closed(value, limits, depth + 1, may_close=may_close) if isinstance(value, Mapping) else value

    whole: dict[str, Any] = {}
    for word, value in schema.items():
        if word in {"title", "description", "default", "examples", "$comment"}:
            continue  # they only explain
        is_map = word in {"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"}
        if is_map and isinstance(value, Mapping):
            whole[word] = {name: inside(each) for name, each in _counted(value, limits.members_max).items()}
        elif word in {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "contains"}:
            whole[word] = inside(value)
        elif word != "format" or _is_enforced(value):
            whole[word] = value
    if may_close and _can_close(whole):
        whole["additionalProperties"] = False
    return whole


def _counted(value: Any, members_max: int) -> Any:  # noqa: ANN401 - JSON
    if len(value) > members_max:
        raise ValueError(f"it has more than {members_max} members in one place")
    return value


def _is_enforced(form: object) -> bool:
    """Return whether llguidance enforces a string's format."""
    return form in {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


def _can_close(schema: Mapping[str, Any]) -> bool:
    """Return whether an object with no other properties than a schema names is still possible."""
    properties = schema.get("properties")
    others = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "$ref"}
    if not isinstance(properties, Mapping) or others & schema.keys():
        return False
    return set(schema.get("required", [])) <= properties.keys()
