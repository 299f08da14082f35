"""Machines of their own for a few processes: an address behind a router, and a small disk. Linux; no root is needed.

All of it lives in namespaces of this process's own, made by `unshare`, and is gone when the process has ended:

    here 10.77.250.2 --- hub --- 10.77.1.2 server 1
                          |----- 10.77.2.2 server 2 ...

The hub forwards. Told to, it drops what is for one address, without a word: a connection to it neither opens nor ends.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swarm.demo.local import Place

INSIDE = "SWARM_CHAOS_INSIDE"  # set in the environment of whoever is in the namespaces
SELF = 250  # this process's own number in the network; the others count from 1
DISK_BYTES = 4 << 20  # enough for a server's logs, identity and caches
FILLER = "filler"


def namespaces_available() -> bool:
    """Whether this user may make namespaces."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_unshare(), "true"], capture_output=True, check=False).returncode == 0


def enter_namespaces() -> None:
    """Run this very command again, as this process, in namespaces of its own; there it returns and does nothing."""
    if INSIDE not in os.environ:
        line = [*_unshare(), sys.executable, *sys.argv]
        os.execvpe(line[0], line, {**os.environ, INSIDE: "1"})


def _unshare() -> tuple[str, ...]:
    return ("unshare", "--net", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


def plain_place(folder: Path, environment: dict[str, str]) -> Place:
    """Return a place on this machine: loopback, and the disk that everybody uses."""
    folder.mkdir()
    return Place(folder, env=environment)


class Machines:
    """The network and the disks. Made by `machines`, in a process that has entered its namespaces."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")  # for the names that `ip netns` keeps there
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "netns", "add", "hub")
        _run("ip", "netns", "exec", "hub", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _run("ip", "netns", "attach", "here", str(os.getpid()))
        self._connect("here", SELF)
        self.host = _address(SELF)

    def place(self, number: int, folder: Path, environment: dict[str, str]) -> Place:
        """Make machine `number`, from 1, with a disk of DISK_BYTES at `folder`."""
        name = f"m{number}"
        _run("ip", "netns", "add", name)
        self._connect(name, number)
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
        self._closing.callback(_run, "umount", "--lazy", str(folder))
        return Place(folder, _address(number), name, environment)

    def drop(self, number: int) -> None:
        """From now on nothing reaches the machine."""
        _run("ip", "-n", "hub", "route", "add", "blackhole", f"{_address(number)}/32")

    def deliver(self, number: int) -> None:
        """From now on what is sent to the machine reaches it again."""
        _run("ip", "-n", "hub", "route", "del", "blackhole", f"{_address(number)}/32")

    @staticmethod
    def _connect(name: str, number: int) -> None:
        hub, gateway = ("ip", "-n", "hub"), f"10.77.{number}.1"
        _run(*hub, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "wan", "netns", name)
        _run(*hub, "address", "add", f"{gateway}/24", "dev", f"to-{name}")
        _run(*hub, "link", "set", f"to-{name}", "up")
        inside = ("ip", "-n", name)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "address", "add", f"{_address(number)}/24", "dev", "wan")
        _run(*inside, "link", "set", "wan", "up")
        _run(*inside, "route", "add", "default", "via", gateway)


@contextmanager
def machines() -> Iterator[Machines]:
    """Build the network; disks are unmounted at the end."""
    with ExitStack() as closing:
        yield Machines(closing)


def fill_disk(folder: Path) -> None:
    """Leave not a byte free."""
    with (folder / FILLER).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def free_disk(folder: Path) -> None:
    """Give back what `fill_disk` took."""
    (folder / FILLER).unlink()


def _address(number: int) -> str:
    return f"10.77.{number}.2"


def _run(*line: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(line)}: {done.stderr.strip()}")
