"""Writes the tables of documents, limits and measurements, between `<!-- table: KIND NAMES -->` and `<!-- end -->`.

    python benchmarks/tables.py [--check]        # or: make docs

`limits FOLDER...` prints the limits that the code in these folders declares (`swarm/limits.py`). `results FILE...`
prints the measurements in `benchmarks/results/FILE.json`, with command, commit, machine and date. `formats all`
prints what is known of quantised checkpoints (`swarm/model/formats.py`). `--check` writes
nothing, names the pages that are stale, and exits with 1 if there are any.
"""

import argparse
import ast
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from swarm.limits import Row, rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PRODUCT = ("swarm", "client", "server", "dht")
REGION = re.compile(r"(<!-- table: (\w+) ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
RUN = ("command", "commit", "machine", "date")  # without these a figure is not printed


def pages() -> list[Path]:
    """Return the documents."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def renewed(text: str) -> str:
    """Return a page with its tables written anew."""

    def table(region: re.Match[str]) -> str:
        names = region[3].split()
        makers = {"limits": limits, "formats": formats, "results": results}
        made = makers[region[2]](names)
        return f"{region[1]}{made}\n{region[4]}"

    return REGION.sub(table, text)


def formats(_: Sequence[str]) -> str:
    """Return the table of the formats of quantised checkpoints."""
    known = import_module("swarm.model.formats").formats()
    cells = [[f"`{row.method}`", row.tensors, row.runs, row.why] for row in known]
    return markdown(("format", "weights", "runs", "how"), cells)


# Limits ---------------------------------------------------------------------------------------------------------------


def limits(folders: Sequence[str]) -> str:
    """Return the table of the limits that the code in these folders declares."""
    found = [row for path in declaring_files(folders) for row in rows(*declared_in(path))]
    found += [row for folder in folders for row in constants(folder)]
    cells = [[f"`{row.name}`", shown(row), row.why, f"`{row.group}`"] for row in found]
    return markdown(("limit", "value", "at the bound", "declared in"), cells)


def declaring_files(folders: Sequence[str]) -> Iterator[Path]:
    """List the files with a class of limits. Links are left out, since what they lead to is there once already."""
    for folder in folders:
        files = [ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py")
        for path in sorted(path for path in files if path.exists()):
            linked = any(each.is_symlink() for each in path.parents)
            if not linked and limit_classes(path):
                yield path


def limit_classes(path: Path) -> list[str]:
    """Return the names of the classes in a file whose fields are made by `limit`."""
    source = path.read_text()
    if "= limit(" not in source:
        return []
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return [each.name for each in classes if any(is_limit(field) for field in each.body)]


def is_limit(field: ast.stmt) -> bool:
    """Tell whether a class's statement is `name: type = limit(...)`."""
    made = field.value if isinstance(field, ast.AnnAssign) else None
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "limit"


def declared_in(path: Path) -> list[Any]:
    """Return the groups of limits that a file declares, with their default values."""
    module = import_module(module_of(path))
    return [getattr(module, name)() for name in limit_classes(path)]


SIZES = {"MiB": 2**20, "KiB": 2**10, "bytes": 1}

# Limits that are module constants: both ends of the wire must agree on them, or no class has them yet. A constant that
# became a field of a class (NAME as name) is printed from there, and its entry is ignored: take it out here, too.
CONSTANTS: dict[str, dict[str, tuple[str, str]]] = {
    "swarm/protocol/tensors.py": {
        "TENSOR_BYTES_MAX": ("B", "a larger frame ends the channel"),
    },
    "swarm/protocol/codec.py": {
        "HEADER_BYTES_MAX": ("B", "a larger header ends the channel"),
    },
    "swarm/protocol/messages.py": {
        "ROWS_MAX": ("rows", "a session with more rows is refused"),
        "ROLLBACK_MAX": ("positions", "a step that takes back more is refused"),
        "LIFETIME_S_MAX": ("s", "a grant ends; a reroute gives another"),
    },
}


def constants(folder: str) -> Iterator[Row]:
    """List the limits in this folder that are module constants."""
    for path, names in CONSTANTS.items():
        if not (path == folder or path.startswith(f"{folder}/")) or not (ROOT / path).exists():
            continue
        module = import_module(module_of(ROOT / path))
        for name, (unit, why) in names.items():
            if hasattr(module, name):
                yield Row(path, name, getattr(module, name), unit, why)


def gone() -> list[str]:
    """List the entries of `CONSTANTS` that the code has neither as a constant nor as a field of a class of limits."""
    fields = {row.name for path in declaring_files(PRODUCT) for row in rows(*declared_in(path))}
    return [
        f"{path}: {name}"
        for path, names in CONSTANTS.items()
        for name in names
        if name.lower() not in fields
        and not ((ROOT / path).exists() and hasattr(import_module(module_of(ROOT / path)), name))
    ]


def module_of(path: Path) -> str:
    """Return the name that a file of the product is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "swarm" else ("swarm", *parts))


def shown(row: Row) -> str:
    """Return a limit's value as people read it."""
    value, unit = row.value, row.unit
    if isinstance(value, tuple):
        return f"{' / '.join(f'{each:g}' for each in value)} {unit}".strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{value} {unit}".strip()
    if unit.removesuffix("/s") in {"B", "bytes"}:
        size = next((size for size in SIZES if value >= SIZES[size]), "bytes")
        return f"{value / SIZES[size]:,.6g} {size}{'/s' * unit.endswith('/s')}"
    if unit == "s" and value >= 120 and value % 60 == 0:
        hours, minutes = value / 3600, value / 60
        return f"{hours:g} h" if value % 3600 == 0 else f"{minutes:g} min"
    if unit == "s" and 0 < value < 0.1:
        return f"{1000 * value:g} ms"
    return f"{value:,.10g} {unit}".strip()


# Measurements ---------------------------------------------------------------------------------------------------------


def results(names: Sequence[str]) -> str:
    """Return the table of one measurement or of several with the same columns, and where each comes from."""
    runs = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]
    columns, *others = [tuple(run["columns"]) if "columns" in run else FROM_SAMPLES for run in runs]
    assert all(other == columns for other in others), f"{names} have different columns"
    several = len(runs) > 1
    cells = []
    for number, run in enumerate(runs, 1):
        cells += [[*([str(number)] if several else []), *map(figure, row)] for row in rows_of(run)]
    notes = "\n".join((f"{number}. " if several else "") + source(run) for number, run in enumerate(runs, 1))
    return f"{markdown((*(['run'] if several else []), *columns), cells)}\n\n{notes}".rstrip()


FROM_SAMPLES = ("", "median, ms", "p95, ms", "samples")


def rows_of(run: dict[str, Any]) -> list[list[Any]]:
    """Return a run's rows: as they were put down, or from its raw samples as `common.write_json` wrote them."""
    if "rows" in run:
        return run["rows"]
    every = [(each["name"], sorted(each["ms"])) for each in run["samples"]]
    return [
        [name, round(statistics.median(ms), 3), round(ms[int(0.95 * (len(ms) - 1))], 3), len(ms)] for name, ms in every
    ]


def figure(value: object) -> str:
    """Return a cell. Absence is an empty one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def source(run: dict[str, Any]) -> str:
    """Return where a run's figures come from, except for what its columns say themselves."""
    said = {name: str(run[name]) for name in RUN if name in run}
    assert {*said, *run.get("columns", ())} >= {*RUN}, f"{run['benchmark']} does not say {RUN}"
    if isinstance(machine := run.get("machine"), dict):
        said["commit"] = run["commit"][:8] + "+" * run["commit"].endswith("+")  # "+": with changes
        said["machine"] = f"{machine['cores']} cores of {machine['processor']}"
    marked = {"command": "`{}`", "commit": "commit `{}`"}
    parts = [marked.get(name, "{}").format(said[name]) for name in RUN if name in said]
    return f"Measured: {', '.join(parts)}." if parts else ""


def markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *cells]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines)
        .replace("| --- ", "|---")
        .replace("---|---", "---|---")
    )


def main() -> None:
    """Write every page's tables anew, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    for entry in gone():
        print(f"{entry} is gone: where is this limit now? Change or remove its entry in CONSTANTS", file=sys.stderr)
    stale = {page: new for page in pages() if (new := renewed(page.read_text())) != page.read_text()}
    for page, new in stale.items():
        print(f"{page.relative_to(ROOT)} {'is stale: run `make docs`' if check else 'written'}")
        if not check:
            page.write_text(new)
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
