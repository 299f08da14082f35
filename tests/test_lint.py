"""What `make lint` runs finds nothing; it runs beside the tests.

Without a cache mypy reads torch and transformers, too: a minute. So that is a long test.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.often import rest_is_long

ROOT = Path(__file__).parents[1]
TOOLS = ("ruff check", "ruff format", "mypy", "lint-imports")


@pytest.fixture(scope="module")
def planned() -> list[str]:
    """The lines of `make lint` that check something."""
    lines = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\S+/bin/((?:ruff|mypy|lint-imports)\b.*)$", lines, re.MULTILINE)


def test_make_lint_runs_these_tools(planned: list[str]) -> None:
    assert len(planned) == len(TOOLS)
    assert all(line.startswith(tool) for line, tool in zip(planned, TOOLS, strict=True))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tool", rest_is_long(TOOLS, [tool for tool in TOOLS if tool != "mypy"]))
def test_lint_finds_nothing(planned: list[str], tool: str) -> None:
    name, *arguments = shlex.split(next(line for line in planned if line.startswith(tool)))
    line = [str(Path(sys.executable).parent / name), *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_of_the_package_is_too_long_to_be_read_at_once() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    package = [name for name in listed.stdout.split() if name.startswith(("swarm/", "client/", "server/", "dht/"))]
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in package if (ROOT / name).is_file()}
    assert len(lines) > 300
    assert {name: count for name, count in lines.items() if count > 400} == {}
