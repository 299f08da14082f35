"""Network namespaces without names: each lives as long as the process that holds it, and holders end with their lab.

Root makes them directly. Other users make them in a user namespace of their own, where they are root.
"""

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.support.lab import holder
from tests.support.lab.routers import KINDS, rules

PROGRAMS = ("ip", "nft", "nsenter", "unshare")
PYTHON = (sys.executable, "-I", "-S")  # without site packages: it starts in 10 ms
SETUP_S = 30.0  # a namespace's set-up that takes longer has failed
AS_ROOT = ("--net",)
AS_USER = ("--user", "--map-root-user", "--net")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))  # users may lack the latter two


class LabError(Exception):
    """The lab could not be set up, or a command in it failed."""


@functools.cache
def way() -> tuple[str, ...]:
    """Return the options with which `unshare` gives this user a network. Raises LabError where there is no way."""
    if sys.platform != "linux":
        raise LabError("needs network namespaces: Linux only")
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        raise LabError(f"needs {', '.join(missing)}: apt-get install iproute2 nftables util-linux")
    said = ""
    for options in (AS_ROOT, AS_USER) if os.geteuid() == 0 else (AS_USER,):
        tried = _shell(("unshare", *options, "--", "sh", "-e"), _trial())
        if tried.returncode == 0:
            return options
        said = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise LabError(f"this user may not make routers in network namespaces: {said}")


def unavailable() -> str:
    """Return the reason why no lab can run here; "" where one can."""
    try:
        way()
    except LabError as error:
        return str(error)
    return ""


class Namespace:
    """A network of its own. Closed, it ends every process that is still in it."""

    def __init__(self, options: Sequence[str], inside: "Namespace | None" = None) -> None:
        """options: of `unshare`. inside: a namespace whose user is to own this one."""
        self._options = tuple(options)
        entering = inside._entering("--user") if inside is not None and "--user" in options else ()
        kinds = AS_ROOT if entering else self._options
        self._asking, given = socket.socketpair()
        with given:
            line = (*entering, "unshare", *kinds, "--", *PYTHON, str(holder.__file__))
            self._holder = subprocess.Popen(line, stdin=given, process_group=0, env=_environment())
        self.pid = self._holder.pid
        if self._asking.recv(1) != holder.READY:
            self._asking.close()
            raise LabError(f"no namespace: {line[0]} ended with {self._holder.wait()}")
        self.path = Path(f"/proc/{self.pid}/ns/net")
        self._identity = self.path.readlink()

    def command(self, line: Sequence[str]) -> list[str]:
        """Return the command line that runs `line` in this namespace."""
        kinds = ("--user", "--net") if "--user" in self._options else ("--net",)
        return [*self._entering(*kinds), *line]

    def configure(self, script: str) -> None:
        """Run a script of the shell. Raises LabError at the first command that fails."""
        done = _shell(self.command(("sh", "-e")), script)
        if done.returncode:
            raise LabError(f"{done.stderr.strip()}\nin:\n{script}")

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a new IPv4 socket of this namespace; the caller closes it."""
        self._asking.sendall(bytes([kind]))
        said, descriptors, _, _ = socket.recv_fds(self._asking, 1, 1)
        if said != holder.READY:
            raise LabError("the namespace's holder has ended")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        """End it, with the processes in it."""
        self._kill_processes()
        self._asking.close()
        try:
            self._holder.wait(SETUP_S)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()

    def _kill_processes(self) -> None:
        """Send SIGKILL to every process in it but its holder."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.pid:
                continue
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if (entry / "ns" / "net").readlink() == self._identity:
                    os.kill(int(entry.name), signal.SIGKILL)

    def _entering(self, *kinds: str) -> tuple[str, ...]:
        credentials = ("--preserve-credentials",) if "--user" in kinds else ()
        return ("nsenter", "--target", str(self.pid), *kinds, *credentials, "--")


class Namespaces:
    """Those of one lab, which one user owns. A context manager that closes them, the last one first."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._first: Namespace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._closing.close()

    def make(self) -> Namespace:
        """Make one more. Raises LabError."""
        made = Namespace(way(), self._first)
        self._closing.callback(made.close)
        self._first = self._first or made
        made.configure("ip link set lo up")
        return made


def _shell(line: Sequence[str], script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        list(line), input=script, capture_output=True, text=True, check=False, timeout=SETUP_S, env=_environment()
    )


def _trial() -> str:
    """Return a script that does one of each thing that a lab needs."""
    return f"""
ip link add a0 address 02:00:00:00:00:01 type veth peer name a1
ip link set a0 arp off
ip link add b0 type bridge
echo 1 > /proc/sys/net/ipv4/ip_forward
nft -f - <<'end'
{rules(KINDS["address_restricted"][0], "192.0.2.1")}
end
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": PATH}
