"""The health page's side of audits: runs `swarm.monitor.audit` as a child, tells it whom to audit, keeps its findings.

The child audits only servers that answer this page's own handshake: records are free, and draw no audits. It leaves out
servers that audits have shown as wrong lately.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.limits import limit
from swarm.monitor.children import Child, Joining
from swarm.monitor.probing import foreign
from swarm.monitor.verdicts import Record

_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class AuditingLimits:
    """How much of audits the page takes, and keeps in mind."""

    peers_max: int = limit(4096, "peers", "that the auditor may be told of; more are not audited")
    servers_max: int = limit(512, "servers", "in the findings of one audit; more are left out")
    wrong_s: float = limit(
        24 * 3600.0, "s", "that a server found as wrong is left out of audits; then it is audited again"
    )


Peer = Annotated[str, Field(pattern="^[1-9A-HJ-NP-Za-km-z]{40,60}$")]
Peers = Annotated[tuple[Peer, ...], Field(max_length=AuditingLimits().servers_max)]


class AuditLine(BaseModel):
    """The child's line about one audit. doubted: all that are in doubt since, of this audit or of earlier ones."""

    model_config = ConfigDict(strict=True, frozen=True)

    root: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    at: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    took_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    agreed: Peers = ()
    disputed: Peers = ()
    wrong: Peers = ()
    doubted: Peers = ()
    why: Annotated[str, Field(max_length=200)] = ""


class Orders(BaseModel):
    """A line to the child: the servers that answer, and those of them that are left out, by peer id."""

    model_config = ConfigDict(strict=True, frozen=True)

    answering: tuple[Peer, ...]
    left_out: tuple[Peer, ...]

    @classmethod
    def of(
        cls, answering: Iterable[str], left_out: Iterable[str], limits: AuditingLimits = AuditingLimits()
    ) -> "Orders":
        """Return the orders, in an order of their own: the same ones are the same line."""
        wrong = set(left_out)
        told = sorted(set(answering) - wrong)[: limits.peers_max]
        return cls(answering=tuple(told), left_out=tuple(sorted(wrong)[: limits.peers_max]))


def left_out(record: Record, now: float, limits: AuditingLimits = AuditingLimits()) -> bool:
    """Whether a server is left out of audits. now: wall seconds."""
    return record.is_wrong and record.wrong_at is not None and now - record.wrong_at < limits.wrong_s


def auditor(
    models: tuple[str, ...],
    every_s: float,
    share: float,
    evidence: Path | None,
    joining: Joining,
    keep: Callable[[AuditLine], object],
) -> Child:
    """Return the child that audits models, hub ids or directories.

    evidence: folder for files of it. keep: called with every audit's findings.
    """

    def take(text: bytes) -> str:
        try:
            line = AuditLine.model_validate_json(text)
        except ValidationError:
            return foreign(text)
        if line.why:
            _log.info("an audit came to nothing", why=line.why)
        keep(line)
        return "the last audit came to nothing" if line.why else ""  # why is in the log: it can name addresses

    schedule = ("--every", str(every_s), "--share", str(share))
    folder = () if evidence is None else ("--evidence", str(evidence))
    return Child("swarm.monitor.audit", (*schedule, *folder, *joining.arguments, "--", *models), take)
