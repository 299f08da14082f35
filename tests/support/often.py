"""Which part of a sweep runs in `make test`; `make test-long` runs the rest."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rest_is_long(values: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """Parameters of one test: those of `often` as they are, the others marked `long`. A tuple is several arguments."""
    every = list(values)
    assert set(often) <= set(every), f"unknown: {set(often) - set(every)}"
    rest = [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.long) for v in every if v not in often
    ]
    return [value for value in every if value in often] + rest
