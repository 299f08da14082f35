"""What survives restarts, what is condensed, and what happens to a damaged file and a full disk."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm.errors import BadConfiguration
from swarm.monitor.history import Database, HistoryLimits, ProbeResult, Sample, probe_stats, quantiles
from swarm.monitor.state import API
from tests.dht.support import ROOT

DAY_S, KEPT_S = 24 * 3600, 30 * 24 * 3600
NOW = 1_790_000_000.0


def sample(servers: int = 3, coverage: float = 1.0, root: str = ROOT) -> Sample:
    return Sample(root, "org/model", 12, coverage, servers, 20.0, 900.0, 4096, float(coverage == 1.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "health.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    opened = Database(path)
    yield opened
    opened.close()


def test_history_models_and_first_appearances_survive_a_restart(path):
    first = Database(path)
    first.record(NOW, [sample()], [("aa", NOW - 500)]).result()
    first.close()
    second = Database(path)
    second.record(NOW + 30, [sample()], [("aa", NOW + 30)]).result()
    remembered = second.remembered(NOW + 30).result()
    points = second.history(ROOT, "24h", NOW + 30).result().points
    second.close()
    assert remembered.models == {ROOT: ("org/model", 12)}
    assert remembered.first_seen == {"aa": NOW - 500}
    assert points[0].servers_online == 3


def test_pages_that_start_at_once_share_one_file(path):
    """Else one finds the other's half-made tables, takes them for damage and moves the file away."""
    for number in range(4):
        file = path.with_name(f"{number}.sqlite")
        with ThreadPoolExecutor(4) as starting:
            opened = list(starting.map(lambda _, file=file: Database(file), range(4)))
        for at, database in enumerate(opened):
            database.record(NOW + 120 * at, [sample()], []).result()
        assert len(opened[0].history(ROOT, "24h", NOW + 999).result().points) == len(opened)
        for database in opened:
            database.close()
    assert not list(path.parent.glob("*damaged*"))


def test_samples_become_hourly_means_after_a_day_and_go_after_thirty(database, path):
    start = (NOW - 2 * DAY_S) // 3600 * 3600
    for i in range(120):
        database.record(start + 30 * i, [sample(servers=i % 2)], []).result()
    database.record(NOW, [sample()], []).result()
    with sqlite3.connect(path) as reader:
        rows = reader.execute("SELECT at, servers FROM samples WHERE hourly = 1").fetchall()
        assert rows == [(start, 0.5)]
        assert reader.execute("SELECT count(*) FROM samples WHERE hourly = 0").fetchone() == (1,)
        database.record(NOW + KEPT_S + DAY_S, [sample()], []).result()
        assert reader.execute("SELECT count(*) FROM samples WHERE at < ?", (NOW - DAY_S,)).fetchone() == (0,)


def test_a_history_never_has_more_points_than_it_may(database):
    for i in range(2000):
        database.record(NOW - 43 * i, [sample()], [])
        if i % 100 == 0:
            database.history(None, "24h", NOW).result()
    found = database.history(ROOT, "24h", NOW).result()
    assert API.points_max - 5 < len(found.points) <= API.points_max
    assert [point.at for point in found.points] == sorted(point.at for point in found.points)


def test_all_models_together_are_summed_at_each_moment_and_not_over_time(database):
    for at in (NOW - 60, NOW - 30, NOW):
        database.record(at, [sample(3), sample(5, 0.5, root="cd" * 32)], []).result()
    points = database.history(None, "30d", NOW).result().points
    assert [(point.servers_online, point.coverage) for point in points] == [(8.0, 0.75)] * len(points)


def _overwrite_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.write_bytes(b"no database at all" * 100), _overwrite_the_middle],
    ids=["garbage", "torn"],
)
def test_a_damaged_file_is_moved_aside_with_a_message_and_a_new_one_begun(path, damage, capsys):
    first = Database(path)
    for i in range(300):
        first.record(NOW + i, [sample(root=f"{i:064x}")], []).result()
    first.close()
    damage(path)
    second = Database(path)
    second.record(NOW, [sample()], []).result()
    assert len(second.history(ROOT, "24h", NOW).result().points) == 1
    second.close()
    assert len(list(path.parent.glob("health.sqlite.damaged-*"))) >= 1
    assert "a new one is begun" in "".join(capsys.readouterr())


def test_a_newer_versions_file_is_kept_and_not_written_to(path):
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    Database(path).close()
    assert len(list(path.parent.glob("health.sqlite.damaged-*"))) == 1


def test_a_full_disk_is_said_and_writing_goes_on_when_there_is_room(database, monkeypatch):
    database.record(NOW, [sample()], []).result()
    database._submit(lambda: database._db.execute("PRAGMA max_page_count = 1")).result()
    for i in range(200):
        database.record(NOW + i, [sample(root=f"{i:064x}")], []).result()
    assert "full" in database.problem
    assert len(database.history(ROOT, "24h", NOW + 200).result().points) == 1
    database._submit(lambda: database._db.execute(f"PRAGMA max_page_count = {HistoryLimits().pages_max}")).result()
    database.record(NOW + 300, [sample()], []).result()
    assert database.problem == ""


def test_a_place_where_no_file_can_be_is_the_operators_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfiguration, match="--database"):
        Database(tmp_path / "file" / "health.sqlite")


def test_probes_are_summed_up_by_window(database):
    for i, ok in enumerate((True, True, False, True)):
        gaps = (10.0, 20.0) if ok else ()
        database.record_probe(ProbeResult(ROOT, NOW - 60 * i, ok, 100.0 * (i + 1) if ok else None, gaps)).result()
    database.record_probe(ProbeResult(ROOT, NOW - 2 * DAY_S, False)).result()
    day, month = database.probe_stats(NOW).result()[ROOT]
    assert (day.attempts, day.success_rate, day.ttft_ms.p50, day.ttft_ms.p95) == (4, 0.75, 200.0, 400.0)
    assert (day.inter_token_ms.p50, day.inter_token_ms.p95) == (10.0, 20.0)
    assert (month.attempts, month.success_rate) == (5, 0.6)
    assert probe_stats([], NOW, "24h").success_rate is None


def test_quantiles_are_values_that_occurred():
    assert quantiles(range(1, 101)).model_dump() == {"p50": 50.0, "p95": 95.0}
    assert quantiles([7.0]).model_dump() == {"p50": 7.0, "p95": 7.0}
    assert quantiles([]) is None
