"""How often the demo's draft is right on code that neither it nor the checkpoint has read, and what that gains.

    python benchmarks/draft.py [--draft FOLDER] [--prompts 12] [--tokens 48] [--delay 25] [--check] [--quick] [--json P]

Prompts are the beginnings of functions of standard library modules that are held out (`swarm/demo/train.py`), of 64
tokens each. The checkpoint continues them greedily through three servers with a delay on every edge:

    plain      no guesses                          draft      draft=FOLDER, as users have it: look-up, too
    look-up    draft="lookup", the default         alone      the draft without look-up

"right" is what `model.last_speculation` counts: of the guesses that were sent and compared, those that became the text.
"by depth" is on the held-out text itself: how often the draft's likeliest token is the checkpoint's, behind so many
guesses.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from common import SEED, Samples, table, write_json
from speculation import Silent, Way, once, ring
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from swarm.client import AutoDistributedModel
from swarm.client.distilling.loss import foreseen
from swarm.client.distilling.run import Source
from swarm.client.distilling.texts import windows
from swarm.client.hf.model import DistributedModel
from swarm.demo.cli import CHECKPOINT
from swarm.demo.train import library_sources, split
from swarm.model.checkpoint import open_checkpoint
from swarm.model.draftfiles import load_draft_head

DRAFT = CHECKPOINT.parent / "draft"
PROMPT_TOKENS = 64
DEPTHS = 4
LEAST = {100.0: 2.5, 25.0: 2.0}  # times as fast as plain, on edges of so many milliseconds or more


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--draft", type=Path, default=DRAFT, help="a folder of swarm-draft")
    arguments.add_argument("--prompts", type=int, default=12, help="each is continued in all ways")
    arguments.add_argument("--tokens", type=int, default=48, help="behind each prompt")
    arguments.add_argument("--windows", type=int, default=128, help="of 256 tokens of held-out text, by depth")
    arguments.add_argument("--delay", type=float, default=25.0, help="milliseconds one way")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.windows = 2, 24, 4
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    _, texts = split(library_sources())
    depths = by_depth(options.draft, tokenizer, texts, windows_max=options.windows)
    ways = generated(options, prompts(tokenizer, texts, options.prompts, options.seed))
    plain = ways[0]
    rows = []
    for way, guesses in ways:
        ratio = median(fast / slow for fast, slow in zip(way.speeds, plain[0].speeds, strict=True))
        right, sent, tokens, trips = guesses
        share = f"{right / sent:.3f}" if sent else ""
        trip = round(tokens / trips, 2) if trips else ""
        same = way.tokens == plain[0].tokens
        rows.append([way.name, round(median(way.speeds), 1), round(ratio, 2), share, trip, same])
    columns = ["guesses", "tokens/s", "of plain", "right", "tokens a trip", "same"]
    title = f"{options.prompts} prompts of code held out, {options.tokens} tokens each, {options.delay:g} ms one way"
    table(title, columns, [[str(each) for each in row] for row in rows])
    print(f"by depth: {', '.join(f'{each:.3f}' for each in depths)}")
    samples = [Samples(way.name, [1000 / each for each in way.speeds]) for way, _ in ways]
    failed = broken(rows, options.delay)
    write_json(options.json, "draft", options.seed, samples, columns=columns, rows=rows, by_depth=depths, failed=failed)
    for each in failed:
        print(f"not kept: {each}")
    if options.check and failed:
        sys.exit(1)


def prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int, seed: int) -> list[torch.Tensor]:
    """Return beginnings of functions, int64 [1, PROMPT_TOKENS] each."""
    found = [f"def {part}" for text in texts for part in text.split("\ndef ")[1:]]
    Random(seed).shuffle(found)
    ids = (tokenizer(text, return_tensors="pt")["input_ids"][:, :PROMPT_TOKENS] for text in found)
    return [each for each in ids if each.shape[1] == PROMPT_TOKENS][:count]


def by_depth(folder: Path, tokenizer: PreTrainedTokenizerBase, texts: list[str], windows_max: int) -> list[float]:
    """Return how often the draft's likeliest token is the checkpoint's, on the text itself, for each depth."""
    checkpoint = open_checkpoint(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    traits = checkpoint.traits
    head = load_draft_head(
        folder,
        root=checkpoint.root,
        sizes=(traits.hidden_size, traits.embedding_size),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tokens = windows(tokenizer, texts, positions=256, windows_max=windows_max, vocabulary=model.config.vocab_size)
    source, right, compared = Source(model, "demo", checkpoint.root), [0] * DEPTHS, [0] * DEPTHS
    with torch.no_grad():
        for part in tokens.split(8):
            states = source.states(part)
            wanted = source.ends.logits(states[:, 1:]).argmax(-1)
            embedded = source.ends.embed(part[:, 1:].long())
            for depth, state in enumerate(foreseen(head, states[:, :-1], embedded, DEPTHS)):
                same = (source.ends.logits(state).argmax(-1) == wanted)[:, depth:]
                right[depth] += int(same.sum())
                compared[depth] += same.numel()
    return [hits / of for hits, of in zip(right, compared, strict=True)]


def generated(options: argparse.Namespace, ids: list[torch.Tensor]) -> list[tuple[Way, list[int]]]:
    """Continue all prompts in each way, in turns. Returns right and sent guesses, tokens and trips beside each way."""
    with ring(CHECKPOINT, options.delay) as swarm:
        join: dict[str, Any] = {"initial_peers": swarm.initial_peers, "network": swarm.network, "dtype": "float32"}
        drafts = {"plain": "none", "look-up": "lookup", "draft": options.draft, "alone": options.draft}
        ways = [(Way(name), [0, 0, 0, 0]) for name in drafts]
        models: list[DistributedModel] = []
        try:
            for (way, _), draft in zip(ways, drafts.values(), strict=True):
                models.append(AutoDistributedModel.from_pretrained(CHECKPOINT, draft=draft, **join))
                models[-1].generation_config.eos_token_id = None  # every text is as long
                way.drafting = models[-1]._drafts.drafting
                if way.name == "alone":
                    assert way.drafting is not None
                    way.drafting = replace(way.drafting, make=Silent)
            for prompt in ids:
                for model, (way, guesses) in zip(models, ways, strict=True):
                    once(model, way, prompt, {"do_sample": False}, options)
                    counts = model.last_speculation
                    assert counts is not None
                    new = (counts.right, counts.right + counts.wrong, counts.tokens, counts.trips)
                    guesses[:] = [old + more for old, more in zip(guesses, new, strict=True)]
                speeds = ", ".join(f"{way.name} {way.speeds[-1]:.1f}" for way, _ in ways)
                print(f"tokens/s: {speeds}", file=sys.stderr, flush=True)
        finally:
            for model in models:
                model.close()
    return ways


def broken(rows: list[list[Any]], delay_ms: float) -> list[str]:
    """Return the promises that were not kept."""
    found = [f"{row[0]}: other tokens than plain" for row in rows if not row[-1]]
    ratio, right = next((row[2], float(row[3] or 0)) for row in rows if row[0] == "draft")
    least = next((least for ms, least in LEAST.items() if delay_ms >= ms), 0.0)
    if ratio < least:
        found.append(f"{ratio} times as fast as plain, and not {least}")
    return [*found, *([f"right in {right}, and not 0.6"] if right < 0.6 else [])]


if __name__ == "__main__":
    main()
