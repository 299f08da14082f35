"""How many Python calls one warm decode step takes: a client and one hop of 12 blocks in one process, over loopback.

    python benchmarks/trace_step.py [--check MAX] [--calls PATH] [--json PATH]

`sys.setprofile` counts in every thread the calls of functions that stand in the product's files. Comprehensions, the
methods that dataclasses generate and other libraries' functions do not count. No other load changes the counts.
"""

import argparse
import gc
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import SEED, decoder_step, table, tiny_llama, write_json

from swarm.client.hf.runtime import LoopThread
from tests.support.inprocess import inprocess

BLOCKS = 12
PROMPT_TOKENS = 16
WARM_UP = 20
STEPS = 9  # traced, each alone; the median one is reported
TOP = 25  # functions in the table
THREADS = ("caller", "client loop", "server loop", "compute")
SETTLE_S = 0.05  # after a step: what the threads still do for it counts as well

Call = tuple[str, str]  # thread, function


class Tracer:
    """Counts the calls of the product's functions by thread while it is on.

    It must be made before the threads that it is to see.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, str]] = []
        self._on = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def on(self) -> Iterator[list[tuple[int, str]]]:
        """Count in this block. Gives the calls in order: the thread's number, and the function."""
        self._calls = calls = []
        self._on = True
        try:
            yield calls
        finally:
            self._on = False

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self._on or event != "call" or code.co_name.startswith("<") or code.co_filename == "<string>":
            return
        module = frame.f_globals.get("__name__", "")
        if module.startswith("swarm."):
            function = f"{module.removeprefix('swarm.')}:{code.co_qualname}"
            self._calls.append((threading.get_ident(), function))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", type=int, metavar="MAX", help="fail where a step takes more calls than this")
    arguments.add_argument("--calls", type=Path, help="where every call goes, in order, a line each")
    arguments.add_argument("--json", type=Path, help="where the result goes")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    tracer = Tracer()
    steps = traced_steps(tracer, options.seed)
    step = sorted(steps, key=len)[len(steps) // 2]
    report(step)
    if options.calls is not None:
        options.calls.write_text("".join(f"{thread}\t{function}\n" for thread, function in step))
    by_thread = dict(Counter(thread for thread, _ in step))
    functions = dict(Counter(function for _, function in step).most_common())
    figures = {"calls": len(step), "by_thread": by_thread, "functions": functions}
    write_json(options.json, "trace_step", options.seed, [], **figures, all_steps=[len(each) for each in steps])
    if options.check is not None and len(step) > options.check:
        print(f"{len(step)} calls, at most {options.check} are allowed", file=sys.stderr)
        return 1
    return 0


def traced_steps(tracer: Tracer, seed: int) -> list[list[Call]]:
    """Return the calls of some decode steps, each with the name of its thread."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder, torch.inference_mode():
        tiny_llama(Path(folder), BLOCKS, seed)
        with inprocess(Path(folder), f"0:{BLOCKS}") as swarm, swarm.client() as model:
            step = decoder_step(model, model.new_cache(), torch.randint(2, 128, (1, PROMPT_TOKENS)))
            for _ in range(WARM_UP):
                step()
            names = thread_names(swarm.loop)
            steps = []
            gc.disable()
            for _ in range(STEPS):
                with tracer.on() as calls:
                    step()
                    time.sleep(SETTLE_S)
                steps.append([(names.get(thread, "client loop"), function) for thread, function in calls])
            gc.enable()
    return steps


def thread_names(server: LoopThread) -> dict[int, str]:
    """Name the threads but the client's loop."""

    async def ident() -> int:
        return threading.get_ident()

    compute = {thread.ident: "compute" for thread in threading.enumerate() if thread.name == "compute"}
    return {threading.get_ident(): "caller", server.run(ident()): "server loop", **compute}


def report(step: Sequence[Call]) -> None:
    """Print who calls how much."""
    rows = []
    for thread in THREADS:
        functions = [function for where, function in step if where == thread]
        rows.append([thread, str(len(functions)), str(len(set(functions)))])
    rows.append(["all", str(len(step)), str(len({function for _, function in step}))])
    table("calls of one decode step", ("", "calls", "functions"), rows)
    counted = Counter(step).most_common(TOP)
    table("called most", ("", "thread", "calls"), [[name, thread, str(n)] for (thread, name), n in counted])


if __name__ == "__main__":
    sys.exit(main())
