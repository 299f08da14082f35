"""How much each input of a layer counts: its mean square in texts. int4 weighs its errors by these.

They are measured once for a checkpoint (`swarm.model.weighing`), and lie beside its weights in a file of their own,
which its root does not name: servers with other classes of weights do not need it. The digest of the file is a part of
the numeric class, as in "int4-0123456789ab", so servers of one class have rounded to the same steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from swarm.errors import UnsupportedCheckpoint
from swarm.model.manifest import sha256_of, write_atomically
from swarm.model.reading import MalformedWeights, read_tensors

IMPORTANCE_NAME = "swarm-importance.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """The mean squares of layers' inputs. model: of this checkpoint, as the user wrote it. digest: of the file, in hex.

    squares: by the model's names of weights, float32 [in] each.
    """

    model: str
    digest: str
    squares: Mapping[str, Tensor]

    def of(self, name: str, n_inputs: int) -> Tensor | None:
        """Return a weight's, float32 [in]; None: the file has none. Raises UnsupportedCheckpoint for another size."""
        found = self.squares.get(name)
        if found is not None and len(found) != n_inputs:
            why = f"{IMPORTANCE_NAME} has {len(found)} inputs of {name}, which has {n_inputs}"
            raise UnsupportedCheckpoint(self.model, why)
        return found

    def named(self, weights: str) -> str:
        """Return the name of weights that are rounded by it, as "int4-0123456789ab"."""
        return f"{weights}-{self.digest[:12]}"


def read_importance(model: str, path: Path, root: str, expected: str | None = None) -> Importance:
    """Read a checkpoint's file. expected: its SHA-256, where the hub tells it.

    Raises UnsupportedCheckpoint, or ChecksumMismatch.
    """
    try:
        if path.stat().st_size > 1 << 30:
            raise MalformedWeights("it is larger than 1 GiB")
        digest = expected or sha256_of(path)
        squares = read_tensors(path, digest, lambda name: True, _kept, _words(root))
    except (MalformedWeights, OSError) as error:
        why = f"its {IMPORTANCE_NAME} cannot be used ({error}): make it again with swarm-importance, or delete it"
        raise UnsupportedCheckpoint(model, why) from None
    return Importance(model, digest, squares)


def write_importance(model: str, path: Path, root: str, squares: Mapping[str, Tensor]) -> Importance:
    """Write a checkpoint's file, in one step, and read it. squares: as of `Importance`. Raises OSError as well."""
    write_atomically(path, save({name: each.contiguous() for name, each in squares.items()}, _words(root)))
    return read_importance(model, path, root)


def _kept(name: str, squares: Tensor) -> Tensor:
    if squares.dtype is not torch.float32 or squares.dim() != 1:
        raise MalformedWeights(f"{name[:200]!r} is no list of float32")
    if not bool((squares.isfinite() & (squares >= 0)).all()):
        raise MalformedWeights(f"{name[:200]!r} has numbers that no mean square can be")
    return squares


def _words(root: str) -> dict[str, str]:
    """Return the words that a file has to say of itself: one of another checkpoint has others."""
    return {"format": "swarm importance 1", "root": root}
