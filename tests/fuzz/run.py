"""The two ways to feed a parser, as functions: both raise, or report, whatever the parser should not have raised."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.cases import cases
from tests.fuzz.parsers import Parser

MEMORY_MAX = 4 << 20  # Python's, for one input; AutoConfig alone takes 2 MiB
MEMORY_PER_BYTE = 200  # beyond it: what JSON and msgpack take at most
MEASURED_OF = 8  # tracing takes as long as most parsers
GUIDED_BYTES_MAX = 4096  # of one of atheris' inputs
GUIDED_MEMORY_MIB = 3072  # of its whole process
GUIDED_CASE_S = 20


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
    fed = 0

    @settings(
        max_examples=n_cases,
        deadline=None,
        database=None if database is None else DirectoryBasedExampleDatabase(database),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases(parser))
    def one(data: bytes) -> None:
        nonlocal fed
        fed += 1
        feed(parser, data)

    one()
    return fed


@dataclass(frozen=True, slots=True)
class Guided:
    """What one run of atheris came to. finding: its output, where it found something."""

    executions: int
    cpu_s: float
    finding: str | None


def has_atheris() -> bool:
    """Whether it is installed; it has wheels for Linux and some versions of Python alone."""
    return importlib.util.find_spec("atheris") is not None


def feed_atheris(parser: Parser, folder: Path, executions: int, cpu_s: float, options: Sequence[str] = ()) -> Guided:
    """Fuzz in a process of its own. folder: gets `corpus`, which later runs go on with, and the inputs of findings."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(parser.seeds):
        (corpus / f"seed-{index}").write_bytes(seed)
    line = [
        *(sys.executable, "-m", "tests.fuzz.guided", parser.name, str(executions), str(cpu_s)),
        *(f"-artifact_prefix={folder}/", f"-max_len={GUIDED_BYTES_MAX}", f"-rss_limit_mb={GUIDED_MEMORY_MIB}"),
        *(f"-timeout={GUIDED_CASE_S}", "-verbosity=0", *options, str(corpus)),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        env = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(line, env=env, capture_output=True, text=True, errors="replace", check=False)
    if run.returncode != 0:
        return Guided(0, 0.0, (run.stdout + run.stderr)[-6000:])
    done = json.loads(run.stdout.splitlines()[-1])
    return Guided(done["executions"], done["cpu_s"], None)
