"""Which part of a sweep runs in `make test`; `make test-long` runs the rest."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rest_is_long(values: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """Parameters of one test: those of `often` as they are, the others marked `long`."""
    every = list(values)
    assert set(often) <= set(every), f"unknown: {set(often) - set(every)}"
    return [value if value in often else pytest.param(value, marks=pytest.mark.long) for value in every]
