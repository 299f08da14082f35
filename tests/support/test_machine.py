"""A run leaves out what it has no time for, and says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support import machine
machine.lost_share = lambda: {share}
"""
TESTS = """
import pytest

def test_anywhere():
    pass

@pytest.mark.real_time
def test_where_time_is_kept():
    pass
"""

WITH_A_SWARM = """
from tests.support.proxy import ByteProxy

def test_swarm():
    pass
"""


def run(folder: Path, share: float, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST.format(share=share))
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_swarm.py").write_text(WITH_A_SWARM)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    real_time: x\n")
    plugins = ("-p", "tests.support.machine", "-p", "xdist.plugin", "-p", "no:cacheprovider")
    line = [sys.executable, "-m", "pytest", "-rs", *plugins, *options, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in [name for name in env if name.startswith("PYTEST_XDIST")]:
        del env[name]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


def test_no_test_begins_when_time_is_over(tmp_path: Path) -> None:
    printed = run(tmp_path, 0.0, "--until", "1")
    assert "3 skipped" in printed, printed
    assert "no time is left" in printed


@pytest.mark.long
def test_a_machine_that_loses_its_time_to_others_is_not_asked_to_keep_it(tmp_path: Path) -> None:
    printed = run(tmp_path, 0.7, "--numprocesses", "1")
    assert "1 passed, 2 skipped" in printed, printed
    assert "this machine loses 70% of its time to others" in printed


def test_other_machines_leave_nothing_out(tmp_path: Path) -> None:
    assert "3 passed" in run(tmp_path, 0.2, "--numprocesses", "1", "--until", "99999999999")
