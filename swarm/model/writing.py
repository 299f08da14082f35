"""Writes a safetensors file tensor by tensor: no more of them are in memory than one piece has."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from swarm.model.reading import Hash, format_name


class Layout(NamedTuple):
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tensors of a file that are made together, when they are written.

    layouts: by their names, in the order in which `make` returns them. address: of the first one, modulo 64, which it
    gets again when it is read (`swarm.model.reading`).
    """

    layouts: Mapping[str, Layout]
    make: Callable[[], Sequence[Tensor]]
    address: int = 0

    @property
    def n_bytes(self) -> int:
        """The bytes of all its tensors."""
        return sum(layout.n_bytes for layout in self.layouts.values())


class Writable(Protocol):
    """What takes a file's bytes, one part after the other."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of them. Raises OSError."""


def write_tensors(
    file: Writable,
    metadata: Mapping[str, str],
    pieces: Sequence[Piece],
    new_digest: Callable[[], Hash] | None = None,
) -> str:
    """Write a safetensors file. Returns its digest in hex: the same tensors and words always give the same file.

    metadata: words that the file says of itself. new_digest: as of `read_tensors`. Raises OSError.
    """
    digest = (new_digest or hashlib.sha256)()

    def put(data: bytes | memoryview) -> None:
        for start in range(0, len(data), 16 << 20):  # a writer can be stopped between two of them
            file.write(data[start : start + (16 << 20)])
        digest.update(data)

    head, gaps = _head(metadata, pieces)
    put(len(head).to_bytes(8, "little") + head)
    for piece, gap in zip(pieces, gaps, strict=True):
        put(bytes(gap))
        tensors = piece.make()
        for tensor, layout in zip(tensors, piece.layouts.values(), strict=True):
            assert layout == (tensor.dtype, tuple(tensor.shape)), f"another tensor than was said: {layout}"
            numbers: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            put(memoryview(numbers))
    return digest.hexdigest()


def _head(metadata: Mapping[str, str], pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """Return the file's header, and the bytes in front of each piece that bring it to its address."""
    alignment = 64  # bytes, as of a reader
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    gaps: list[int] = []
    end = 0

    def enter(name: str, layout: Layout) -> None:
        nonlocal end
        place = [end, end + layout.n_bytes]
        entries[name] = {"dtype": format_name(layout.dtype), "shape": list(layout.shape), "data_offsets": place}
        end = place[1]

    for number, piece in enumerate(pieces):
        gaps.append((piece.address - end) % alignment)
        if gaps[-1]:
            enter(f"gap.{number}", Layout(torch.uint8, (gaps[-1],)))
        for name, layout in piece.layouts.items():
            enter(name, layout)
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % alignment), gaps
