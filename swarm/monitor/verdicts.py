"""The page's record of audits, in its database: how often each server was audited, and with which result, by day."""

import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm.limits import limit
from swarm.monitor.state import Finding, ServerAudits

SCHEMA = """
CREATE TABLE IF NOT EXISTS audits (root TEXT NOT NULL, peer TEXT NOT NULL, day INTEGER NOT NULL,
                                   agreed INTEGER NOT NULL, disputed INTEGER NOT NULL, wrong INTEGER NOT NULL,
                                   agreed_at REAL, wrong_at REAL, at REAL NOT NULL,
                                   PRIMARY KEY (root, peer, day)) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """How many verdicts are remembered."""

    kept_s: float = limit(30 * 24 * 3600.0, "s", "that an audit counts")
    rows_max: int = limit(200_000, "rows", "of a server and a day each; the oldest go first")


@dataclass(frozen=True, slots=True)
class AuditResult:
    """One audit, by peer id. disputed: one or another of these was wrong."""

    root: str
    at: float
    agreed: Iterable[str] = ()
    disputed: Iterable[str] = ()
    wrong: Iterable[str] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """All audits of one server within 30 days. at: of the latest; agreed_at, wrong_at: of the latest such."""

    agreed: int
    disputed: int
    wrong: int
    at: float
    agreed_at: float | None = None
    wrong_at: float | None = None

    @property
    def audited(self) -> int:
        """How many audits said anything of it."""
        return self.agreed + self.disputed + self.wrong

    @property
    def is_wrong(self) -> bool:
        """Whether it was found as wrong, and no audit has agreed with it since."""
        return self.wrong_at is not None and (self.agreed_at is None or self.agreed_at < self.wrong_at)


Records = dict[tuple[str, str], Record]
"""By root and peer id."""


def write(db: sqlite3.Connection, result: AuditResult, limits: VerdictLimits = VerdictLimits()) -> None:
    """Add an audit. Raises sqlite3.DatabaseError."""
    at, day = result.at, int(result.at // 86_400)
    rows = [
        (result.root, peer, day, *counts, at if counts[0] else None, at if counts[2] else None, at)
        for peers, counts in ((result.agreed, (1, 0, 0)), (result.disputed, (0, 1, 0)), (result.wrong, (0, 0, 1)))
        for peer in peers
    ]
    db.executemany(
        "INSERT INTO audits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
        " agreed = agreed + excluded.agreed, disputed = disputed + excluded.disputed, wrong = wrong + excluded.wrong,"
        " agreed_at = coalesce(excluded.agreed_at, agreed_at), wrong_at = coalesce(excluded.wrong_at, wrong_at),"
        " at = excluded.at",
        rows,
    )
    db.execute("DELETE FROM audits WHERE at < ?", (at - limits.kept_s,))
    db.execute(
        "DELETE FROM audits WHERE at <= (SELECT at FROM audits ORDER BY at DESC LIMIT 1 OFFSET ?)", (limits.rows_max,)
    )


def read(db: sqlite3.Connection, now: float, limits: VerdictLimits = VerdictLimits()) -> Records:
    """Return the records of all servers. Raises sqlite3.DatabaseError."""
    rows = db.execute(
        "SELECT root, peer, sum(agreed), sum(disputed), sum(wrong), max(at), max(agreed_at), max(wrong_at)"
        " FROM audits WHERE at > ? GROUP BY root, peer",
        (now - limits.kept_s,),
    )
    return {(root, peer): Record(*figures) for root, peer, *figures in rows}


def shown(records: Records, doubted: Collection[tuple[str, str]]) -> dict[tuple[str, str], ServerAudits]:
    """Return the records as the page shows them. doubted: servers that are in doubt now, by root and peer id."""

    def finding(key: tuple[str, str], record: Record) -> Finding:
        if record.is_wrong:
            return "wrong"
        if key in doubted:
            return "doubted"
        return "agreed" if record.agreed else "open"

    return {
        key: ServerAudits(
            audited=record.audited,
            agreed=record.agreed,
            last_at=record.at,
            finding=finding(key, record),
            wrong_at=record.wrong_at,
        )
        for key, record in records.items()
    }
