"""The table of mutants fits the code, the tests and SECURITY.md; and a mutant is noticed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutate.run import place_of
from tests.mutate.table import ROOT, Mutant, guarantees, mutants

each = pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.breaks)


@each
def test_mutant_replaces_text_that_is_there(mutant: Mutant) -> None:
    assert mutant.old in (ROOT / mutant.file).read_text()
    assert mutant.old != mutant.new


@each
def test_security_names_the_test_that_is_to_notice(mutant: Mutant) -> None:
    named = guarantees((ROOT / "SECURITY.md").read_text())
    assert mutant.test in named[mutant.guarantee]
    assert place_of(mutant.test).exists()


def test_guarantees_are_read_from_their_tables() -> None:
    page = "x\n## Guarantees\n\n| guarantee | how | tests |\n|---|---|---|\n| A | b | `test_a` `test_b` |\n\n## Not\n"
    assert guarantees(page) == {"A": {"test_a", "test_b"}}


@pytest.mark.long
@pytest.mark.slow("runs a test in a copy of the tree, twice")
def test_mutant_is_run_against_its_named_test(tmp_path: Path) -> None:
    result = tmp_path / "mutants.json"
    line = (sys.executable, "-m", "tests.mutate", "--only", "the initiator takes any peer", "--json", str(result))
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 of 1 mutants are noticed" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0
    noticed = [row[4] for row in json.loads(result.read_text())["rows"]]
    assert (noticed.count("yes"), noticed.count("not run")) == (1, len(mutants()) - 1)
