"""The memory that a process's control groups leave it: systemd's units and containers limit it so."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Places:
    """Where Linux tells of control groups. groups: those that this process is in; mounted: the folder of all."""

    groups: Path = Path("/proc/self/cgroup")
    mounted: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """Of one version's files, and of the file cache in its `memory.stat` that the kernel drops first."""

    limits: tuple[str, ...]
    used: str
    cache: str


def bytes_left(places: Places = Places()) -> int | None:
    """Return how many bytes this process can take before one of its groups is at its limit; None without a limit.

    File cache that has not been used lately counts as free: the kernel drops it before it refuses memory.
    """
    return min((left for group, names in _groups(places) if (left := _left(group, names)) is not None), default=None)


def _groups(places: Places) -> Iterator[tuple[Path, _Names]]:
    """Yield the groups that the process is in, and those around them, by the version that limits memory."""
    try:
        lines = places.groups.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, names = places.mounted, _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = places.mounted / "memory"
            names = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]  # a container has its own root
        for depth in range(len(inner) + 1):
            yield root.joinpath(*inner[:depth]), names


def _left(group: Path, names: _Names) -> int | None:
    """Return the bytes that one group can still take; None where it has no limit."""
    limits = [value for name in names.limits if (value := _number(group / name)) is not None]
    used = _number(group / names.used)
    if not limits or used is None:
        return None
    return max(0, min(limits) - max(0, used - _cache(group / "memory.stat", names.cache)))


def _number(path: Path) -> int | None:
    """Read a file of one number; None where it says "max", or is not there."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _cache(stat: Path, name: str) -> int:
    try:
        lines = stat.read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
