"""The manifest of a checkpoint: the SHA-256 of its config and of every weight file. Its digest is the model's name.

Two parties that have the same root compute with the same files, wherever they got them from. Names, order and digests
go into the root; paths, sizes, repositories and revisions do not.
"""

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from tqdm import tqdm

from swarm.errors import ChecksumMismatch, UnsupportedCheckpoint

MANIFEST_NAME = "swarm-manifest.json"  # a checkpoint may carry its manifest; then files that it lacks need no hashing

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """File names and their SHA-256 in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    files: dict[FileName, Digest] = Field(min_length=2, max_length=4096)

    @property
    def root(self) -> str:
        """The manifest's digest, 64 hex digits."""
        lines = (f"{name}\x00{digest}\n".encode() for name, digest in sorted(self.files.items()))
        return hashlib.sha256(b"swarm manifest 1\n" + b"".join(lines)).hexdigest()

    def verify(self, path: Path, name: str) -> None:
        """Hash a file and compare. Raises ChecksumMismatch."""
        actual = sha256_of(path)
        if actual != self.files[name]:
            raise ChecksumMismatch(str(path), self.files[name], actual)

    def save(self, directory: Path) -> None:
        """Write the manifest into its checkpoint, in one step."""
        write_atomically(directory / MANIFEST_NAME, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, directory: Path) -> "Manifest | None":
        """Read the manifest that a checkpoint carries, if it does. Raises UnsupportedCheckpoint."""
        path = directory / MANIFEST_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise UnsupportedCheckpoint(str(directory), f"{MANIFEST_NAME} cannot be read: {error}") from None


def sha256_of(path: Path) -> str:
    """Hash a file of any size; shows a progress bar for large ones. Returns 64 hex digits."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    size = path.stat().st_size
    quick = size < 64 << 20  # hashed before a bar could be read
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=f"checking {path.name}", disable=quick, leave=False)
    with path.open("rb", buffering=0) as file, bar:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            bar.update(count)
    return digest.hexdigest()


class HashCache:
    """Remembers the hashes of local files, by path, size, time and inode."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def digest(self, path: Path, *, accept_changes: bool) -> str:
        """Return a file's SHA-256, hashing it only if it is new here or was touched.

        A file that was touched, kept its size and has other contents is taken for damaged: raises ChecksumMismatch,
        unless `accept_changes` says that it was changed on purpose.
        """
        path = path.resolve()
        status = path.stat()
        entry = _Entry(
            path=str(path), size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino, sha256="0" * 64
        )
        known = self._read(path)
        if known is not None and known.model_copy(update={"sha256": entry.sha256}) == entry:
            return known.sha256
        actual = sha256_of(path)
        if known is not None and known.size == entry.size and known.sha256 != actual and not accept_changes:
            remedy = f"fetch the file again, or delete {self._file(path)} if it was changed on purpose"
            raise ChecksumMismatch(str(path), known.sha256, actual, remedy)
        with contextlib.suppress(OSError):  # where nothing can be remembered it is hashed again
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(path), entry.model_copy(update={"sha256": actual}).model_dump_json())
        return actual

    def _file(self, path: Path) -> Path:
        return self._directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:40]}.json"

    def _read(self, path: Path) -> "_Entry | None":
        try:
            entry = _Entry.model_validate_json(self._file(path).read_bytes())
        except (OSError, ValidationError):
            return None
        return entry if entry.path == str(path) else None


class _Entry(BaseModel):
    """The facts that are remembered of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: Digest


class WeightIndex(BaseModel):
    """`model.safetensors.index.json`: which file has which tensor."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    weight_map: dict[str, FileName] = Field(min_length=1)

    @classmethod
    def parse(cls, model: str, data: bytes) -> "WeightIndex":
        """Read an index. Raises UnsupportedCheckpoint."""
        try:
            index = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise UnsupportedCheckpoint(model, f"its index is malformed at {first['loc']}: {first['msg']}") from None
        for name in index.files:
            if not name.endswith(".safetensors"):
                raise UnsupportedCheckpoint(model, f"its index names {name!r}; only safetensors are read")
        return index

    @property
    def files(self) -> tuple[str, ...]:
        """The weight files, in order of name."""
        return tuple(sorted(set(self.weight_map.values())))

    def only(self, names: set[str]) -> bytes:
        """Return the index reduced to some tensors, as JSON."""
        kept = {name: file for name, file in self.weight_map.items() if name in names}
        return json.dumps({"metadata": {}, "weight_map": kept}).encode()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file so that a reader sees either all of it or the one before."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
