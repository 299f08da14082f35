"""The health page's side of probes: runs `swarm.monitor.probe` as a child for each model, and keeps its results."""

from collections.abc import Callable
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.monitor.children import Child, Joining
from swarm.monitor.history import HistoryLimits, ProbeResult

_log = structlog.get_logger("swarm.monitor")


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


def prober(model: str, every_s: float, joining: Joining, keep: Callable[[ProbeResult], object]) -> Child:
    """Return the child that probes a model, a hub id or a directory. keep: called with every result."""

    def take(text: bytes) -> str:
        try:
            line = ProbeLine.model_validate_json(text)
        except ValidationError:
            return foreign(text)
        if not line.ok:
            _log.warning("a probe failed", model=model, why=line.why)
        keep(ProbeResult(line.root, line.at, line.ok, line.ttft_ms, line.gaps_ms))
        return "" if line.ok else "the last generation failed"  # why is in the log: it can name addresses

    return Child("swarm.monitor.probe", ("--every", str(every_s), *joining.arguments, "--", model), take)


def foreign(text: bytes) -> str:
    """Note a line that is no result. Returns the problem."""
    problem = "the process printed something else"
    _log.warning("child", problem=problem, text=text[:100].decode(errors="replace"))
    return problem
