"""Limits as values: frozen dataclasses whose fields say their unit and their reason.

A limit is passed to what it bounds, so a test passes another one, and `docs/limits.md` is printed from them.

    @dataclass(frozen=True, slots=True)
    class ChannelLimits:
        frame_timeout_s: float = limit(30.0, "s", "a frame whose rest does not come in time ends the channel")
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Row:
    """One limit, as a table shows it."""

    group: str
    name: str
    value: object
    unit: str
    why: str


def limit(value: Value, unit: str, why: str) -> Value:
    """Declare a field with a default value, its unit, and what happens at the bound."""
    declared: Any = field(default=value, metadata={"unit": unit, "why": why})
    return declared  # type: ignore[no-any-return]


def rows(*groups: Any) -> Iterator[Row]:  # noqa: ANN401 - any frozen dataclass made of `limit` fields
    """List the limits of these groups, in the order in which they are declared."""
    for group in groups:
        for each in fields(group):
            if "unit" in each.metadata:
                name = type(group).__name__
                yield Row(name, each.name, getattr(group, each.name), each.metadata["unit"], each.metadata["why"])
