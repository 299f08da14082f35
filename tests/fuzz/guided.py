"""One parser under atheris, guided by coverage: `python -m tests.fuzz.guided PARSER EXECUTIONS SECONDS [OPTIONS]`.

OPTIONS are libFuzzer's. Ends after so many executions or seconds of CPU time, and then prints both as JSON. A finding ends it at once, with a
traceback and libFuzzer's exit code; its input lies where -artifact_prefix says.
"""

import json
import logging
import os
import sys
import time

import atheris
import structlog

with atheris.instrument_imports(include=["swarm", "base58", "noise"]):
    from tests.fuzz.parsers import PARSERS

LOOK_EVERY = 64  # executions


def main() -> None:
    """Fuzz one parser."""
    name, executions_max, seconds_max, *options = sys.argv[1:]
    parser = PARSERS[name]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    began, executions = time.process_time(), 0

    def one(data: bytes) -> None:
        nonlocal executions
        executions += 1
        parser.check(data)
        if executions % LOOK_EVERY == 0 or executions >= int(executions_max):
            took_s = time.process_time() - began
            if executions >= int(executions_max) or took_s >= float(seconds_max):
                print(json.dumps({"parser": name, "executions": executions, "cpu_s": round(took_s, 1)}), flush=True)
                os._exit(0)  # libFuzzer has no other way to stop from within

    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
