"""What the documents name is there: tests that are said to show something, pages and headings behind links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    functions = set(re.findall(r"def (test_\w+)\(", tests))
    assert {name for name in re.findall(r"`(test_\w+)`", text) if name not in functions} == set()
    paths = re.findall(r"`((?:swarm|client|server|dht|tests|benchmarks|docs|deploy)/[\w./-]+)`", text)
    assert {path for path in paths if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        to = (page.parent / target).resolve() if target else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), f"{target}#{anchor}"


def test_guarantees_name_their_tests() -> None:
    """Every line of SECURITY.md's tables of guarantees names a test."""
    guarantees = (ROOT / "SECURITY.md").read_text().split("## What holds\n")[1].split("## What does not hold yet")[0]
    lines = [line for line in guarantees.splitlines() if line.startswith("| ") and not line.startswith("| guarantee")]
    assert len(lines) > 20
    assert [line for line in lines if not re.search(r"`test_\w+`", line)] == []
