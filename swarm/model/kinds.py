"""Which kind of matrix each weight of a block becomes.

A block of int4 has its smallest linear layers in int8, up to a sixteenth of its weights. Mostly these make keys and
values: all later positions read them, their errors are not spread over many outputs, and there are few of them.
"""

from dataclasses import dataclass

from torch import nn

from swarm.errors import BadConfiguration
from swarm.model.eightbits import IntegerMatrix
from swarm.model.fourbits import FourBitFormat, FourBitMatrix
from swarm.model.integer import IntegerLimits, RoundedMatrix, matrices_of, rounded_of
from swarm.model.owncodes import OwnMatrix
from swarm.model.writing import Layout


@dataclass(frozen=True, slots=True)
class Form:
    """A matrix to be: its kind, and its size [out, in]."""

    kind: type[RoundedMatrix]
    size: tuple[int, int]

    @property
    def layouts(self) -> dict[str, Layout]:
        """The dtype and shape of each of its parts."""
        return self.kind.layouts(*self.size)


def matrix_for(weights: str) -> type[RoundedMatrix]:
    """Return the kind of matrix that names a class. weights: "int8", "int4", "own4", or as `Importance.named`.

    Raises BadConfiguration for another name.
    """
    kinds: tuple[type[RoundedMatrix], ...] = IntegerMatrix, FourBitMatrix, OwnMatrix
    for kind in kinds:
        if kind.weights == weights:
            return kind
    if weights.startswith(f"{FourBitMatrix.weights}-"):
        return FourBitMatrix
    raise BadConfiguration("quantize", f"{weights!r} is neither int8 nor int4")


def kinds_in(
    block: nn.Module,
    matrix: type[RoundedMatrix],
    limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
) -> dict[nn.Module, type[RoundedMatrix]]:
    """Return the kind of each of `rounded_of`'s modules of a block. matrix: the one that names the class.

    It depends on the block alone, which may be on the meta device, so that servers of any span agree.
    """
    sizes = {
        module: sum(n_outputs * n_inputs for n_outputs, n_inputs in matrices_of(module).values())
        for module in rounded_of(block, limits)
    }
    kinds = dict.fromkeys(sizes, matrix)
    if matrix is FourBitMatrix:
        left = sum(sizes.values()) // FourBitFormat.finer
        linears = [module for module in sizes if isinstance(module, nn.Linear)]
        for module in sorted(linears, key=sizes.__getitem__):
            left -= sizes[module]
            if left < 0:
                break
            kinds[module] = IntegerMatrix
    return kinds
