"""The health page's side of probes: runs `swarm.monitor.probe` as a child for each model, and keeps its results.

The child has the client with torch and hivemind; this process has neither. It ends with this process.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.limits import limit
from swarm.monitor.history import HistoryLimits, ProbeResult
from swarm.net.launch import command

_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class ProbingLimits:
    """How many probes run, and how their children are held."""

    probes_max: int = limit(8, "models", "that are probed; more are a wrong argument")
    line_bytes_max: int = limit(64 * 1024, "bytes", "of one line; a child that prints a longer one is started again")
    restart_s: float = limit(30.0, "s", "until a child that ended is started again")
    stop_s: float = limit(5.0, "s", "that a child gets to end; then it is killed")


class ProbeLine(BaseModel):
    """The child's line about one generation."""

    model_config = ConfigDict(strict=True, frozen=True)

    root: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    at: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    ok: bool
    ttft_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    gaps_ms: Annotated[
        tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Field(max_length=HistoryLimits().gaps_max)
    ] = ()
    why: Annotated[str, Field(max_length=200)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """One model to probe: a hub id or directory, and how often."""

    model: str
    every_s: float
    initial_peers: tuple[str, ...]
    network: str
    network_key: Path | None = None
    allow_peers: Path | None = None
    identity: Path | None = None

    @property
    def access_arguments(self) -> tuple[str, ...]:
        """The options that name the files of a private swarm, as the child takes them."""
        files = {"--network-key": self.network_key, "--allow-peers": self.allow_peers, "--identity": self.identity}
        return tuple(part for name, path in files.items() if path is not None for part in (name, str(path)))


class Prober:
    """One child. `problem`: why there are no results; empty while all is well."""

    def __init__(
        self, plan: ProbePlan, keep: Callable[[ProbeResult], object], limits: ProbingLimits = ProbingLimits()
    ) -> None:
        """keep: called with every result."""
        self.problem = "no result yet"
        self._limits = limits
        self._plan, self._keep = plan, keep

    async def run(self) -> None:
        """Probe until cancelled; a child that ends is started again."""
        while True:
            code = await self._run_child()
            self.problem = f"the probe ended with code {code}; it is started again"
            _log.warning("probe", model=self._plan.model, problem=self.problem)
            await asyncio.sleep(self._limits.restart_s)

    async def _run_child(self) -> int:
        plan = self._plan
        arguments = ("--every", str(plan.every_s), "--network", plan.network)
        peers = ("--initial-peers", ",".join(plan.initial_peers))
        line = command(
            sys.executable,
            "-m",
            "swarm.monitor.probe",
            *arguments,
            *plan.access_arguments,
            *peers,
            "--",
            plan.model,
            descriptors_max=4096,
            data_bytes_max=1 << 46,  # no limit of ours
        )
        child = await asyncio.create_subprocess_exec(
            *line,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=self._limits.line_bytes_max,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # Ctrl-C is for us, and we end our child
        )
        try:
            assert child.stdout is not None
            with suppress(ValueError):  # a line that does not end
                async for text in child.stdout:
                    self._take(text)
            return await child.wait() if child.returncode is None else child.returncode
        finally:
            await _end(child, self._limits.stop_s)

    def _take(self, text: bytes) -> None:
        try:
            line = ProbeLine.model_validate_json(text)
        except ValidationError:
            _log.warning("probe", problem="the child printed something else", text=text[:100].decode(errors="replace"))
            return
        self.problem = "" if line.ok else "the last generation failed"  # why is in the log: it can name addresses
        if not line.ok:
            _log.warning("a probe failed", model=self._plan.model, why=line.why)
        self._keep(ProbeResult(line.root, line.at, line.ok, line.ttft_ms, line.gaps_ms))


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


def problem_of(probers: Sequence[Prober]) -> str:
    """Say how the probes are, in a few words."""
    if not probers:
        return "off"
    return "; ".join(prober.problem for prober in probers if prober.problem) or "ok"
