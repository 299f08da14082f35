"""A swarm of real processes on this machine, bootstrap node and servers: for the demo, the tests, the benchmarks."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from swarm.access import Access
from swarm.dht.peermemory import memory_of
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.limits import limit
from swarm.net.launch import command


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Bounds of a process of the local swarm."""

    descriptors_max: int = limit(4096, "descriptors", "open at one time; an open beyond fails")
    data_bytes_max: int = limit(1 << 46, "bytes", "of memory: no bound of ours")
    start_timeout_s: float = limit(120.0, "s", "a process that is not ready by then has failed")
    stop_timeout_s: float = limit(10.0, "s", "that a process gets to end; then it is killed")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs.

    folder: of its log and identity. host: the address it listens on. namespace: its network, by name for `ip netns`;
    "" for this process's own. env: more variables.
    """

    folder: Path
    host: str = "127.0.0.1"
    namespace: str = ""
    env: dict[str, str] = field(default_factory=dict)


Launch = Callable[[Place, str, Sequence[str], dict[str, str], BinaryIO], "subprocess.Popen[bytes]"]


def launch(
    place: Place, module: str, arguments: Sequence[str], env: dict[str, str], log: BinaryIO
) -> "subprocess.Popen[bytes]":
    """Run a module of the swarm in a process of its own that cannot outlive this one, and prints into `log`."""
    inside = ("ip", "netns", "exec", place.namespace) if place.namespace else ()
    limits = ProcessLimits()
    line = inside + command(
        *(sys.executable, "-m", module, *arguments),
        descriptors_max=limits.descriptors_max,
        data_bytes_max=limits.data_bytes_max,
    )
    # In a process group of its own: Ctrl-C is for us, and we end our children in order.
    return subprocess.Popen(  # noqa: S603 - our own commands
        line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, process_group=0
    )


class LocalProcess:
    """One command of the swarm, in a process of its own that cannot outlive this one."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        place: Place,
        env: dict[str, str],
        launch: Launch = launch,
    ) -> None:
        self.name = name
        self.log = place.folder / f"{name}.log"
        self._ready_file = place.folder / f"{name}.json"
        arguments = (*arguments, "--ready-file", str(self._ready_file))
        with self.log.open("ab") as log:
            self.process = launch(place, module, arguments, env | place.env, log)
        self.started_at = time.monotonic()
        self._asked = False
        self.ready: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float = ProcessLimits().start_timeout_s) -> "LocalProcess":
        """Wait until it says that it is ready. Raises SwarmError with its last lines if it ends or takes too long."""
        while not self.is_ready():
            if time.monotonic() - self.started_at > timeout_s:
                raise SwarmError(f"{self.name} was not ready after {timeout_s:.0f} s: {self.last_lines()}")
            time.sleep(0.02)
        return self

    def is_ready(self) -> bool:
        """Whether it has said that it is ready; `ready` is its ready file. Raises SwarmError if it ended before."""
        if not self.ready:
            if self._ready_file.exists():
                self.ready = json.loads(self._ready_file.read_text(encoding="utf-8"))
            elif self.process.poll() is not None:
                raise SwarmError(f"{self.name} ended with code {self.process.returncode}: {self.last_lines()}")
        return bool(self.ready)

    def stop(self, timeout_s: float = ProcessLimits().stop_timeout_s) -> int:
        """Ask it to end (SIGTERM), insist after a while (SIGKILL). Returns its exit code."""
        self.ask_to_stop()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self.process.wait()

    def ask_to_stop(self) -> None:
        """Send SIGTERM, once: a second one would end it before it has cleaned up."""
        if not self._asked and self.process.poll() is None:
            self._asked = True
            self.process.terminate()

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would."""
        self.process.kill()
        self.process.wait()

    def last_lines(self) -> str:
        """Return the last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class _Processes:
    """Starts the commands of one swarm, all alike, and stops them."""

    def __init__(
        self,
        common: Sequence[str],
        env: dict[str, str],
        identities: Mapping[str, Identity],
        on_start: Callable[[str], None],
        launch: Launch,
    ) -> None:
        self._common, self._env, self._identities = common, env, identities
        self._on_start, self._launch = on_start, launch
        self._started: list[LocalProcess] = []

    def start(self, name: str, module: str, arguments: Sequence[str], place: Place) -> LocalProcess:
        """Start one command; `wait_ready` waits for it."""
        self._on_start(name)
        identity = place.folder / f"{name}.identity"
        if name in self._identities:
            self._identities[name].save(identity)
        common = ("--listen", f"{place.host}:0", "--identity", str(identity), *self._common)
        process = LocalProcess(name, module, (*common, *arguments), place, self._env, self._launch)
        self._started.append(process)
        return process

    def stop(self) -> None:
        """Stop all but the first at once: servers withdraw their announcements while the bootstrap node listens."""
        for process in self._started[1:]:
            process.ask_to_stop()
        for process in reversed(self._started):
            process.stop()
        self._started.clear()


class LocalSwarm:
    """A bootstrap node and servers. A context manager: every process has ended when the block has.

    spans: block ranges such as "0:4", one server each. options: more arguments for every server.
    network: its name; a new one unless given, so that no two swarms on this machine meet, and then no node of it stays
    remembered. host: the address all of them listen on. identities: of processes by their names ("bootstrap",
    "server-0", ...); others make their own. on_start: called with each process's name as it is started, for people
    that watch. launch: starts the processes.
    """

    def __init__(
        self,
        model: Path | str,
        spans: Iterable[str] = (),
        *,
        options: Sequence[str] = (),
        network: str | None = None,
        log_level: str = "info",
        env: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        identities: Mapping[str, Identity] | None = None,
        on_start: Callable[[str], None] = lambda name: None,
        launch: Launch = launch,
    ) -> None:
        self.model, self.network = str(model), network or f"local-{secrets.token_hex(4)}"
        self._is_known = network is not None
        self.servers: list[LocalProcess] = []
        self.bootstrap: LocalProcess
        self._spans = tuple(spans)
        self._options = ("--threads", "1", *options)
        common = ("--network", self.network, "--log-level", log_level)
        # The user's settings are of another swarm.
        around = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
        self._processes = _Processes(common, {**around, **(env or {})}, dict(identities or {}), on_start, launch)
        self._host = host
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            self.folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="swarm-local-")))
            self._place = Place(self.folder, self._host)
            closing.callback(self._forget)
            closing.callback(self._processes.stop)
            self.bootstrap = self._processes.start("bootstrap", "swarm.dht.cli", ("--initial-peers", ""), self._place)
            self.bootstrap.wait_ready()
            for blocks in self._spans:
                self.start_server(blocks)
            for server in self.servers:
                server.wait_ready()
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def _forget(self) -> None:
        """Remove what this machine's processes remember of a network that nobody will look for again."""
        if not self._is_known:
            with suppress(OSError):
                memory_of(self.network, Access(), public=False).path.unlink()

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """The addresses that others join through."""
        return tuple(self.bootstrap.ready["addresses"])

    def start_server(self, blocks: str, *options: str, place: Place | None = None) -> LocalProcess:
        """Start one more server, beside the others or somewhere else; `wait_ready` waits for it."""
        place = place or self._place
        arguments = (self.model, "--blocks", blocks, "--p2p-listen", f"{place.host}:0", *self._options)
        peers = ("--initial-peers", ",".join(self.initial_peers))
        name = f"server-{len(self.servers)}"
        server = self._processes.start(name, "swarm.server.cli", (*arguments, *peers, *options), place)
        self.servers.append(server)
        return server

    def start_gateway(self, *options: str, listen: str = "127.0.0.1:0") -> LocalProcess:
        """Start a gateway to the swarm's model; `wait_ready` waits for it, and its ready file has the `url`.

        A later `--listen` wins, so options may have one of their own.
        """
        arguments = ("--model", self.model, "--listen", listen, "--initial-peers", ",".join(self.initial_peers))
        return self._processes.start("gateway", "swarm.gateway.cli", (*arguments, *options), self._place)
