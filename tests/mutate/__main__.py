"""Break SECURITY.md's guarantees, one after the other: `make mutate`, or `python -m tests.mutate --only "first words"`.

Prints a line for each mutant, and writes its row of benchmarks/results/mutants.json. Exits 1 if less than 95 % are
noticed, or if a test fails without any mutant.
"""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from tests.mutate.run import Outcome, copied, preload, run
from tests.mutate.table import ROOT, Mutant, mutants


@click.command()
@click.option("--only", multiple=True, help="mutants whose description begins so; may be repeated; default: all")
@click.option("--part", default="1/1", help="K/N: the K-th of N parts of the mutants")
@click.option("--json", "path", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/mutants.json")
def main(only: tuple[str, ...], part: str, path: Path) -> None:
    """Run the mutants, and tell which are noticed."""
    number, parts = map(int, part.split("/"))
    chosen = [mutant for mutant in mutants() if mutant.breaks.startswith(only or "")][number - 1 :: parts]
    if not chosen:
        raise click.UsageError("no mutant's description begins so")
    preload()
    with copied() as tree:
        whole = run(tree, None, *dict.fromkeys(mutant.test for mutant in chosen), timeout_s=1800.0)
        if whole.is_noticed:
            click.echo(f"tests fail without any mutant:\n{whole.report}")
            sys.exit(1)
        outcomes: dict[Mutant, Outcome] = {}
        for mutant in chosen:
            outcomes[mutant] = _tried(tree, mutant)
            result = _result(outcomes, _rows_before(path))  # written each time: an interrupted run keeps its rows
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    noticed = sum(outcome.is_noticed for outcome in outcomes.values())
    click.echo(f"{noticed} of {len(outcomes)} mutants are noticed")
    sys.exit(0 if noticed >= 0.95 * len(outcomes) else 1)


def _tried(tree: Path, mutant: Mutant) -> Outcome:
    began = time.monotonic()
    outcome = run(tree, mutant)
    said = "noticed" if outcome.is_noticed else "LIVES"
    click.echo(f"{said:8} {time.monotonic() - began:5.0f} s  {mutant.breaks} ({mutant.file}, {mutant.test})")
    return outcome


def _rows_before(path: Path) -> dict[tuple[str, ...], list[str]]:
    """Return the rows of earlier runs, which stay where those mutants were not run again."""
    if not path.exists():
        return {}
    return {tuple(row[:4]): row for row in json.loads(path.read_text())["rows"]}


def _result(outcomes: dict[Mutant, Outcome], before: dict[tuple[str, ...], list[str]]) -> dict[str, object]:
    commit, rows = _commit(), []
    for mutant in mutants():
        facts = (mutant.guarantee, mutant.breaks, f"`{mutant.file}`", f"`{mutant.test}`")
        if mutant in outcomes:
            rows.append([*facts, "yes" if outcomes[mutant].is_noticed else "**no**", f"`{commit}`"])
        else:
            rows.append(before.get(facts, [*facts, "not run", ""]))
    return {
        "benchmark": "mutants",
        "command": "make mutate",
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "seed": None,
        "columns": ["guarantee", "mutant", "file", "test", "noticed", "commit"],
        "rows": rows,
    }


def _commit() -> str:
    line = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(line, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
