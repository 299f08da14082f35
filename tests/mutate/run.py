"""Runs mutants: each in a copy of the tree, where the named test must fail.

Tests run in forks of this process, which has imported third parties and nothing of the product.
"""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mutate.table import ROOT, Mutant


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a test said of a mutant. is_noticed: it failed. report: pytest's last lines."""

    is_noticed: bool
    report: str


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree as git has it, with its changes, while the block runs."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="swarm-mutate-") as text:
        tree = Path(text).resolve()
        for name in filter(None, listed.stdout.decode().split("\0")):
            source = ROOT / name
            if source.is_symlink() or source.is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, tree / name, follow_symlinks=False)
        yield tree


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """The copy with one guarantee broken, while the block runs."""
    path = tree / mutant.file
    before = path.read_text()
    assert mutant.old in before, f"{mutant.file} no longer has the text that is to be replaced"
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(before)


def run(tree: Path, mutant: Mutant | None, *tests: str, timeout_s: float = 300.0) -> Outcome:
    """Run a mutant's test in the copy; or without a mutant, these tests as they are.

    A run that collects nothing, or ends otherwise than by passed and failed tests, raises RuntimeError.
    """
    if mutant is None:
        return _pytest(tree, tests, timeout_s)
    with mutated(tree, mutant):
        return _pytest(tree, (mutant.test,), timeout_s)


@cache
def place_of(test: str) -> Path:
    """Return the file that a test is in. Raises LookupError."""
    pattern = re.compile(rf"def {test}\(")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if pattern.search(path.read_text()):
            return path
    raise LookupError(test)


def preload() -> None:
    """Import once what takes long, and is none of the product: the forks that run tests have it then."""
    for name in ("torch", "transformers.models.llama.modeling_llama", "uvloop"):
        import_module(name)


def _pytest(tree: Path, tests: tuple[str, ...], timeout_s: float) -> Outcome:
    names = [f"{place_of(test).relative_to(ROOT)}::{test}" for test in tests]
    with tempfile.TemporaryFile() as printed:
        process = multiprocessing.get_context("fork").Process(target=_in_fork, args=(tree, names, printed.fileno()))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            return Outcome(is_noticed=True, report=f"nothing within {timeout_s:.0f} s")
        printed.seek(0)
        report = printed.read().decode(errors="replace")
    if process.exitcode not in {0, 1}:  # 0: all passed, 1: some failed
        raise RuntimeError(f"{' '.join(names)}: pytest ended with {process.exitcode}\n{report[-3000:]}")
    return Outcome(process.exitcode == 1, report[-3000:])


def _in_fork(tree: Path, names: list[str], printed: int) -> None:
    """Run tests with the copy's product, in a process that ends with pytest's code."""
    os.setpgrp()
    os.chdir(tree)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] in {"swarm", "tests"}]:
        del sys.modules[name]
    for number in (1, 2):
        os.dup2(printed, number)
    found = find_spec("swarm")
    code = 99
    if found is not None and found.origin == str(tree / "swarm" / "__init__.py"):  # else the copy is not what is tested
        loaded = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that third parties have imported
        code = pytest.main(
            ["-q", "-x", "-m", "long or not long", "-W", loaded, "-p", "no:cacheprovider", "-p", "no:xdist", *names]
        )
    sys.stdout.flush()
    os._exit(code)
