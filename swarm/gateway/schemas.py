"""Makes JSON schemas ready to be enforced: closed, and without words that only explain."""

import json
from collections.abc import Mapping
from typing import Any

DEPTH_MAX = 64  # levels of a schema: a deeper one is refused, because Python and llguidance recurse
_MAPS = {"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"}
_PARTS = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "contains"}
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "$ref"}
_EXPLAINING = {"title", "description", "default", "examples", "$comment"}
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


def closed(schema: Mapping[str, Any], members_max: int) -> dict[str, Any]:
    """Return a schema whose objects have no other properties than it names, where it does not say that they may.

    Small models would go on with properties of their own until the length ends them. Formats that are not enforced are
    left out. members_max: properties or alternatives in one place. Raises ValueError beyond it, or for a schema that is
    nested too deep.
    """
    return _closed(schema, members_max, 0, may_close="allOf" not in json.dumps(schema))


def _closed(schema: Mapping[str, Any], members_max: int, depth: int, *, may_close: bool) -> dict[str, Any]:
    if depth > DEPTH_MAX:
        raise ValueError(f"it is nested deeper than {DEPTH_MAX}")

    def inside(value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, list):
            return [inside(each) for each in _counted(value, members_max)]
        return _closed(value, members_max, depth + 1, may_close=may_close) if isinstance(value, Mapping) else value

    whole: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _MAPS and isinstance(value, Mapping):
            whole[word] = {name: inside(each) for name, each in _counted(value, members_max).items()}
        elif word in _PARTS:
            whole[word] = inside(value)
        elif word not in _EXPLAINING and (word != "format" or value in _FORMATS):
            whole[word] = value
    if may_close and _can_close(whole):
        whole["additionalProperties"] = False
    return whole


def _counted(value: Any, members_max: int) -> Any:  # noqa: ANN401 - JSON
    if len(value) > members_max:
        raise ValueError(f"it has more than {members_max} members in one place")
    return value


def _can_close(schema: Mapping[str, Any]) -> bool:
    """Return whether an object with no other properties than a schema names is still possible."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or _OPEN & schema.keys():
        return False
    return set(schema.get("required", [])) <= properties.keys()
