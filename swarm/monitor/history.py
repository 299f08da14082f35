"""The page's memory: samples of every model and the probes' results, in one SQLite file.

One thread writes and reads; the page never waits for the disk. Samples are kept as they come for 24 h and as hourly
means for 30 days. A file that is damaged, or of a newer version, is moved aside and a new one begun; when the disk is
full, samples are dropped, `problem` says so, and writing goes on as soon as it can.
"""

import array
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from swarm.errors import BadConfiguration
from swarm.limits import limit
from swarm.monitor import verdicts
from swarm.monitor.state import API, History, Point, ProbeStats, Quantiles, Window

SCHEMA_VERSION = 1
WINDOWS_S: dict[Window, int] = {"24h": 24 * 3600, "30d": 30 * 24 * 3600}  # samples as they come, and hourly means

_SCHEMA = """
CREATE TABLE samples (root TEXT NOT NULL, at REAL NOT NULL, hourly INTEGER NOT NULL, coverage REAL, servers REAL,
                      decode_tps REAL, prefill_tps REAL, free_tokens REAL, healthy REAL,
                      PRIMARY KEY (root, hourly, at)) WITHOUT ROWID;
CREATE INDEX samples_at ON samples (hourly, at);
CREATE TABLE probes (root TEXT NOT NULL, at REAL NOT NULL, ok INTEGER NOT NULL, ttft_ms REAL, gaps BLOB,
                     PRIMARY KEY (root, at)) WITHOUT ROWID;
CREATE TABLE models (root TEXT PRIMARY KEY, name TEXT NOT NULL, n_blocks INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE peers (public_key TEXT PRIMARY KEY, first_seen REAL NOT NULL, at REAL NOT NULL);
"""
_MEANS = "avg(coverage), avg(servers), avg(decode_tps), avg(prefill_tps), avg(free_tokens), avg(healthy)"
Result = TypeVar("Result")
_log = structlog.get_logger("swarm.monitor")


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """How much the file holds, and how long it is waited for."""

    queue_max: int = limit(256, "requests", "that wait for the disk; more are dropped")
    gaps_max: int = limit(64, "times", "between tokens, kept of one probe")
    peers_max: int = limit(20_000, "peers", "remembered with the time of their first appearance")
    busy_timeout_s: float = limit(5.0, "s", "for another process that has the file open; then a write fails")
    pages_max: int = limit(1 << 20, "pages", "of 4 KiB, 4 GiB; then nothing more is written")


@dataclass(frozen=True, slots=True)
class Sample:
    """One model at one moment. healthy: 1.0 unless it was broken."""

    root: str
    name: str
    n_blocks: int
    coverage: float
    servers: int
    decode_tps: float | None
    prefill_tps: float | None
    free_tokens: int
    healthy: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One synthetic generation. ttft_ms and gaps_ms only of one that succeeded."""

    root: str
    at: float
    ok: bool
    ttft_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Remembered:
    """The knowledge of an earlier run: models by root (name, blocks), first appearances by public key."""

    models: dict[str, tuple[str, int]]
    first_seen: dict[str, float]


class Database:
    """The file and its thread. `close` writes the waiting requests first."""

    def __init__(self, path: Path, limits: HistoryLimits = HistoryLimits()) -> None:
        """Open or make it. Raises BadConfiguration where no file can be."""
        self.problem = ""  # why nothing is being written; empty: all is well
        self._path, self._limits = path, limits
        self._db = _opened(path, limits)
        self._requests: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(limits.queue_max)
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the waiting requests and close the file."""
        self._requests.put(None)
        self._thread.join(10.0)

    def record(self, at: float, samples: Sequence[Sample], peers: Iterable[tuple[str, float]]) -> "Future[None]":
        """Keep one round. peers: public key and first appearance. A problem is noted, not raised."""
        rows = list(peers)[: self._limits.peers_max]
        return self._submit(lambda: self._written(lambda: self._record(at, samples, rows)))

    def record_probe(self, result: ProbeResult) -> "Future[None]":
        """Keep a probe's result. A problem is noted, not raised."""
        return self._submit(lambda: self._written(lambda: self._record_probe(result)))

    def record_audit(self, result: verdicts.AuditResult) -> "Future[None]":
        """Keep an audit's result. A problem is noted, not raised."""
        return self._submit(lambda: self._written(lambda: verdicts.write(self._db, result)))

    def audits(self, now: float) -> "Future[verdicts.Records]":
        """Return the audits of all servers."""
        return self._submit(lambda: verdicts.read(self._db, now))

    def remembered(self, now: float) -> "Future[Remembered]":
        """Return the models that were served within the last day, and the peers that were ever seen."""
        return self._submit(lambda: self._remembered(now))

    def history(self, root: str | None, window: Window, now: float) -> "Future[History]":
        """Return at most API.points_max points of one model, or of all together."""
        return self._submit(lambda: self._history(root, window, now))

    def probe_stats(self, now: float) -> "Future[dict[str, tuple[ProbeStats, ...]]]":
        """Return each probed model's figures of both windows."""
        return self._submit(lambda: self._probe_stats(now))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        try:
            self._requests.put_nowait((work, future))
        except queue.Full:
            self._note("the disk does not keep up")
            future.set_exception(sqlite3.OperationalError("the disk does not keep up"))
        return future

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            work, future = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except sqlite3.DatabaseError as error:
                if _is_damage(error):
                    self._renew(str(error))
                future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - it belongs to the asker
                future.set_exception(error)
        self._db.close()

    def _written(self, write: Callable[[], None]) -> None:
        try:
            with self._db:
                write()
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._renew(str(error))
            else:
                self._note(f"no history is being written: {error}")
        else:
            if self.problem:
                _log.info("history is written again")
            self.problem = ""

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("history", problem=problem, database=str(self._path))
        self.problem = problem

    def _renew(self, why: str) -> None:
        self._db.close()
        _move_aside(self._path, why)
        self._db = _opened(self._path, self._limits)

    def _record(self, at: float, samples: Sequence[Sample], peers: Sequence[tuple[str, float]]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO samples VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?)",
            [
                (s.root, at, s.coverage, s.servers, s.decode_tps, s.prefill_tps, s.free_tokens, s.healthy)
                for s in samples
            ],
        )
        self._db.executemany(
            "INSERT INTO models VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET name = excluded.name,"
            " n_blocks = excluded.n_blocks, at = excluded.at",
            [(s.root, s.name, s.n_blocks, at) for s in samples if s.servers],
        )
        self._db.executemany(
            "INSERT INTO peers VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at = excluded.at",
            [(key, first_seen, at) for key, first_seen in peers],
        )
        self._condense(at)

    def _condense(self, now: float) -> None:
        """Turn hours that are older than a day into their means, and drop those that are older than 30 days."""
        hour_s, kept_s = 3600, WINDOWS_S["30d"]
        edge = (now - WINDOWS_S["24h"]) // hour_s * hour_s
        self._db.execute(
            f"INSERT OR REPLACE INTO samples SELECT root, CAST(at / {hour_s} AS INTEGER) * {hour_s}.0, 1, {_MEANS}"  # noqa: S608 - our own constants
            " FROM samples WHERE hourly = 0 AND at < ? GROUP BY 1, 2",
            (edge,),
        )
        self._db.execute("DELETE FROM samples WHERE hourly = 0 AND at < ?", (edge,))
        self._db.execute("DELETE FROM samples WHERE hourly = 1 AND at < ?", (now - kept_s - hour_s,))
        for table in ("probes", "models", "peers"):
            self._db.execute(f"DELETE FROM {table} WHERE at < ?", (now - kept_s,))  # noqa: S608 - our own names

    def _record_probe(self, result: ProbeResult) -> None:
        gaps = array.array("f", result.gaps_ms[: self._limits.gaps_max]).tobytes()
        self._db.execute(
            "INSERT OR REPLACE INTO probes VALUES (?, ?, ?, ?, ?)",
            (result.root, result.at, int(result.ok), result.ttft_ms, gaps),
        )

    def _remembered(self, now: float) -> Remembered:
        models = self._db.execute(
            "SELECT root, name, n_blocks FROM models WHERE at > ? ORDER BY at DESC LIMIT 64", (now - WINDOWS_S["24h"],)
        )
        peers = self._db.execute(
            "SELECT public_key, first_seen FROM peers ORDER BY at DESC LIMIT ?", (self._limits.peers_max,)
        )
        return Remembered({root: (name, n) for root, name, n in models}, dict(peers.fetchall()))

    def _history(self, root: str | None, window: Window, now: float) -> History:
        step = WINDOWS_S[window] / API.points_max
        # Of all models together: the mean or sum over models at each moment, then the mean over each step.
        each = (
            "SELECT at, avg(coverage) AS coverage, sum(servers) AS servers, sum(decode_tps) AS decode_tps,"
            " sum(prefill_tps) AS prefill_tps, sum(free_tokens) AS free_tokens, avg(healthy) AS healthy"
            " FROM samples WHERE at > ? AND (? IS NULL OR root = ?) GROUP BY at"
        )
        rows = self._db.execute(
            f"SELECT CAST(at / ? AS INTEGER) * ?, {_MEANS} FROM ({each}) GROUP BY 1 ORDER BY 1 DESC LIMIT ?",  # noqa: S608 - our own constants
            (step, step, now - WINDOWS_S[window], root, root, API.points_max),
        ).fetchall()
        names = ("at", "coverage", "servers_online", "decode_tps", "prefill_tps", "free_tokens", "healthy")
        points = tuple(Point(**dict(zip(names, row, strict=True))) for row in reversed(rows))
        return History(root=root, window=window, step_s=step, points=points)

    def _probe_stats(self, now: float) -> dict[str, tuple[ProbeStats, ...]]:
        rows = self._db.execute(
            "SELECT root, at, ok, ttft_ms, gaps FROM probes WHERE at > ?", (now - WINDOWS_S["30d"],)
        )
        by_root: dict[str, list[ProbeResult]] = {}
        for root, at, ok, ttft_ms, gaps in rows:
            by_root.setdefault(root, []).append(
                ProbeResult(root, at, bool(ok), ttft_ms, tuple(array.array("f", gaps or b"")))
            )
        return {root: tuple(probe_stats(results, now, w) for w in WINDOWS_S) for root, results in by_root.items()}


def probe_stats(results: Iterable[ProbeResult], now: float, window: Window) -> ProbeStats:
    """Sum up the results within a window."""
    within = [result for result in results if now - WINDOWS_S[window] < result.at <= now]
    good = [result for result in within if result.ok]
    return ProbeStats(
        window=window,
        attempts=len(within),
        success_rate=len(good) / len(within) if within else None,
        ttft_ms=quantiles([result.ttft_ms for result in good if result.ttft_ms is not None]),
        inter_token_ms=quantiles([gap for result in good for gap in result.gaps_ms]),
    )


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """Return p50 and p95 (the smallest value that so many are not above), or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p95 = (round(ordered[-(-len(ordered) * percent // 100) - 1], 3) for percent in (50, 95))
    return Quantiles(p50=p50, p95=p95)


# --- the file --------------------------------------------------------------------------------------------------------


def _opened(path: Path, limits: HistoryLimits) -> sqlite3.Connection:
    try:
        return _checked(path, limits)
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            raise BadConfiguration(f"--database {path}", f"{error}; choose a file that can be written") from None
        _move_aside(path, str(error))
    except OSError as error:
        raise BadConfiguration(f"--database {path}", error.strerror or str(error)) from None
    return _checked(path, limits)


def _checked(path: Path, limits: HistoryLimits) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=limits.busy_timeout_s, check_same_thread=False)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise Newer(f"it was written by a newer version ({version}, this one knows {SCHEMA_VERSION})")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"malformed: {verdict}")
        _use_wal(db)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA max_page_count = {limits.pages_max}")
        if version == 0:
            _make_tables(db)
        db.execute(verdicts.SCHEMA)  # files of before have none, and programs of before leave it alone
    except BaseException:
        db.close()
        raise
    return db


def _use_wal(db: sqlite3.Connection) -> None:
    """Keep the journal beside the file, for good. Where another process has the file open, that one does so."""
    try:
        db.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise


def _make_tables(db: sqlite3.Connection) -> None:
    """Make the tables, unless a second page that starts at the same moment has just made them."""
    db.execute("BEGIN IMMEDIATE")  # the other one waits here
    if db.execute("PRAGMA user_version").fetchone() == (0,):
        for statement in filter(str.strip, _SCHEMA.split(";")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.commit()


class Newer(sqlite3.DatabaseError):
    """A file of a later version of this program."""


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    text = str(error)
    return isinstance(error, Newer) or any(word in text for word in ("malformed", "not a database", "already exists"))


def _move_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    _log.warning("the history cannot be used; a new one is begun", why=why, moved_to=str(aside))
