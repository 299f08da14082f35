"""Reads a weight file once: every byte is hashed, and the tensors that are wanted are kept as they pass.

The path is not read a second time, and nothing stays mapped. So a disk, or a program, that changes the file once it is
verified changes no weight, and cannot end the process with a bus error.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from tqdm import tqdm

from swarm.errors import ChecksumMismatch


class Hash(Protocol):
    """A digest of bytes that come one after the other, as `hashlib` has them."""

    def update(self, data: Any, /) -> object:  # noqa: ANN401 - any bytes
        """Go on with more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all of them, in hex."""
        ...


class MalformedWeights(ValueError):
    """A file whose bytes are those that were expected, and that is no safetensors file."""


class Held:
    """A tensor that `from_pretrained` takes out once, so that none is held in the file's dtype and in the model's."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._shape = list(tensor.shape)
        self._tensor: Tensor | None = tensor

    def __getitem__(self, index: Any) -> Tensor:  # noqa: ANN401 - as of a tensor
        assert self._tensor is not None, "it was taken before"
        tensor, self._tensor = self._tensor, None
        return tensor[index]

    def get_shape(self) -> list[int]:
        """Return the tensor's shape, as a slice of safetensors does."""
        return self._shape

    def is_floating_point(self) -> bool:
        """Return whether it has a floating dtype, as a tensor does."""
        return self.dtype.is_floating_point


class _Facts(BaseModel):
    """The header's facts of one tensor. data_offsets: from and to, behind the header."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    dtype: str
    shape: list[Annotated[int, Field(ge=0, lt=1 << 62)]] = Field(max_length=64)
    data_offsets: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


def read_tensors(
    path: Path,
    expected: str,
    wants: Callable[[str], bool],
    keep: Callable[[str, Tensor], Tensor] | None = None,
    metadata: dict[str, str] | None = None,
    lists: Callable[[Collection[str]], None] | None = None,
    new_digest: Callable[[], Hash] | None = None,
) -> dict[str, Tensor]:
    """Read a safetensors file, and return the tensors that are wanted, by name. Shows a progress bar for large files.

    expected: the file's digest in hex. wants: whether a tensor of this name is kept. keep: makes the one that is kept.
    metadata: the words that the file must say of itself; None: any. lists: gets the names of all its tensors first.
    new_digest: of which kind the digest is; None: SHA-256.
    Raises ChecksumMismatch, or MalformedWeights where the digest is right.
    """
    size = path.stat().st_size
    quick = size < 64 << 20  # read before a bar could be
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"reading {path.name}", disable=quick, leave=False)
    tensors: dict[str, Tensor] = {}
    malformed: MalformedWeights | None = None
    with path.open("rb", buffering=0) as file, bar:
        stream = _Stream(file, size, bar, (new_digest or hashlib.sha256)())
        try:
            for name, facts, dtype in _contents(stream, metadata, lists):
                if wants(name):
                    tensor = stream.tensor(facts, dtype)
                    tensors[name] = tensor if keep is None else keep(name, tensor)
                else:
                    stream.skip(facts.data_offsets[1] - facts.data_offsets[0])
        except MalformedWeights as error:
            malformed = error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - made of bytes that nothing vouches for yet: the digest speaks first
            malformed = MalformedWeights(f"its tensors cannot be read: {str(error)[:200] or repr(error)}")
        actual = stream.digest_of_all()
    if actual != expected:
        raise ChecksumMismatch(str(path), expected, actual)
    if malformed is not None:
        raise malformed
    return tensors


class _Stream:
    """A file that is hashed as it is read, from its first byte to its last."""

    def __init__(self, file: FileIO, size: int, bar: tqdm, digest: Hash) -> None:
        self.left = size
        self.position = 0
        self._file, self._bar = file, bar
        self._digest = digest
        self._waste = memoryview(bytearray(1 << 20))

    def fill(self, room: memoryview) -> None:
        """Read so many bytes. Raises MalformedWeights where the file ends before."""
        while len(room):
            count = self._file.readinto(room[: 16 << 20])
            if not count:
                raise MalformedWeights("the file ends too early")
            self._digest.update(room[:count])
            self._bar.update(count)
            self.position += count
            self.left -= count
            room = room[count:]

    def take(self, n_bytes: int) -> bytes:
        """Read so many bytes."""
        room = bytearray(n_bytes)
        self.fill(memoryview(room))
        return bytes(room)

    def skip(self, n_bytes: int) -> None:
        """Read so many bytes, and keep none."""
        while n_bytes:
            part = self._waste[:n_bytes]
            self.fill(part)
            n_bytes -= len(part)

    def tensor(self, facts: _Facts, dtype: torch.dtype) -> Tensor:
        """Read a tensor to an address of the alignment that it has in the file.

        Kernels sum in another order where that differs. So a span and a stock model on the mapped file compute the
        same, to the last bit.
        """
        n_bytes = facts.data_offsets[1] - facts.data_offsets[0]
        alignment = 64  # bytes: a cache line, and the widest vector register
        room = torch.empty(n_bytes + alignment, dtype=torch.uint8)
        offset = (self.position - room.data_ptr()) % alignment
        if offset % dtype.itemsize:  # a file that is not aligned
            offset = 0
        part = room[offset : offset + n_bytes]
        numbers: Any = part.numpy()  # a buffer, which numpy's types do not say
        self.fill(memoryview(numbers))
        return part.view(dtype).view(facts.shape)

    def digest_of_all(self) -> str:
        """Read what is left, and return the digest of the whole file in hex."""
        while count := self._file.readinto(self._waste):
            self._digest.update(self._waste[:count])
            self._bar.update(count)
        return self._digest.hexdigest()


def _contents(
    stream: _Stream,
    metadata: dict[str, str] | None = None,
    lists: Callable[[Collection[str]], None] | None = None,
) -> Iterator[tuple[str, _Facts, torch.dtype]]:
    """Read the header, and return its tensors in the file's order: they lie one behind the other, without gaps.

    Nothing is verified yet, so every length is compared with what the file has. Raises MalformedWeights.
    """
    length = int.from_bytes(stream.take(8), "little")
    if length > min(stream.left, 100_000_000):  # the format's own bound
        raise MalformedWeights("its header is longer than the file")
    header: TypeAdapter[dict[str, _Facts | dict[str, str]]] = TypeAdapter(dict[str, _Facts | dict[str, str]])
    try:
        entries = header.validate_json(stream.take(length))
    except ValidationError as error:
        raise MalformedWeights(f"its header is malformed: {error.errors()[0]['msg']}") from None
    says = entries.pop("__metadata__", None)
    if metadata is not None and says != metadata:
        raise MalformedWeights("it says other words of itself")
    tensors = {name: facts for name, facts in entries.items() if isinstance(facts, _Facts)}
    if len(tensors) != len(entries):
        raise MalformedWeights("its header is malformed")
    if lists is not None:
        lists(tensors.keys())
    end, left = 0, stream.left
    for name, facts in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = facts.data_offsets
        dtype = _dtype(facts.dtype)
        if start != end or not start <= stop <= left or stop - start != math.prod(facts.shape) * dtype.itemsize:
            raise MalformedWeights(f"the place of {name[:200]!r} in it does not fit")
        end = stop
        yield name, facts, dtype
    if end != left:
        raise MalformedWeights("it is longer than its header says")


def _dtype(name: str) -> torch.dtype:
    """Return the dtype that safetensors calls so. Raises MalformedWeights."""
    dtype = getattr(torch, _dtypes().get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise MalformedWeights(f"it has tensors of dtype {name[:32]!r}")
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype."""
    wanted = str(dtype).removeprefix("torch.")
    return next(name for name, ours in _dtypes().items() if ours == wanted)


def _dtypes() -> dict[str, str]:
    """Return torch's name of each dtype of safetensors."""
    return {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }
