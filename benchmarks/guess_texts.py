"""Texts that benchmarks of guesses compare: prompts out of Python's standard library, and what the whole model writes.

The whole model is the stock one on this machine. A text counts as the same only if the generator of random numbers
also ends in the same state.
"""

import argparse as _argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SEEDED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
GREEDY = {"do_sample": False}
PENALTY = {"repetition_penalty": 1.2}
STOPS = {"stop_strings": ["\n\n", "return"]}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy, penalty": {**GREEDY, **PENALTY},
    "greedy, stop strings": {**GREEDY, **STOPS},
    "seeded": SEEDED,
    "seeded, penalty": {**SEEDED, **PENALTY},
    "seeded, stop strings": {**SEEDED, **STOPS},
}


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, [rows, tokens], and what `generate()` made of it: rows of tokens, and the generator's state after."""

    prompt: Tensor
    rows: list[list[int]]
    state: bytes


class Texts:
    """Prompts for one checkpoint, and the whole model that continues them."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
        whole: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        whole.generation_config.eos_token_id = None  # texts end by length, or by a stop string
        self.whole: PreTrainedModel = whole
        folder = Path(_argparse.__file__).parent
        source = "".join((folder / name).read_text() for name in ("argparse.py", "tarfile.py", "subprocess.py"))
        self._source: Tensor = self.tokenizer(source, return_tensors="pt")["input_ids"][0]

    def prompts(self, count: int, lengths: tuple[int, int], rows: int, seed: int) -> list[Tensor]:
        """Cut prompts, [rows, tokens] each, with a number of tokens between the two lengths."""
        rng, found = Random(seed), list[Tensor]()
        for _ in range(count):
            tokens = rng.randint(*lengths)
            starts = [rng.randrange(len(self._source) - tokens) for _ in range(rows)]
            found.append(torch.stack([self._source[start : start + tokens] for start in starts]))
        return found

    def written(self, model: PreTrainedModel, prompt: Tensor, way: str, tokens: int, seed: int) -> Text:
        """Continue a prompt by a model: the whole one, or one of a swarm."""
        torch.manual_seed(seed)
        how = WAYS[way]
        if "stop_strings" in how:
            how = {**how, "tokenizer": self.tokenizer}
        generate: Any = model.generate
        mask = torch.ones_like(prompt)
        made: Tensor = generate(prompt, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, **how)
        return Text(prompt, made.tolist(), torch.get_rng_state().numpy().tobytes())


def differing(made: Text, expected: Text) -> int:
    """Return how many tokens are not the expected ones. One that is missing, or too many, differs."""
    pairs = zip(made.rows, expected.rows, strict=True)
    return sum(_differing(ours, theirs) for ours, theirs in pairs)


def _differing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    unequal = sum(one != other for one, other in zip(ours, theirs, strict=False))
    return unequal + abs(len(ours) - len(theirs))
