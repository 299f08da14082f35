"""A swarm of real processes on this machine, bootstrap node and servers: for the demo, the tests, the benchmarks."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.net.launch import command

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
DESCRIPTORS_MAX = 4096
MEMORY_BYTES_MAX = 1 << 46  # no limit of ours


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs.

    folder: of its log and identity. host: what it listens on. namespace: the network that it is in, by its name for
    `ip netns`; "" for this process's own. env: more variables.
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
    line = inside + command(
        *(sys.executable, "-m", module, *arguments), descriptors_max=DESCRIPTORS_MAX, data_bytes_max=MEMORY_BYTES_MAX
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

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> "LocalProcess":
        """Wait until it says that it is ready. Raises SwarmError with what it printed if it ends or takes too long."""
        while not self.is_ready():
            if time.monotonic() - self.started_at > timeout_s:
                raise SwarmError(f"{self.name} was not ready after {timeout_s:.0f} s: {self.last_lines()}")
            time.sleep(POLL_S)
        return self

    def is_ready(self) -> bool:
        """Whether it has said that it is ready; `ready` is what it said. Raises SwarmError if it ended before."""
        if not self.ready:
            if self._ready_file.exists():
                self.ready = json.loads(self._ready_file.read_text())
            elif self.process.poll() is not None:
                raise SwarmError(f"{self.name} ended with code {self.process.returncode}: {self.last_lines()}")
        return bool(self.ready)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
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
        """What it printed last."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class LocalSwarm:
    """A bootstrap node and servers. A context manager: every process has ended when the block has.

    spans: block ranges such as "0:4", one server each. options: more arguments for every server.
    host: what all of them listen on. identities: of processes by their names ("bootstrap", "server-0", ...); others
    make their own. on_start: called with each process's name as it is started, for people who watch. launch: starts
    the processes.
    """

    def __init__(
        self,
        model: Path | str,
        spans: Iterable[str] = (),
        *,
        options: Sequence[str] = (),
        network: str = "local",
        log_level: str = "info",
        env: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        identities: Mapping[str, Identity] | None = None,
        on_start: Callable[[str], None] = lambda name: None,
        launch: Launch = launch,
    ) -> None:
        self.model = str(model)
        self.network = network
        self.servers: list[LocalProcess] = []
        self.bootstrap: LocalProcess
        self._spans = tuple(spans)
        self._options = ("--threads", "1", *options)
        self._common = ("--network", network, "--log-level", log_level)
        self._env = {**os.environ, **(env or {})}
        self._host = host
        self._identities = dict(identities or {})
        self._on_start = on_start
        self._launch = launch
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            self.folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="swarm-local-")))
            self._place = Place(self.folder, self._host)
            closing.callback(self._stop_all)
            self._processes: list[LocalProcess] = []
            self.bootstrap = self._start("bootstrap", "swarm.dht.cli", (), self._place)
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

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """What others join through."""
        return tuple(self.bootstrap.ready["addresses"])

    def start_server(self, blocks: str, *options: str, place: Place | None = None) -> LocalProcess:
        """Start one more server, beside the others or somewhere else; `wait_ready` waits for it."""
        place = place or self._place
        arguments = (self.model, "--blocks", blocks, "--p2p-listen", f"{place.host}:0", *self._options)
        peers = ("--initial-peers", ",".join(self.initial_peers))
        name = f"server-{len(self.servers)}"
        server = self._start(name, "swarm.server.cli", (*arguments, *peers, *options), place)
        self.servers.append(server)
        return server

    def _start(self, name: str, module: str, arguments: Sequence[str], place: Place) -> LocalProcess:
        self._on_start(name)
        identity = place.folder / f"{name}.identity"
        if name in self._identities:
            self._identities[name].save(identity)
        common = ("--listen", f"{place.host}:0", "--identity", str(identity), *self._common)
        process = LocalProcess(name, module, (*common, *arguments), place, self._env, self._launch)
        self._processes.append(process)
        return process

    def _stop_all(self) -> None:
        """Servers first, all at once: they withdraw their announcements while the bootstrap node still listens."""
        for server in self.servers:
            server.ask_to_stop()
        for process in reversed(self._processes):
            process.stop()
