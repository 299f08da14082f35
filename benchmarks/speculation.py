"""Guesses ahead over a wide-area ring: tokens per second with and without, and whether they are the same tokens.

    python benchmarks/speculation.py [--delays 0,25,100] [--tokens 96] [--real] [--check] [--quick] [--json PATH]

Three servers of the demo's checkpoint, or of the real model (`make real-model`), with a delay on every edge of the
ring, as in benchmarks/wan.py. Texts: "edit" is a file that is written again with one change. No small model edits well,
so a logits processor chooses its tokens: what is measured is how fast a known text comes. "new" is what the model
writes behind the beginning of a function, of which look-up knows nothing at first.

    plain      no guesses                          look-up    draft="lookup"
    stock      prompt look-up by `transformers`    silent     a look-up that finds nothing
    one, K     one window of K guesses at a time   ahead      windows in flight
    never      ahead, and no guess is right

"one" and "ahead" guess by a noisy copy of the model, whose noise is such that it is right in a set share of its
guesses on the very text. "blind" guesses by an oracle: it knows the text, and replaces a set share of its tokens, drawn
ones, by wrong ones. It is no surer of a right guess than of a wrong one. "never" is always wrong. Guesses are made
beforehand, and each takes 2 ms of sleep, as on hardware of its own; of a "slow" draft 15 ms. "busy" is ahead as where a
hop announces others' steps, with guesses that are less often right. The first run of each way is not counted: it makes
connections, and shows how right a draft is, as a text before would.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from common import SEED, Samples, table, write_json
from noisy import Copies, Played
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.client import AutoDistributedModel
from swarm.client.hf import model as client
from swarm.client.hf.lead import Drafting
from swarm.client.hf.model import DistributedModel
from swarm.client.speculation.drafts import Draft, Guess, Lookup
from swarm.client.speculation.limits import AheadLimits
from swarm.config import CACHE_DIR
from swarm.demo.cli import CHECKPOINT
from swarm.demo.distance import far_apart
from swarm.demo.local import LocalSwarm
from swarm.model.checkpoint import open_checkpoint

REAL = CACHE_DIR / "real-model" / "SmolLM2-135M-Instruct"
DRAFT_S = 0.002
SLOW_DRAFT_S = 0.015  # a model of a billion parameters on a processor
WINDOWS = (4, 8, 12, 16)
RIGHT = (0.75, 0.88)
RIGHT_FOR_COST = 0.7  # the draft of which the cost for servers is bounded
HOPS = 3
FILE = '''def load(path, default=None):
    """Read a file as JSON. Return the default if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return default


def save(path, value):
    """Write a value as JSON, and replace the file only when all is written."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(value, file, indent=4)
        file.write("\\n")
    os.replace(file.name, path)


'''
EDITED = FILE.replace("json.load(file)", "tomllib.load(file)")
NEW = 'def walk(top, topdown=True, onerror=None):\n    """Directory tree generator.'
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
WARPERS = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.9)]  # the same, with the default k
GREEDY = {"do_sample": False}


@dataclass(slots=True)
class Way:
    """One way to generate, and its runs: tokens per second behind the first token, and all tokens."""

    name: str
    drafting: Drafting | None = None
    limits: AheadLimits = field(default_factory=AheadLimits)
    stock: bool = False
    speeds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    right: str = ""
    trip: str = ""
    computed: str = ""

    @property
    def speed(self) -> float:
        """The median."""
        return median(self.speeds)


class Oracle(Played):
    """Knows the text, and is as right as it is told."""

    def __init__(self, text: Sequence[int], right: float, seed: int, guess_s: float = DRAFT_S, new: int = 0) -> None:
        """guess_s: that it sleeps. new: the last tokens of the text, of which so many are right; 0 for all."""
        among = range(len(text) - (new or len(text)), len(text))
        wrong = set(Random(seed).sample(among, round(len(among) * (1 - right))))
        super().__init__([Guess((n + 7) % 500 if at in wrong else n, 0) for at, n in enumerate(text)], guess_s)


class Scripted(LogitsProcessor):
    """Leaves no choice but a given text."""

    def __init__(self, n_prompt: int, tokens: Sequence[int]) -> None:
        self._n_prompt = n_prompt
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the token behind so many."""
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._tokens[input_ids.shape[1] - self._n_prompt]] = 0.0
        return chosen


class Silent:
    """Finds nothing."""

    def propose(self, text: Sequence[int], guesses: Sequence[int], count: int) -> list[Guess]:
        """As `Draft.propose`."""
        del text, guesses, count
        return []


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--delays", default="0,25,100", help="milliseconds one way, each a ring of its own")
    arguments.add_argument("--tokens", type=int, default=96, help="of each text")
    arguments.add_argument("--rounds", type=int, default=3, help="of all ways in turn; the median counts")
    arguments.add_argument("--real", action="store_true", help="the real model in the place of the demo's")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    delays = [float(each) for each in options.delays.split(",")]
    if options.quick:
        delays, options.tokens, options.rounds = [5.0], 16, 1
    torch.set_num_threads(1)
    checkpoint = REAL if options.real else CHECKPOINT
    rows: list[list[Any]] = []
    samples: list[Samples] = []
    failed: list[str] = []
    for delay_ms in delays:
        with ring(checkpoint, delay_ms) as swarm:
            for text, sampling, ways in measured(checkpoint, swarm, options):
                where = f"{delay_ms:g} ms, {text}, {sampling}"
                rows += [[delay_ms, text, sampling, *row] for row in rows_of(ways)]
                samples += [Samples(f"{where}, {way.name}", [1000 / each for each in way.speeds]) for way in ways]
                failed += [f"{where}: {each}" for each in broken(ways, delay_ms)]
                speeds = ", ".join(f"{way.name} {way.speed:.1f}" for way in ways)
                print(f"{where}: {speeds}", file=sys.stderr, flush=True)
    columns = ["ms one way", "text", "sampling", "guesses", "tokens/s", "of plain", "right", "tokens a trip",
               "computed per kept", "same"]  # fmt: skip
    title = f"{checkpoint.name}, {options.tokens} tokens, medians of {options.rounds}"
    table(title, columns, [[str(each) for each in row] for row in rows])
    write_json(options.json, "speculation", options.seed, samples, columns=columns, rows=rows, failed=failed)
    for each in failed:
        print(f"not kept: {each}")
    if options.check and failed:
        sys.exit(1)


@contextmanager
def ring(checkpoint: Path, delay_ms: float) -> Iterator[LocalSwarm]:
    """Start three servers, and proxies in front of them."""
    blocks = open_checkpoint(checkpoint).n_blocks
    cuts = [round(blocks * n / HOPS) for n in range(HOPS + 1)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        spans = [f"{start}:{stop}" for start, stop in pairwise(cuts)]
        swarm = stack.enter_context(LocalSwarm(checkpoint, log_level="warning"))
        yield stack.enter_context(far_apart(swarm, spans, delay_ms, folder / "late.json", ("--dtype", "float32")))


def measured(checkpoint: Path, swarm: LocalSwarm, options: argparse.Namespace) -> Iterator[tuple[str, str, list[Way]]]:
    """Generate each text in each way, in turns."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    join = {"initial_peers": swarm.initial_peers, "network": swarm.network, "dtype": torch.float32}
    with AutoDistributedModel.from_pretrained(checkpoint, draft="none", **join) as model:
        model.generation_config.eos_token_id = None  # every text is as long
        new, old = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (NEW, FILE))
        edited = tokenizer(EDITED)["input_ids"]
        options.tokens = min(options.tokens, len(edited))
        copies = Copies(checkpoint, options.seed)
        edit = {**GREEDY, "logits_processor": LogitsProcessorList([Scripted(old.shape[1], edited)])}
        for text, ids, hows in (("edit", old, {"greedy": edit}), ("new", new, {"greedy": GREEDY, "seeded": SAMPLED})):
            for sampling, how in hows.items():
                plain = Way("plain")
                once(model, plain, ids, how, options)  # warms up, and tells the oracles
                ways = [plain, *ways_of(plain.tokens[0], copies if text == "new" else None, sampling, options)]
                for turn in range(1 + options.rounds):
                    for way in ways:
                        if turn == 1:
                            way.speeds.clear()
                        once(model, way, ids, how, options)
                yield text, sampling, ways


def ways_of(tokens: list[int], copies: Copies | None, sampling: str, options: argparse.Namespace) -> list[Way]:
    """Return the ways in which a text is generated beside the plain one. copies: None for a text that is edited."""
    lookup = Way("look-up", Drafting(Lookup))
    if copies is None:
        return [lookup, Way("stock", stock=True)]
    found = [lookup, Way("silent", Drafting(Silent))]
    warpers = LogitsProcessorList(WARPERS) if sampling == "seeded" else None
    guesses = {each: copies.guesses(tokens, options.tokens, each, warpers) for each in (*RIGHT, RIGHT_FOR_COST)}
    for right in RIGHT:
        found += _both(f"{right}", partial(Played, guesses[right], DRAFT_S))
        found.append(Way(f"blind, {right}", _ahead(_oracle(tokens, right, options))))
    found += _both(f"{RIGHT[-1]}, slow", partial(Played, guesses[RIGHT[-1]], SLOW_DRAFT_S))
    busy = AheadLimits(cut_off=0.1)
    found.append(Way(f"busy, {RIGHT_FOR_COST}", _ahead(partial(Played, guesses[RIGHT_FOR_COST], DRAFT_S)), busy))
    return [*found, Way("never", _ahead(_oracle(tokens, 0.0, options)))]


def _both(name: str, make: Callable[[], Draft]) -> Iterator[Way]:
    """Yield the ways with one window of each size at a time, and the one with windows in flight."""
    for window in WINDOWS:
        one = AheadLimits(window, window, window, frames_max=1, cut_off=0.0, cut_off_busy=0.0)
        yield Way(f"one, {window}, {name}", Drafting(make), one)
    yield Way(f"ahead, {name}", _ahead(make))


def _oracle(tokens: list[int], right: float, options: argparse.Namespace) -> Callable[[], Draft]:
    return partial(Oracle, tokens, right, options.seed, new=options.tokens)


def _ahead(make: Callable[[], Draft]) -> Drafting:
    return Drafting(Silent, slow=lambda _: make())


def once(
    model: DistributedModel, way: Way, ids: torch.Tensor, how: dict[str, Any], options: argparse.Namespace
) -> None:
    """Generate in one way."""
    times: list[float] = []
    torch.manual_seed(options.seed)
    model._drafts.drafting = way.drafting
    how, processors = dict(how), how.get("logits_processor")
    how.pop("logits_processor", None)
    config = GenerationConfig(**{**model.generation_config.to_diff_dict(), **how, "max_new_tokens": options.tokens})
    if way.stock:
        config.prompt_lookup_num_tokens = 10  # in a config it is the stock method's
    generate: Any = model.generate
    with patch.object(client, "AHEAD", way.limits):
        tokens = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=processors,
            streamer=_Times(times),
        )
    way.tokens.append(tokens[0].tolist())
    way.speeds.append((options.tokens - 1) / (times[-1] - times[1]))
    counts = model.last_speculation
    if counts is not None and way.drafting is not None and counts.tokens:
        guessed = counts.right + counts.wrong
        way.right = f"{counts.right / guessed:.2f}" if guessed else ""
        way.trip = f"{counts.tokens_a_trip:.2f}"
        way.computed = f"{counts.computed / counts.tokens:.2f}"


def rows_of(ways: list[Way]) -> Iterator[list[Any]]:
    """Return the table's rows."""
    plain = ways[0]
    for way in ways:
        same = way.tokens[-1] == plain.tokens[0] if way is not plain else ""
        ratio = round(way.speed / plain.speed, 2)
        yield [way.name, round(way.speed, 1), ratio, way.right, way.trip, way.computed, same]


def broken(ways: list[Way], delay_ms: float) -> Iterator[str]:
    """Return the promises that were not kept."""
    by_name = {way.name: way for way in ways}
    plain = ways[0]
    for way in ways[1:]:
        # The stock method draws other random numbers.
        if not way.stock and any(tokens != plain.tokens[0] for tokens in way.tokens):
            yield f"{way.name}: other tokens than plain"
    for name, ratio in _least("stock" in by_name, delay_ms).items():
        if name in by_name and by_name[name].speed < ratio * plain.speed:
            yield f"{name}: {by_name[name].speed / plain.speed:.2f} times plain, and not {ratio}"
    if delay_ms >= 25 and "stock" not in by_name:
        yield from _not_worth_it(by_name)


def _least(is_edit: bool, delay_ms: float) -> dict[str, float]:
    """Return how many times as fast as plain each way is to be."""
    least = {"never": 0.95, "silent": 0.98}
    if delay_ms >= 25:
        least |= {"look-up": 5.0} if is_edit else {"ahead, 0.75": 3.0, "ahead, 0.88": 6.0}
    return least


def _not_worth_it(by_name: dict[str, Way]) -> Iterator[str]:
    """Compare windows in flight with the best single window."""
    for right, ratio in zip(RIGHT, (1.15, 1.3), strict=True):
        best = max(by_name[f"one, {window}, {right}"].speed for window in WINDOWS)
        ahead = by_name[f"ahead, {right}"]
        if ahead.speed < ratio * best:
            yield f"{ahead.name}: {ahead.speed / best:.2f} times the best single window, and not {ratio}"
    busy = by_name[f"busy, {RIGHT_FOR_COST}"]
    if float(busy.computed or 0) > 2.3:
        yield f"{busy.name}: {busy.computed} tokens computed per kept, and not 2.3"


class _Times:
    """A streamer that notes when tokens come; the first note is the prompt."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def put(self, _: torch.Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
