"""Rounded weights on disk: a server that starts again reads a half or a quarter of the bytes, and rounds nothing.

One safetensors file for each block, under the checkpoint's root and the numeric class:

    FOLDER/<root>/<numeric class>/block-0003.<XXH3 of the file>.safetensors

A file is made of weights that were verified against the root, and its digest is verified as it is read. Folder and
files belong to this user, and no other can write to them: a digest in a name proves nothing against a person who can
name files. No other program has to know it, so it is the one that is computed soonest. A file is written under another
name and renamed, so that servers beside each other share a folder.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import transformers
from torch import Tensor
from xxhash import xxh3_128

from swarm.errors import ChecksumMismatch
from swarm.limits import limit
from swarm.model.reading import MalformedWeights, read_tensors
from swarm.model.writing import Piece, write_tensors
from swarm.permissions import is_own

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightCacheLimits:
    """What the cache leaves of a disk, and how long it keeps a file."""

    free_bytes_min: int = limit(1 << 30, "bytes", "of the disk stay free: a block that takes them is not kept")
    unused_s_max: float = limit(30 * 86400.0, "s", "a file that no server has read for so long is deleted")
    stop_s: float = limit(5.0, "s", "a server that ends or moves waits for a disk that has stalled at most so long")
    partial_s_max: float = limit(86400.0, "s", "a file that a server left half written is deleted")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Which weights: the root of the checkpoint that they were made of, and how a span computes with them."""

    root: str
    numeric_class: str


class _Stopped(Exception):
    """Writing is to end."""


@dataclass(frozen=True, slots=True)
class _Stoppable:
    """A file until it is stopped."""

    file: BinaryIO
    stopped: threading.Event

    def write(self, data: bytes | memoryview, /) -> None:
        """Write some bytes. Raises OSError, or _Stopped."""
        if self.stopped.is_set():
            raise _Stopped
        self.file.write(data)


class WeightCache:
    """A folder of rounded weights. Whatever goes wrong in it is told, and costs rounding once more.

    What is saved waits for `write`, so that a server can serve first, and write beside it.
    """

    def __init__(self, folder: Path, limits: WeightCacheLimits = WeightCacheLimits()) -> None:
        """folder: is made when the first block is kept."""
        self.folder = folder
        self.limits = limits
        self._told: set[str] = set()
        self._saved: deque[tuple[CacheKey, str, Sequence[Piece]]] = deque()
        self._stopped = threading.Event()

    def load(
        self, key: CacheKey, part: str, names: AbstractSet[str], keep: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor] | None:
        """Return the tensors of a block's file, verified; None: there is none that fits.

        part: "block-0003", or "rest". names: of the tensors that it has to have. keep: as of `read_tensors`; it may
        raise MalformedWeights.
        """
        try:
            path, digest = self._newest(key, part)
            found = read_tensors(path, digest, names.__contains__, keep, _words(key, part), new_digest=xxh3_128)
            if names != found.keys():
                raise MalformedWeights("tensors are missing")
            os.utime(path)
        except FileNotFoundError:
            return None
        except ChecksumMismatch:
            logger.warning("%s is damaged: its weights are rounded anew", path)
            path.unlink(missing_ok=True)
            return None
        except MalformedWeights:  # of another version
            return None
        except OSError as error:
            self._tell("rounded weights in %s are not used: %s", error)
            return None
        return found

    def save(self, key: CacheKey, part: str, pieces: Sequence[Piece]) -> None:
        """Let the next `write` keep a block's weights, in the place of any that are there. They must not change."""
        self._saved.append((key, part, pieces))

    def write(self) -> None:
        """Write what was saved. Blocks the thread. Without room, or the right, it is told, and nothing more is kept."""
        try:
            while self._saved:
                self._keep(*self._saved.popleft())
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - memory, devices: a server goes on without the files
            self._tell("rounded weights are not kept in %s: %s; the next start rounds them again", error)
        finally:
            self._saved.clear()

    def stop(self) -> None:
        """Let `write`, in another thread, end soon. The block that it is at is not kept."""
        self._stopped.set()

    def tidy(self) -> None:
        """Delete files that no server has read for long, and those that were left half written."""
        for path in self._files():
            half = path.name.startswith(".")
            with contextlib.suppress(OSError):  # another server was quicker
                age_s = time.time() - path.stat().st_mtime
                if age_s > (self.limits.partial_s_max if half else self.limits.unused_s_max):
                    path.unlink()

    def _tell(self, text: str, error: Exception) -> None:
        """Warn once, not for every block."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, self.folder, getattr(error, "strerror", None) or str(error)[:200] or repr(error))

    def _keep(self, key: CacheKey, part: str, pieces: Sequence[Piece]) -> None:
        folder = self._made(key)
        size = sum(piece.n_bytes for piece in pieces)
        if shutil.disk_usage(folder).free < size + self.limits.free_bytes_min:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(folder, key, part, pieces)

    def _write(self, folder: Path, key: CacheKey, part: str, pieces: Sequence[Piece]) -> None:
        partial = folder / f".{part}.{secrets.token_hex(4)}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:  # not synced: a torn file has another digest
                digest = write_tensors(_Stoppable(file, self._stopped), _words(key, part), pieces, xxh3_128)
            path = folder / f"{part}.{digest}.safetensors"
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        for other in _of_part(folder, part):
            if other != path:
                other.unlink(missing_ok=True)

    def _newest(self, key: CacheKey, part: str) -> tuple[Path, str]:
        """Return a block's file and the digest that it has to have. Raises FileNotFoundError and PermissionError."""
        folder = self._of(key)
        paths = sorted(_of_part(folder, part), key=lambda path: path.stat().st_mtime)
        if not paths:
            raise FileNotFoundError
        self._trust(*self._folders(key), paths[-1])
        return paths[-1], paths[-1].stem.rpartition(".")[2]

    def _made(self, key: CacheKey) -> Path:
        for folder in self._folders(key):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._trust(*self._folders(key))
        return self._of(key)

    def _folders(self, key: CacheKey) -> tuple[Path, ...]:
        return self.folder, self.folder / key.root, self._of(key)

    def _of(self, key: CacheKey) -> Path:
        return self.folder / key.root / key.numeric_class

    def _trust(self, *paths: Path) -> None:
        for path in paths:
            if not is_own(path.stat()):
                raise PermissionError(errno.EACCES, f"others own {path}, or can write to it")

    def _files(self) -> Iterator[Path]:
        """List what this cache has made in the folder, and nothing else: a user may have named any."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*/*/*"):
                ours = re.fullmatch(r"\.?(block-\d{4}|rest)[-.][0-9a-f]+(\.safetensors)?", path.name)
                if ours and re.fullmatch(r"[0-9a-f]{64}", path.parent.parent.name):
                    yield path


def _of_part(folder: Path, part: str) -> list[Path]:
    pattern = re.compile(rf"{part}\.[0-9a-f]{{32}}\.safetensors")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _words(key: CacheKey, part: str) -> dict[str, str]:
    """Return what a file says of itself: one in another's place, or of another `transformers`, does not fit."""
    return {
        "format": "swarm rounded weights 1",
        "root": key.root,
        "numeric_class": key.numeric_class,
        "part": part,
        "transformers": transformers.__version__,
    }
