"""Sequence numbers of an identity's records, which grow over restarts, even if the clock went back meanwhile.

They follow the clock (milliseconds). Numbers are reserved in a file, an hour at a time, before they are given out: the
next process begins above them. A file that is lost, or cannot be written, leaves the clock.
"""

import contextlib
import os
from pathlib import Path
from typing import Protocol

import structlog

_log = structlog.get_logger("swarm.directory")


class Sequence(Protocol):
    """Gives out growing numbers."""

    def next(self, now: float) -> int:
        """Return a number larger than all before; `now` in wall seconds."""


class SequenceInMemory:
    """Numbers that grow as long as the process lives; over restarts if the clock does not go back."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, now: float) -> int:
        """Return the clock's milliseconds, or more."""
        self._last = max(int(now * 1000), self._last + 1)
        return self._last


class SequenceInFile:
    """Numbers that grow over restarts. One process at a time, which holds the identity's lock."""

    def __init__(self, path: Path, reserved: int = 3_600_000) -> None:
        """reserved: numbers, one for each millisecond, that are given out before the file is written again."""
        self._path, self._step = path, reserved
        self._last = self._reserved = _read(path)

    def next(self, now: float) -> int:
        """Return the clock's milliseconds, or more."""
        self._last = max(int(now * 1000), self._last + 1)
        if self._last > self._reserved:
            self._reserved = self._last + self._step
            self._write()
        return self._last

    def _write(self) -> None:
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            partial.write_text(f"{self._reserved}\n")
            partial.replace(self._path)
        except OSError as error:
            _log.warning("sequence numbers are not kept", path=str(self._path), why=error.strerror)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _read(path: Path) -> int:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # ValueError: not text
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0  # 15 digits: below 2**53
