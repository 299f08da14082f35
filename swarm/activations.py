"""Activations, the one thing that travels along a route, and the numeric class in which a span computes them.

Classes whose numbers are about as close to float32's as each other's are of one *tier*: routes may mix them.

torch is imported where a tensor is touched, and not before: a process that only shakes hands and pings does without.
"""

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """Some positions of every row of a session, between two blocks.

    hidden: [rows, tokens, hidden_size]. positions: int64 [1 or rows, tokens], position ids; None where they count on
    from the position before. mask: uint8 [rows, tokens], these positions' columns of the 2-D attention mask, 0 for
    padding; None where none of them is. finite: whether all numbers of hidden are known to be finite: steps that were
    computed or received together are looked at together.
    """

    hidden: "Tensor"
    positions: "Tensor | None" = None
    mask: "Tensor | None" = None
    finite: bool = field(default=False, compare=False)

    def is_finite(self) -> bool:
        """Return whether no number of hidden is infinite or NaN."""
        return self.finite or is_finite(self.hidden)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.hidden.shape[0]

    @property
    def tokens(self) -> int:
        """Positions of each row."""
        return self.hidden.shape[1]

    @property
    def n_bytes(self) -> int:
        """Memory that the tensors take together."""
        n_bytes: int = self.hidden.nbytes
        if self.positions is not None:
            n_bytes += self.positions.nbytes
        if self.mask is not None:
            n_bytes += self.mask.nbytes
        return n_bytes

    def part(self, start: int, stop: int) -> "Activations":
        """Return the columns [start, stop), as views."""
        if start == 0 and stop >= self.tokens:
            return self
        return Activations(
            self.hidden[:, start:stop],
            None if self.positions is None else self.positions[:, start:stop],
            None if self.mask is None else self.mask[:, start:stop],
        )

    def last(self, tokens: int) -> "Activations":
        """Return the trailing columns, as views."""
        return self.part(self.tokens - tokens, self.tokens)

    def with_hidden(self, hidden: "Tensor") -> "Activations":
        """Return the same positions after some blocks."""
        return Activations(hidden, self.positions, self.mask)

    def to(self, device: "torch.device") -> "Activations":
        """Return the same on a device."""
        return Activations(
            self.hidden.to(device),
            None if self.positions is None else self.positions.to(device),
            None if self.mask is None else self.mask.to(device),
        )

    def copied(self) -> "Activations":
        """Return a copy on the host that shares no memory with the caller's tensors."""
        return Activations(
            self.hidden.to("cpu", copy=True),
            None if self.positions is None else self.positions.to("cpu", copy=True),
            None if self.mask is None else self.mask.to("cpu", copy=True),
        )


def is_finite(tensor: "Tensor") -> bool:
    """Whether no element is infinite or NaN.

    The sum of elements of which one is not finite is not finite either, and takes a tenth of the time that looking at
    each takes; only a sum that overflows needs that.
    """
    import torch  # noqa: PLC0415 - see above

    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


@dataclass(frozen=True, slots=True, order=True)
class NumericClass:
    """How a span computes: spans of different classes compute different numbers, and those of one tier may be mixed.

    dtype: of hidden states and arithmetic, as "float32". weights: how the weights are stored where that is another way,
    as "bitsandbytes-4bit", or "int4-0123456789ab" where a file of this digest tells which inputs count. wire: how
    activations travel where that is another way.
    """

    dtype: str
    weights: str = ""
    wire: str = ""

    @classmethod
    def parse(cls, text: str) -> "NumericClass":
        """Read what `str` prints and records carry: dtype[+weights[+wire]]. Raises ValueError."""
        match = re.fullmatch(r"([a-z0-9][a-z0-9_.-]*)(?:\+([a-z0-9_.-]*))?(?:\+([a-z0-9_.-]+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is not a numeric class")
        return cls(match[1], match[2] or "", match[3] or "")

    @property
    def integers(self) -> str:
        """What the weights are rounded to by servers themselves: "int8", "int4", "own4", or nothing."""
        kind = self.weights.partition("-")[0]
        return kind if kind in {"int8", "int4", "own4"} else ""

    def sent(self, wire: str | None) -> "NumericClass":
        """Return the class of sessions whose activations travel so; the same for None."""
        return self if wire is None else replace(self, wire=wire)

    def __str__(self) -> str:
        parts = [self.dtype, self.weights, self.wire]
        while not parts[-1]:
            parts.pop()
        return "+".join(parts)


class Tier(StrEnum):
    """The tiers of known classes, by their distance to float32 (docs/quantisation.md)."""

    FULL = "full"  # KL below 0.001 nats: as close as bfloat16
    FLOAT8 = "fp8"  # computed with weights in FP8: 0.004
    FOUR_BITS = "4 bits"  # 0.02 and more


def tier_of(numeric_class: str) -> str:
    """Return the tier of a class, of which servers may be in one route; for an unknown class a tier of its own.

    numeric_class: as `str` of a NumericClass prints it, or any text of a record.
    """
    try:
        parsed = NumericClass.parse(numeric_class)
    except ValueError:
        return f"{numeric_class} alone"
    if parsed.dtype not in {"float32", "bfloat16", "float16"}:
        return f"{parsed.dtype} alone"
    match parsed.integers or parsed.weights:
        case "" | "int8" | "q8_0" | "own4":
            return Tier.FULL
        case "fp8":
            return Tier.FLOAT8
        case "int4" | "q4_0" | "q4_1" | "iq4_nl" | "nf4" | "mxfp4":
            return Tier.FOUR_BITS
        case other if other.endswith("-8bit"):
            return Tier.FULL
        case other if other.endswith("-4bit"):
            return Tier.FOUR_BITS
    return f"{parsed.weights} alone"
