"""A test that takes too long fails unless it says why; time that others take from it does not count."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.budget import LOST, Moment, charge_s

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support import budget
budget.computed_s = 0.0
budget.Moment.now = classmethod(lambda cls: cls(0.0, budget.computed_s, None))
"""
TESTS = """
import pytest
from tests.support import budget

def compute():
    budget.computed_s += 200.0

@pytest.fixture(scope="module")
def shared():
    compute()

def test_quick(shared):
    pass

def test_hog():
    compute()

@pytest.mark.slow("it computes")
def test_excused():
    compute()
"""


def run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow(reason): x\n    long: x\n")
    line = [sys.executable, "-m", "pytest", "-p", "tests.support.budget", "-p", "no:cacheprovider", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", LOST: "0"}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_only_the_item_far_over_the_budget_fails(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_some.py::test_hog" in done.stdout
    assert "more than 5 s, and not marked slow" in done.stdout


def test_slow_without_a_reason_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS.replace('("it computes")', ""))
    assert done.returncode == 4
    assert "slow needs a reason" in done.stdout + done.stderr


def test_waiting_counts_where_no_process_lacks_a_core() -> None:
    assert charge_s(Moment(100.0, 7.0, 50.0), Moment(112.0, 8.0, 50.0)) == 12.0
    assert charge_s(Moment(100.0, 7.0, 50.0), Moment(112.0, 8.0, 60.0)) == 2.0


def test_computing_counts_whatever_the_load() -> None:
    assert charge_s(Moment(100.0, 7.0, 50.0), Moment(112.0, 16.0, 62.0)) == 9.0
    assert charge_s(Moment(100.0, 7.0, None), Moment(112.0, 8.0, None)) == 1.0
