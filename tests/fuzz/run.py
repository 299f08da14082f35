"""The two ways to feed a parser, as functions: both raise, or report, whatever the parser should not have raised."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from tests.fuzz.cases import cases
from tests.fuzz.parsers.base import Parser

MEMORY_MAX = 4 << 20  # Python's, for one input; AutoConfig alone takes 2 MiB
MEMORY_PER_BYTE = 200  # beyond it: what JSON and msgpack take at most
MEASURED_OF = 8  # tracing takes as long as most parsers
ROUND_CASES = 1000  # Hypothesis remembers all that it has tried, which in the end costs more than trying
LOG_SHOWN = 6000  # characters of a finding
TREE = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # some parsers read files: on a disk that takes four times as long


def feed(parser: Parser, data: bytes) -> None:
    """Feed one input; of one in MEASURED_OF, which its bytes choose, look at the memory that it takes, too."""
    if zlib.crc32(data) % MEASURED_OF:
        parser.check(data)
        return
    tracemalloc.start(1)
    try:
        parser.check(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY_MAX + MEMORY_PER_BYTE * len(data), f"{peak} bytes of memory for {len(data)} of input"


def feed_hypothesis(parser: Parser, n_cases: int, database: Path | None = None) -> int:
    """Feed generated inputs. Returns how many; raises what the first finding raised, with its smallest input."""
    kept = None if database is None else DirectoryBasedExampleDatabase(database)
    fed = 0
    while fed < n_cases:
        fed += _feed_round(parser, min(ROUND_CASES, n_cases - fed), kept)
    return fed


def _feed_round(parser: Parser, n_cases: int, kept: ExampleDatabase | None) -> int:
    fed = 0

    @settings(max_examples=n_cases, deadline=None, database=kept, suppress_health_check=list(HealthCheck))
    @given(cases(parser))
    def one(data: bytes) -> None:
        nonlocal fed
        fed += 1
        feed(parser, data)

    one()
    return fed


@dataclass(frozen=True, slots=True)
class Guided:
    """What one parser came to under atheris. finding: the log's end, where something was found."""

    parser: str
    executions: int
    cpu_s: float
    finding: str | None


def has_atheris() -> bool:
    """Whether it is installed: it has wheels for Linux on x86-64 alone."""
    return importlib.util.find_spec("atheris") is not None


def feed_atheris(parsers: Sequence[Parser], folder: Path, executions: int, cpu_s: float) -> Iterator[Guided]:
    """Fuzz one parser after the other, outside this process. A later run goes on with the corpora in the folder."""
    line = (sys.executable, "-m", "tests.fuzz.guided", str(folder), str(executions), str(cpu_s))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as scratch:
        env = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
        names = [parser.name for parser in parsers]
        with subprocess.Popen([*line, *names], env=env, cwd=TREE, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for report in map(json.loads, run.stdout):
                name, log = report["parser"], folder / report["parser"] / "log"
                finding = log.read_text(errors="replace")[-LOG_SHOWN:] if "finding" in report else None
                yield Guided(name, report.get("executions", 0), report.get("cpu_s", 0.0), finding)
    assert run.returncode == 0, "the fuzzer itself broke"
