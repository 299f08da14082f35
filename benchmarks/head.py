"""The client's head in 8 bits against the exact one: the same tokens on a model's hidden states, and the speed.

    python benchmarks/head.py [--model DIRECTORY] [--states 10000] [--vocabulary 131072] [--width 4096] [--check]

The same tokens: a model reads Python's standard library, and its hidden states go through both heads. Greedy tokens,
and draws with a seed for each state, are compared. `decided` is the share that 8 bits proved; the exact head would
compute the others. `rows` is the median of the rows that were computed exactly for one token.

Speed: a random bfloat16 head of the contract's size, and hidden states of which each points at a token as a model's do.
The exact head and bounds take turns. A token that bounds do not decide costs both. `--check` exits with 1 if a token
differs, or if bounds are not `--speed-up` times as fast as the exact head. `--states 0` measures speed alone, and
`--count 0` tokens alone.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import SEED, Samples, interleaved, table, write_json
from quantised import DEMO, WINDOW, held_out
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.client.hf.choice import Chosen, Rule, choose, rule_of
from swarm.model.bounded import BoundedHead

WAYS: dict[str, tuple[bool, list[LogitsProcessor]]] = {
    "greedy": (False, []),
    "temperature 1": (True, []),
    "temperature 0.7, top-k 50": (True, [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50)]),
    "top-k 50, top-p 0.9": (True, [TopKLogitsWarper(50), TopPLogitsWarper(0.9)]),
}
IDS = torch.zeros(1, 1, dtype=torch.int64)  # no rule here looks at the text


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=DEMO, help="a checkpoint that reads text")
    arguments.add_argument("--states", type=int, default=10_000, help="hidden states that go through both heads")
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments.add_argument("--vocabulary", type=int, default=1 << 17)
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--count", type=int, default=50, help="samples of each head's speed")
    arguments.add_argument("--speed-up", type=float, default=3.0, help="that --check asks for; 0 for none")
    arguments.add_argument("--quick", action="store_true", help="little of everything, to see that it works")
    arguments.add_argument(
        "--check", action="store_true", help="exit with 1 if a token differs, or the speed is missed"
    )
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    if options.quick:
        options.states, options.vocabulary, options.width, options.count = 20, 4096, 256, 2
    dtype = getattr(torch, options.dtype)
    samples, speed_up, is_same = list[Samples](), float("inf"), True
    columns, rows = list[str](), list[Sequence[Any]]()
    with torch.no_grad():
        if options.count:
            columns, rows, samples, speed_up = speed_of(options.vocabulary, options.width, dtype, options.count)
        if options.states:
            compared = tokens_of(options.model, dtype, options.states)
            is_same = compared[2]
            if not options.count:  # a file has the table of one thing
                columns, rows, _ = compared
    write_json(options.json, "head", SEED, samples, columns=columns, rows=rows, threads=torch.get_num_threads())
    if options.check and not is_same:
        sys.exit("a token is another one than the exact head's")
    if options.check and not options.quick and speed_up < options.speed_up:
        sys.exit(f"bounds are {speed_up:.2f} times as fast as the exact head, not {options.speed_up}")


def tokens_of(model: Path, dtype: torch.dtype, count: int) -> tuple[list[str], list[Sequence[Any]], bool]:
    """Compare tokens. Returns a table's columns and rows, and whether all tokens are the same."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    weight = loaded.lm_head.weight
    head = BoundedHead(weight)
    found: dict[str, list[tuple[Chosen, int]]] = {name: [] for name in WAYS}
    for seed, hidden in enumerate(states_of(loaded, model, count)):
        logits = linear(hidden[None], weight)[:, -1].float()
        for name, (is_drawn, processors) in WAYS.items():
            scores = LogitsProcessorList(processors)(IDS, logits.clone())
            rule = rule_of(processors, is_drawn=is_drawn)
            assert rule is not None
            found[name].append((chosen_by(head, hidden, rule, seed), exact_by(scores, is_drawn=is_drawn, seed=seed)))
    rows = list[Sequence[Any]]()
    is_same = True
    for name, pairs in found.items():
        decided = [(chosen, exact) for chosen, exact in pairs if chosen.token is not None]
        equal = sum(chosen.token == exact for chosen, exact in decided)
        is_same &= equal == len(decided)
        middle = statistics.median(chosen.rows for chosen, _ in decided) if decided else 0
        share = f"{len(decided) / len(pairs):.4f}"
        rows.append((name, f"{len(pairs):,}", f"{len(decided) - equal}", share, f"{middle:g}"))
    columns = ["tokens", "states", "different", "decided", "rows"]
    table(f"hidden states of {model.name}", columns, rows)
    return columns, rows, is_same


def states_of(loaded: PreTrainedModel, model: Path, count: int) -> Iterator[Tensor]:
    """Yield what the model's head gets behind the tokens of held-out text, [1, hidden_size] each."""
    decoder: Any = loaded.get_decoder()
    for window in held_out(model, -(-count // WINDOW)):
        tokens = min(WINDOW, count)
        yield from decoder(window[None, :tokens]).last_hidden_state[0].split(1)
        count -= tokens


def chosen_by(head: BoundedHead, hidden: Tensor, rule: Rule, seed: int) -> Chosen:
    """Choose by bounds."""
    noise = None
    if rule.is_drawn:
        drawn = torch.Generator().manual_seed(seed)
        noise = torch.empty(1, len(head.weight)).exponential_(1, generator=drawn)[0]
    return choose(head, hidden, IDS, rule, noise)


def exact_by(scores: Tensor, *, is_drawn: bool, seed: int) -> int:
    """Choose as `generate()` does."""
    if not is_drawn:
        return int(scores.argmax())
    return int(torch.multinomial(scores.softmax(-1), 1, generator=torch.Generator().manual_seed(seed)))


def speed_of(
    vocabulary: int, width: int, dtype: torch.dtype, count: int
) -> tuple[list[str], list[Sequence[Any]], list[Samples], float]:
    """Time both heads. Returns a table's columns and rows, samples, and how many times as fast bounds are if greedy."""
    rng = torch.Generator().manual_seed(SEED)
    weight = torch.empty(vocabulary, width, dtype=dtype)
    for part in weight.split(1024):
        part.copy_(torch.randn(part.shape, generator=rng) / width**0.5)
    head = BoundedHead(weight)
    liked = weight[torch.randint(vocabulary, (64,), generator=rng)].float()
    hidden = (torch.randn(64, width, generator=rng) + 10 * liked).to(dtype).split(1)
    greedy, drawn = Rule(), rule_of(WAYS["top-k 50, top-p 0.9"][1], is_drawn=True)
    assert drawn is not None
    turn = {name: iter(range(10**9)) for name in ("exact", "bounds", "drawn")}

    def exact() -> None:
        linear(hidden[next(turn["exact"]) % 64][None], weight)[:, -1].float().argmax()

    def bounds() -> None:
        if choose(head, hidden[next(turn["bounds"]) % 64], IDS, greedy).token is None:
            exact()

    def sampled() -> None:
        if chosen_by(head, hidden[(at := next(turn["drawn"])) % 64], drawn, at).token is None:
            exact()

    works = {"exact": exact, "bounds, greedy": bounds, "bounds, top-k 50, top-p 0.9": sampled}
    interleaved(1, works)  # warms up
    timed = interleaved(count, works)
    base = timed["exact"].median
    size = {"exact": weight.nbytes}
    rows: list[Sequence[Any]] = [
        (name, f"{each.median:.2f}", f"{base / each.median:.2f}", f"{size.get(name, head.n_bytes) / 1e6:,.0f}")
        for name, each in timed.items()
    ]
    columns = ["head", "median, ms", "times as fast", "MB"]
    title = f"{vocabulary:,} tokens of width {width:,}, {dtype}; int8 made in {head.prepared_s:.1f} s"
    table(title, columns, rows)
    return columns, rows, list(timed.values()), base / timed["bounds, greedy"].median


if __name__ == "__main__":
    main()
