"""How many audits of a server pass until an auditor of the swarm finds that it lies, and whether it blames any other.

    python benchmarks/patrol.py [--runs 10] [--classes float32 bfloat16] [--lies ...] [--json FILE] [--check] [--quick]

A swarm of five honest servers and a lying one runs in this process, with real sockets and compute threads, and
`swarm-health --audit`'s auditor audits it. A run ends when the liar is found, or after 50 audits of it; the next run
begins with an auditor that knows nothing. The lies are those of tests/support/lying_server.py.

If FILE exists, its runs are added up: run it as often as there is time.
"""

import argparse
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import structlog
import torch
from common import SEED, table, write_json
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swarm.client.auditing.docket import Findings
from swarm.client.auditing.passages import Passages
from swarm.client.auditing.patrol import Patrol
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import joined
from swarm.dht.directory import Directory
from swarm.identity import Identity
from swarm.model.loading import load_ends
from swarm.model.span import Span
from swarm.model.tokens import TokenEnds
from swarm.protocol.messages import POSITIONS_MAX
from tests.support.inprocess import NETWORK, InProcessSwarm, inprocess
from tests.support.lying_server import LIES
from tests.support.swarms import DEMO_CHECKPOINT

HONEST = ("0:6", "0:6", "0:6", "6:12", "6:12")
AUDITS_MAX = 50
COLUMNS = ("class", "lie", "runs", "found", "audits of it, median", "most", "audits of honest ones", "taken for wrong")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=10, help="of each lie")
    arguments.add_argument("--classes", nargs="*", default=["float32", "bfloat16"])
    arguments.add_argument("--lies", nargs="*", choices=LIES, default=list(LIES))
    arguments.add_argument("--check", action="store_true", help="exit with 1 where an honest one was taken for wrong")
    arguments.add_argument("--quick", action="store_true", help="one run of one lie")
    arguments.add_argument("--json", type=Path, help="where the figures go, and are added up")
    options = arguments.parse_args()
    if options.quick:
        options.runs, options.classes, options.lies = 1, ["float32"], ["left out"]
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    raw: dict[str, list[list[int]]] = before.get("raw", {})
    rows: list[list[Any]] = []
    for dtype in options.classes:
        for lie in options.lies:
            if (dtype, lie) == ("bfloat16", "1 of 100"):
                continue  # within the noise of that class
            past = raw.setdefault(f"{dtype}, {lie}", [])
            past += runs_of(dtype, lie, options.runs, Random(f"{SEED} {len(past)}"))
            rows = [row_of(name, runs) for name, runs in raw.items() if runs]
            if options.json is not None:  # now already: a run that is stopped keeps its figures
                write_json(options.json, "patrol", SEED, [], columns=COLUMNS, rows=rows, raw=raw)
    table("lying servers", COLUMNS, [tuple(map(str, row)) for row in rows])
    if options.json is None:
        write_json(None, "patrol", SEED, [], columns=COLUMNS, rows=rows, raw=raw)
    if options.check and any(row[-1] for row in rows):
        sys.exit("an honest server was taken for wrong")


def runs_of(dtype: str, lie: str, runs: int, draws: Random) -> list[list[int]]:
    """Return of each run: audits of the liar until it was found, or 0; audits of honest ones; those taken for wrong."""
    found = []
    with swarm_of(dtype, lie) as (swarm, liar):
        checkpoint = swarm.checkpoint
        ends = TokenEnds(load_ends(checkpoint, dtype=swarm.dtype), checkpoint.traits)
        passages = Passages(tokenizer_of(checkpoint.model), ends.vocabulary, draws)
        wanted = Wanted(checkpoint.root, "demo", checkpoint.n_blocks, None)
        for _ in range(runs):
            text = partial(_text, ends, passages)
            patrol = Patrol(wanted, text, checkpoint.traits.positions_max or POSITIONS_MAX, draws=draws)
            found.append(run_of(swarm, patrol, liar))
            print(f"{dtype}, {lie}: {found[-1]}", flush=True)
    return found


def _text(ends: TokenEnds, passages: Passages, positions: int) -> torch.Tensor:
    return ends.embed(torch.tensor([passages.ids(positions)]), 0)


def run_of(swarm: InProcessSwarm, patrol: Patrol, liar: str) -> list[int]:
    """Audit until the liar is found."""
    of_liar, of_honest, wrong = 0, 0, set[str]()
    while of_liar < AUDITS_MAX and liar not in wrong:
        findings = audit(swarm, patrol, wrong)
        seen = findings.agreed | findings.doubted | findings.wrong
        of_liar += liar in seen
        of_honest += len(seen - {liar})
        wrong |= findings.wrong
    return [of_liar if liar in wrong else 0, of_honest, len(wrong - {liar})]


def audit(swarm: InProcessSwarm, patrol: Patrol, left_out: set[str]) -> Findings:
    """Audit once, as a new client."""
    servers = [server.me.identity.peer_id for server in swarm.servers]

    @asynccontextmanager
    async def join() -> AsyncIterator[Directory]:
        yield swarm.directory()

    async def once() -> Findings:
        async with joined(join, Identity.generate(), network=NETWORK) as member:
            return await patrol.audit(member, servers, left_out)

    return swarm.loop.run(once())


@contextmanager
def swarm_of(dtype: str, lie: str) -> Iterator[tuple[InProcessSwarm, str]]:
    """Run a swarm with a liar, whose peer id comes with it."""
    with inprocess(DEMO_CHECKPOINT, *HONEST, dtype=torch.__dict__[dtype]) as swarm:

        def changed(span: Span) -> None:
            with torch.no_grad():
                LIES[lie](span)

        yield swarm, swarm.serve("6:12", lie=changed).me.identity.peer_id


def tokenizer_of(model: str) -> Callable[[str], list[int]]:
    """Return what makes token ids of a text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def row_of(name: str, runs: list[list[int]]) -> list[Any]:
    """Return the table's row."""
    audits = [run[0] for run in runs if run[0]]
    dtype, _, lie = name.partition(", ")
    most = max(audits, default=0)
    honest, wrong = (sum(run[at] for run in runs) for at in (1, 2))
    return [dtype, lie, len(runs), len(audits), median(audits) if audits else None, most, honest, wrong]


if __name__ == "__main__":
    main()
