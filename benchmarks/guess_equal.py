"""Texts with guesses ahead against those of the whole model on this machine: the same tokens, and the same generator.

    python benchmarks/guess_equal.py [--prompts 200] [--real] [--delay-ms 0] [--minutes M] [--check] [--json PATH]

Three servers hold the demo's checkpoint, or the real model (`make real-model`), in float32. Prompts of 64 to 128 tokens
of Python's standard library come alone, and a fifth as many in batches of 2 and of 8 rows. Each batch is continued
greedily and with a seed (temperature 0.8, top-p 0.9); in turns as that is, with a repetition penalty, and with stop
strings.

Guesses are always on. In turns they come from an oracle, which is right in 0.75 of them and goes on behind the end of
the text, and from a draft as users have it: the demo's own head, or look-up for the real model. `generate()` guesses
for one row alone: batches of several rows show that they do not notice.

A text that differs is generated once more without guesses, to tell these from the route. `--check` exits with 1 if a
token or the generator's state differs, or if no guess was right.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import SEED, Samples, table, write_json
from draft import DRAFT
from guess_texts import WAYS, Text, Texts, differing
from speculation import REAL, Oracle, Silent, ring
from transformers import logging as transformers_logging

from swarm.client import AutoDistributedModel
from swarm.client.hf.lead import Drafting
from swarm.client.hf.model import DistributedModel
from swarm.demo.cli import CHECKPOINT
from swarm.errors import SwarmError

ROWS = (1, 2, 8)
KINDS = ("", ", penalty", ", stop strings")
LENGTHS = (64, 128)  # of prompts, in tokens
FEWER = 5  # times, prompts in batches of several rows: those are not guessed
RIGHT = 0.75
PAUSED_S = 3600.0  # a machine may stop this for a while
BEYOND = 16  # tokens that the oracle guesses behind the text's end


@dataclass(slots=True)
class Tally:
    """The texts of one way and number of rows. right, wrong: guesses, of those that were compared."""

    prompts: int = 0
    tokens: int = 0
    differing: int = 0
    other_state: int = 0
    right: int = 0
    wrong: int = 0


Found = dict[tuple[int, str], Tally]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--prompts", type=int, default=200, help="of one row, greedy and seeded each")
    arguments.add_argument("--tokens", type=int, default=32, help="behind each prompt")
    arguments.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    arguments.add_argument("--minutes", type=float, default=600.0, help="begin no batch after so long")
    arguments.add_argument("--real", action="store_true", help="the real model in the place of the demo's")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless all is the same")
    arguments.add_argument("--quick", action="store_true", help="a few prompts, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.prompts, options.tokens = 8, 16
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    checkpoint = REAL if options.real else CHECKPOINT
    found: Found = {}
    failed: list[str] = []
    times = Samples("text")
    texts = Texts(checkpoint)
    with ring(checkpoint, options.delay_ms) as swarm:
        join = {"initial_peers": swarm.initial_peers, "network": swarm.network, "dtype": torch.float32, "audit": 0.0}
        draft = "lookup" if options.real else DRAFT
        with AutoDistributedModel.from_pretrained(checkpoint, draft=draft, step_timeout_s=PAUSED_S, **join) as model:
            model.generation_config.eos_token_id = None
            compare(model, texts, options, found, failed, times)
    rows = [[checkpoint.name, *row] for row in rows_of(found)]
    columns = ["model", "rows", "tokens by", "prompts", "tokens", "differing", "other generator", "guesses right"]
    title = f"{options.tokens} tokens behind each prompt, at most"
    table(title, columns, [[str(each) for each in row] for row in rows])
    write_json(options.json, "guess_equal", options.seed, [times], columns=columns, rows=rows, failed=failed)
    for each in failed:
        print(f"not kept: {each}")
    if options.check and (failed or not any(each.right for each in found.values())):
        sys.exit(1)


def compare(
    model: DistributedModel,
    texts: Texts,
    options: argparse.Namespace,
    found: Found,
    failed: list[str],
    times: Samples,
) -> None:
    """Continue all batches in turns of rows, so that an early end leaves some of each."""
    users = model._drafts.drafting
    assert users is not None
    users = replace(users, always=True)
    counts = {rows: options.prompts if rows == 1 else -(-options.prompts // FEWER // rows) for rows in ROWS}
    batches = {rows: texts.prompts(counts[rows], LENGTHS, rows, options.seed + rows) for rows in ROWS}
    turns = sorted((number / counts[rows], rows, number) for rows in ROWS for number in range(counts[rows]))
    began = time.monotonic()
    for _, rows, number in turns:
        if time.monotonic() - began > 60 * options.minutes:
            return
        prompt, seed = batches[rows][number], options.seed + 1000 * rows + number
        for drawn in ("greedy", "seeded"):
            way = drawn + KINDS[number // 2 % len(KINDS)]
            expected = texts.written(texts.whole, prompt, way, options.tokens, seed)
            model._drafts.drafting = users if number % 2 else oracle(expected.rows[0], seed)
            started = time.perf_counter()
            try:
                made = texts.written(model, prompt, way, options.tokens, seed)
            except SwarmError as error:
                failed.append(f"{rows} rows, {way}, prompt {number}: {type(error).__name__}: {error}")
                continue
            times.ms.append(1000 * (time.perf_counter() - started))
            note(found.setdefault((rows, way), Tally()), made, expected, model)
            if (wrong := differing(made, expected)) or made.state != expected.state:
                model._drafts.drafting = None
                plain = texts.written(model, prompt, way, options.tokens, seed)
                also = "" if differing(plain, expected) else "not "
                failed.append(f"{rows} rows, {way}, prompt {number}: {wrong} tokens; {also}without guesses")
        if number % 20 == 0:
            print(f"{number * rows} prompts of {rows} rows, {len(failed)} differ", file=sys.stderr, flush=True)


def oracle(text: Sequence[int], seed: int) -> Drafting:
    """Return what guesses by a known text, and goes on behind its end."""
    beyond = Random(seed).choices(range(3, 400), k=BEYOND)
    return Drafting(Silent, always=True, slow=lambda _: Oracle([*text, *beyond], RIGHT, seed, guess_s=0.0))


def note(tally: Tally, made: Text, expected: Text, model: DistributedModel) -> None:
    """Count one batch."""
    tally.prompts += len(expected.rows)
    tally.tokens += sum(len(row) - expected.prompt.shape[1] for row in expected.rows)
    tally.differing += differing(made, expected)
    tally.other_state += made.state != expected.state
    counts = model.last_speculation
    if counts is not None:
        tally.right += counts.right
        tally.wrong += counts.wrong


def rows_of(found: Found) -> list[list[Any]]:
    """Return the table's rows, in the order of rows and ways."""
    order = [(rows, way) for rows in ROWS for way in WAYS if (rows, way) in found]
    made = []
    for rows, way in order:
        tally = found[rows, way]
        right = f"{tally.right} of {tally.right + tally.wrong}" if tally.right + tally.wrong else ""
        made.append([rows, way, tally.prompts, tally.tokens, tally.differing, tally.other_state, right])
    return made


if __name__ == "__main__":
    main()
