"""Parsers under atheris, guided by coverage: `python -m tests.fuzz.guided FOLDER EXECUTIONS SECONDS PARSER...`.

One after the other, each in a process of its own, which ends after so many executions or seconds of CPU time; then a
line of JSON is printed for it. A parser's folder gets its corpus, its log and the inputs of findings; and how far it
is, so that the next run goes on where one was interrupted.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["swarm", "base58", "noise"]):
    from tests.fuzz.parsers import PARSERS
    from tests.fuzz.parsers.base import Parser

LOOK_EVERY = 64  # executions
SAVE_EVERY_S = 10.0  # of CPU time
BYTES_MAX = 4096  # of one input
MEMORY_MIB = 3072  # of the process, which has torch
CASE_S = 20
# Real inputs stay in the corpus even where one of them covers no line more: pydantic's checks, in Rust, count for none.
OPTIONS = ("-keep_seed=1", f"-max_len={BYTES_MAX}", f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={CASE_S}")


def main() -> None:
    """Fuzz some parsers."""
    folder, executions, seconds, *names = sys.argv[1:]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    for name in names:
        place = Path(folder) / name
        (place / "corpus").mkdir(parents=True, exist_ok=True)
        (place / "done.json").unlink(missing_ok=True)
        child = os.fork()  # what was imported, and instrumented, is there already
        if child == 0:
            _fuzz(PARSERS[name], place, int(executions), float(seconds))
        os.waitpid(child, 0)
        done = place / "done.json"
        print(done.read_text() if done.exists() else json.dumps({"parser": name, "finding": True}), flush=True)


def _fuzz(parser: Parser, place: Path, executions_max: int, seconds_max: float) -> None:
    """Fuzz one parser until this process ends."""
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for index, seed in enumerate(parser.seeds):
        (place / "corpus" / f"seed-{index}").write_bytes(seed)
    interrupted = place / "interrupted.json"
    before = json.loads(interrupted.read_text()) if interrupted.exists() else {"executions": 0, "cpu_s": 0.0}
    executions, began = before["executions"], time.process_time() - before["cpu_s"]
    save_at = 0.0

    def one(data: bytes) -> None:
        nonlocal executions, save_at
        executions += 1
        parser.check(data)
        if executions % LOOK_EVERY == 0 or executions >= executions_max:
            took_s = time.process_time() - began
            over = executions >= executions_max or took_s >= seconds_max
            if over or took_s >= save_at:
                report = {"parser": parser.name, "executions": executions, "cpu_s": round(took_s, 1)}
                (place / "saved.json").write_text(json.dumps(report))
                (place / "saved.json").rename(interrupted)  # whole, or not at all
                save_at = took_s + SAVE_EVERY_S
            if over:
                interrupted.rename(place / "done.json")
                os._exit(0)  # libFuzzer has no other way to stop from within

    atheris.Setup([sys.argv[0], *OPTIONS, f"-artifact_prefix={place}/", str(place / "corpus")], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
