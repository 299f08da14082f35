"""Comparing logits that were computed in several places."""

from torch import Tensor

TOLERANCE = 3e-5  # fp32


def same_logits(got: Tensor, expected: Tensor) -> bool:
    """Whether they name the same tokens and differ by rounding alone.

    Whatever runs beside a step, and whether a prompt is cut into pieces, changes the shapes that are multiplied, and so
    the last bits (docs/adr/0010-packed-batches.md).
    """
    return got.argmax(-1).equal(expected.argmax(-1)) and (got - expected).abs().max().item() <= TOLERANCE
