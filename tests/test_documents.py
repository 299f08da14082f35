"""The documents: links and named tests exist, tables are fresh, and the prose keeps to its rules."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.support import prose

ROOT = Path(__file__).parent.parent
PAGES = {str(page.relative_to(ROOT)): page for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])}
DECISIONS = [name for name in PAGES if name.startswith("docs/adr/")]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))

# The rules of prose, as numbers.
WITHOUT_ACTOR_MAX = 2.0  # of 1,000 words: who, what, nobody, ... where the part that acts should stand
SENTENCE_WORDS_P90 = 20
CELL_WORDS_MAX = 12
CELL_FIGURES_MAX = 1
README_LINES_MAX = 120
DECISION_LINES_MAX = 60
CHANGE_WORDS_MAX = 15
DECISION_HEADINGS = ["Context", "Decision", "Consequences", "Rejected"]

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


@pytest.fixture(scope="module")
def tests() -> set[str]:
    """The names of all test functions."""
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_tests_and_files_that_a_page_names_exist(page: Path, tests: set[str]) -> None:
    text = page.read_text()
    assert {name for name in re.findall(r"`(test_\w+)`", text) if name not in tests} == set()
    paths = re.findall(r"`((?:swarm|client|server|dht|tests|benchmarks|docs|deploy)/[\w./-]+)`", text)
    assert {path for path in paths if not (ROOT / path).exists()} == set()


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        to = (page.parent / target).resolve() if target else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), f"{target}#{anchor}"


def test_guarantees_name_their_tests() -> None:
    """Every line of SECURITY.md's tables of guarantees names a test."""
    guarantees = (ROOT / "SECURITY.md").read_text().split("\n## Guarantees\n")[1].split("\n## ")[0]
    lines = [line for line in guarantees.splitlines() if line.startswith("| ") and not line.startswith("| guarantee")]
    assert len(lines) > 20
    assert [line for line in lines if not re.search(r"`test_\w+`", line)] == []


def test_tables_are_as_the_code_and_the_results_say() -> None:
    path = ROOT / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    stale = [name for name, page in PAGES.items() if tables.renewed(page.read_text()) != page.read_text()]
    assert stale == [], "run `make docs`"
    assert tables.gone() == [], "limits that the documents promise; see CONSTANTS in benchmarks/tables.py"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_its_figures_come_from(path: Path) -> None:
    result = json.loads(path.read_text())
    assert {"command", "commit", "machine", "date"} <= {*result, *result.get("columns", ())}
    assert all(len(row) == len(result["columns"]) for row in result.get("rows", ()))


# Prose ----------------------------------------------------------------------------------------------------------------


@each_page
def test_subjects_are_named_parts(page: Path) -> None:
    assert prose.without_actor(page.read_text()) <= WITHOUT_ACTOR_MAX


@each_page
def test_sentences_are_short(page: Path) -> None:
    assert prose.sentence_length(page.read_text(), 0.9) <= SENTENCE_WORDS_P90


@each_page
def test_words_are_the_fields(page: Path) -> None:
    assert prose.PRIVATE.findall(prose.outside_code(page.read_text())) == []


@each_page
def test_table_cells_have_few_words_and_one_figure(page: Path) -> None:
    cells = prose.cells(prose.outside_tables_made(page.read_text()))
    assert [cell for cell in cells if len(prose.words(cell)) > CELL_WORDS_MAX] == []
    assert [cell for cell in cells if prose.figures(cell) > CELL_FIGURES_MAX] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_short_and_has_four_parts(name: str) -> None:
    text = PAGES[name].read_text()
    assert len(text.splitlines()) <= DECISION_LINES_MAX
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == DECISION_HEADINGS


def test_changes_are_one_short_line_each() -> None:
    changes = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("- ")]
    assert len(changes) > 10
    assert [line for line in changes if len(prose.words(prose.outside_code(line))) > CHANGE_WORDS_MAX] == []


def test_prose_that_breaks_the_rules_is_found() -> None:
    page = "# Title\n\nWhoever has no room is asked once more, and what nobody wants is dropped.\n"
    assert prose.without_actor(page) > WITHOUT_ACTOR_MAX
    assert prose.sentence_length(" ".join(["word"] * 21) + ".", 0.9) > SENTENCE_WORDS_P90
    assert prose.PRIVATE.findall("It stands in line, which is no trouble.") == ["stands in line", "trouble"]
    table = "| a | b |\n|---|---|\n| 1.81 (later 165 beside 97) | " + "word " * 13 + "|\n"
    assert [prose.figures(cell) for cell in prose.cells(table)] == [0, 0, 3, 0]
    assert max(len(prose.words(cell)) for cell in prose.cells(table)) > CELL_WORDS_MAX
    assert prose.figures("0.6 to 1.2 times, AES-256-GCM, `0:20`") == 1
