"""What a part of `nat.py` has measured, and what the project promises of it."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import Samples


@dataclass(frozen=True, slots=True)
class Line:
    """One promise. bound: the most that is allowed, or with `least` the least; None promises nothing."""

    what: str
    value: float
    unit: str
    bound: float | None = None
    least: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is kept."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.least else self.value <= self.bound

    @property
    def cells(self) -> list[str]:
        """Its row in a table."""
        sign = "" if self.bound is None else f"{'>=' if self.least else '<='} {shown(self.bound)} {self.unit}"
        return [self.what, f"{shown(self.value)} {self.unit}".strip(), sign.strip()]


COLUMNS = ("", "measured", "promised")


@dataclass(slots=True)
class Part:
    """The result of one part. facts: what else was seen."""

    samples: list[Samples] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)


def part_of(path: Path | None, name: str) -> Part | None:
    """Return the samples and facts of a part that was measured before; None if there is no such file."""
    if path is None or not path.exists():
        return None
    run = json.loads(path.read_text())
    return Part([Samples(**sample) for sample in run["samples"]], [], run["facts"][name])


def middle(values: Sequence[float]) -> float:
    """Return the median; of nothing, infinity: a promise about what never came does not hold."""
    return statistics.median(values) if values else float("inf")


def late(values: Sequence[float], share: float = 0.95) -> float:
    """Return the value that `share` of all do not exceed; of nothing, infinity."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def shown(value: float) -> str:
    """Return a figure with three digits."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
