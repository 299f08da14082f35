"""Children of the health page: processes that have the client, torch and hivemind, which this process has not.

A child prints one line for each result, and may be told lines. It ends with this process.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from swarm.limits import limit
from swarm.net.launch import command

_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """How children are held."""

    models_max: int = limit(8, "models", "that are probed, and as many that are audited; more are a wrong argument")
    line_bytes_max: int = limit(64 * 1024, "bytes", "of one line; a child that prints a longer one is started again")
    lines_max: int = limit(64, "lines", "of findings wait for the disk; more are dropped")
    restart_s: float = limit(30.0, "s", "until a child that ended is started again")
    stop_s: float = limit(5.0, "s", "that a child gets to end; then it is killed")
    descriptors_max: int = limit(4096, "descriptors", "open at one time in a child")
    data_bytes_max: int = limit(1 << 46, "bytes", "of memory of a child: no bound of ours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a child joins the swarm that the page reads."""

    initial_peers: tuple[str, ...]
    network: str
    network_key: Path | None = None
    allow_peers: Path | None = None
    identity: Path | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options of a child's command."""
        files = {"--network-key": self.network_key, "--allow-peers": self.allow_peers, "--identity": self.identity}
        given = [part for name, path in files.items() if path is not None for part in (name, str(path))]
        return ("--network", self.network, *given, "--initial-peers", ",".join(self.initial_peers))


class Child:
    """One child. `problem`: why there are no results; empty while all is well."""

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        take: Callable[[bytes], str],
        limits: ChildLimits = ChildLimits(),
    ) -> None:
        """module: that is run, with these arguments. take: called with every line; returns its problem, or ""."""
        self.problem = "no result yet"
        self._module, self._arguments, self._take, self._limits = module, arguments, take, limits
        self._running: asyncio.subprocess.Process | None = None
        self._said = b""  # the latest line that it was told

    async def run(self) -> None:
        """Run until cancelled; a child that ends is started again."""
        while True:
            code = await self._run_once()
            self.problem = f"the process ended with code {code}; it is started again"
            _log.warning("child", module=self._module, problem=self.problem)
            await asyncio.sleep(self._limits.restart_s)

    def tell(self, line: bytes) -> None:
        """Tell it a line, unless it was told the same last. A child that starts later hears the latest.

        A child that does not read is told nothing more until it does.
        """
        pipe = self._running.stdin if self._running is not None else None
        if line == self._said or (pipe is not None and pipe.transport.get_write_buffer_size()):
            return
        self._said = line
        if pipe is not None and not pipe.is_closing():
            pipe.write(line + b"\n")

    async def _run_once(self) -> int:
        limits = self._limits
        line = command(
            *(sys.executable, "-m", self._module, *self._arguments),
            descriptors_max=limits.descriptors_max,
            data_bytes_max=limits.data_bytes_max,
        )
        child = await asyncio.create_subprocess_exec(
            *line,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=limits.line_bytes_max,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # Ctrl-C is for us, and we end our child
        )
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            self._running = child
            if self._said:
                child.stdin.write(self._said + b"\n")
            with suppress(ValueError):  # a line that does not end
                async for text in child.stdout:
                    self.problem = self._take(text)
            return await child.wait() if child.returncode is None else child.returncode
        finally:
            self._running = None
            await _end(child, limits.stop_s)


async def _end(child: asyncio.subprocess.Process, within_s: float) -> None:
    if child.returncode is not None:
        return
    child.terminate()
    try:
        async with asyncio.timeout(within_s):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


@dataclass(slots=True)
class Children:
    """Those of one page."""

    probers: Sequence[Child] = ()
    auditor: Child | None = None

    @property
    def all(self) -> Sequence[Child]:
        """Every one that runs."""
        return self.probers if self.auditor is None else (*self.probers, self.auditor)


def problem_of(children: Sequence[Child]) -> str:
    """Say how children are, in a few words."""
    if not children:
        return "off"
    return "; ".join(child.problem for child in children if child.problem) or "ok"
