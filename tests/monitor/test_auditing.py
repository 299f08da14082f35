"""The page's side of audits: the time that they take, whom they may meet, and what is remembered of them."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.identity import Identity
from swarm.monitor import verdicts
from swarm.monitor.allowance import Allowance, AllowanceLimits
from swarm.monitor.auditing import AuditingLimits, Orders, auditor, left_out
from swarm.monitor.children import Child, Joining
from swarm.monitor.history import Database
from swarm.monitor.verdicts import AuditResult, Record, VerdictLimits, shown
from swarm.monitor.view import audited
from tests.dht.support import ROOT

NOW, DAY_S = 1_790_000_000.0, 24 * 3600
PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 6)]


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(":memory:")
    opened.execute(verdicts.SCHEMA)
    yield opened
    opened.close()


# --- the schedule


@given(st.lists(st.floats(0.1, 500.0), min_size=1, max_size=60))
def test_audits_take_no_more_than_their_share_of_the_time(took: list[float]) -> None:
    limits, began, now, spent = AllowanceLimits(), 100.0, 100.0, 0.0
    allowance = Allowance(began, limits)
    for each in took:
        now += allowance.wait_s(now)
        assert spent <= limits.share * (now - began) + 1e-6
        now, spent = now + each, spent + each
        allowance.spent(each, now)
    assert now + allowance.wait_s(now) - began >= spent / limits.share * (1 - 1e-9)


def test_time_that_was_not_used_is_kept_up_to_a_bound() -> None:
    limits = AllowanceLimits()
    allowance = Allowance(0.0, limits)
    later = 100 * limits.banked_s / limits.share
    allowance.spent(limits.banked_s, later)
    assert allowance.wait_s(later) == 0.0
    allowance.spent(1.0, later)
    assert allowance.wait_s(later) == pytest.approx(1.0 / limits.share)


# --- the orders


def test_only_servers_that_answer_are_named_and_wrong_ones_are_left_out() -> None:
    orders = Orders.of(PEERS[:3], PEERS[2:4])
    assert orders.answering == tuple(sorted(PEERS[:2]))
    assert orders == Orders.of(reversed(PEERS[:3]), PEERS[2:4]), "the same orders are the same line"
    many = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 12)]
    assert len(Orders.of(many, (), AuditingLimits(peers_max=10)).answering) == 10


def test_a_wrong_server_is_audited_again_after_a_day() -> None:
    wrong = Record(agreed=3, disputed=0, wrong=1, at=NOW, agreed_at=NOW - 60, wrong_at=NOW)
    assert left_out(wrong, NOW + DAY_S - 1)
    assert not left_out(wrong, NOW + DAY_S)
    assert not left_out(Record(agreed=4, disputed=0, wrong=1, at=NOW, agreed_at=NOW, wrong_at=NOW - 60), NOW)


async def test_a_line_that_is_no_finding_is_noted_and_not_taken() -> None:
    taken = []
    child = auditor(("model",), 1.0, 0.02, Path("kept"), Joining(initial_peers=("x",), network="n"), taken.append)
    assert "something else" in child._take(b"{}")
    assert child._take(b'{"root": "%s", "at": 1.0, "took_s": 0.5, "agreed": ["nobody"]}' % (b"ab" * 32))
    assert taken == []
    line = b'{"root": "%s", "at": 1.0, "took_s": 0.5, "agreed": ["%s"]}' % (b"ab" * 32, PEERS[0].encode())
    assert child._take(line) == ""
    assert taken[0].agreed == (PEERS[0],)


async def test_a_child_is_told_the_latest_line_and_no_line_twice(tmp_path: Path) -> None:
    (tmp_path / "echoing.py").write_text("import sys\nfor line in sys.stdin: print(line, end='', flush=True)\n")
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def take(text: bytes) -> str:
        heard.put_nowait(text)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        child = Child("echoing", (), take)
        child.tell(b"before")  # it does not run yet
        life = asyncio.create_task(child.run())
        async with asyncio.timeout(30):
            assert await heard.get() == b"before\n"
            child.tell(b"before")
            child.tell(b"after")
            assert await heard.get() == b"after\n"
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


# --- the memory


def test_verdicts_are_counted_by_server_and_survive_a_restart(tmp_path: Path) -> None:
    database = Database(tmp_path / "health.sqlite")
    for n in range(3):
        database.record_audit(AuditResult(ROOT, NOW + n, agreed=PEERS[:2], disputed=PEERS[2:3])).result()
    database.record_audit(AuditResult(ROOT, NOW + DAY_S, wrong=PEERS[2:3])).result()
    database.close()
    again = Database(tmp_path / "health.sqlite")
    records = again.audits(NOW + DAY_S).result()
    again.close()
    assert records[ROOT, PEERS[0]] == Record(agreed=3, disputed=0, wrong=0, at=NOW + 2, agreed_at=NOW + 2)
    third = records[ROOT, PEERS[2]]
    assert (third.audited, third.disputed, third.wrong, third.is_wrong) == (4, 3, 1, True)


def test_a_file_of_before_audits_gets_their_table(tmp_path: Path) -> None:
    Database(tmp_path / "health.sqlite").close()
    with sqlite3.connect(tmp_path / "health.sqlite") as before:
        before.execute("DROP TABLE audits")
    before.close()
    database = Database(tmp_path / "health.sqlite")
    assert database.audits(NOW).result() == {}
    database.close()
    assert not list(tmp_path.glob("*damaged*"))


def test_old_verdicts_go_and_their_number_is_bounded(db: sqlite3.Connection) -> None:
    verdicts.write(db, AuditResult(ROOT, NOW - 31 * DAY_S, agreed=PEERS[:1]))
    verdicts.write(db, AuditResult(ROOT, NOW, agreed=PEERS[1:2]))
    assert [peer for _, peer in verdicts.read(db, NOW)] == PEERS[1:2]
    for n, peer in enumerate(PEERS):
        verdicts.write(db, AuditResult(ROOT, NOW + 1 + n, agreed=[peer]), VerdictLimits(rows_max=3))
    assert sorted(peer for _, peer in verdicts.read(db, NOW + 9)) == sorted(PEERS[2:])


@pytest.mark.parametrize(
    ("record", "is_doubted", "finding", "word", "says"),
    [
        (Record(9, 0, 0, NOW - 60, NOW - 60), False, "agreed", "agrees", "9 of 9 audits agreed"),
        (Record(9, 1, 0, NOW - 60, NOW - 90), True, "doubted", "in doubt", "it or another server differs"),
        (Record(9, 1, 0, NOW - 60, NOW - 90), False, "agreed", "agrees", "9 of 10 audits agreed"),
        (Record(9, 1, 1, NOW - 60, NOW - 90, NOW - 60), True, "wrong", "differs", "others compute something else"),
        (Record(9, 1, 1, NOW, NOW, NOW - 60), False, "agreed", "agrees", "9 of 11 audits agreed"),
        (Record(0, 1, 0, NOW), False, "open", "open", "0 of 1 audit agreed"),
    ],
)
def test_the_page_says_what_its_audits_have_shown(record, is_doubted, finding, word, says) -> None:
    key = (ROOT, PEERS[0])
    (audits,) = shown({key: record}, {key} if is_doubted else ()).values()
    assert audits.finding == finding
    said, detail = audited(audits, NOW)
    assert said == word
    assert says in detail
