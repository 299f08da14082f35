"""How much of a prompt a server can read: the share of tokens recovered from the activations that reach it.

    python benchmarks/inversion.py [--tokens 32] [--quick] [--json PATH]

The attacker is the server whose span begins at block k. It sees the activations that enter block k at all positions,
in order, and has what everybody has: the model's weights. Two attacks, each a nearest neighbour (Euclidean) among the
activations that the tokens of the whole vocabulary would have caused:

with the prefix   position by position: every token is run through blocks 0:k behind the prefix recovered so far, and
                  the nearest one joins the prefix. One wrong token spoils what the attacker compares the next with.
without           every token is run alone, without anything before it: one table for all positions and all users,
                  for an attacker that sees single positions or spends next to nothing.

No training, no guessing from a language model's likelihoods: whoever adds these recovers more, never less. The victim
computes as a client and its servers do, the prompt in one piece; the attacker token by token, so that the two differ
by the arithmetic's rounding as they would on two machines.
"""

import argparse
import time
from pathlib import Path

import torch
from common import SEED, Samples, table, write_json
from torch import Tensor
from transformers import AutoTokenizer

from swarm.blocks import Blocks
from swarm.demo.cli import CHECKPOINT
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_ends, load_span
from swarm.model.span import Span

DEPTHS = (0, 1, 2, 4, 8)
CANDIDATES = 512  # run at a time
PROMPTS = (
    "My daughter's birthday is on the third of May, and the surgeon said that she can travel by then. Could you please",
    "def transfer(account, amount, pin):\n    if hash_of(pin) != account.pin:\n        raise PermissionError(pin)",
    "Dear Ms Okafor, we regret that your application for a loan of 12,500 euros was declined because of the entries of",
    "SELECT name, salary FROM employees WHERE department = 'research' AND salary > 80000 ORDER BY salary DESC LIMIT 10",
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, default=32, help="of each prompt")
    arguments.add_argument("--model", default=str(CHECKPOINT), help="directory or hub id; by default the demo's")
    arguments.add_argument("--dtype", default="float32", help="what both compute in")
    arguments.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    tokens = 3 if options.quick else options.tokens
    checkpoint = open_checkpoint(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :tokens] for text in PROMPTS]
    dtype = getattr(torch, options.dtype)
    embeddings = load_ends(checkpoint, dtype=dtype).get_input_embeddings()
    rows, samples, shares = [], [], {}
    with torch.inference_mode():
        vocabulary = embeddings(torch.arange(embeddings.weight.shape[0]))
        for depth in [depth for depth in DEPTHS if depth <= checkpoint.n_blocks]:
            span = load_span(checkpoint, Blocks(0, depth), dtype=dtype) if depth else None
            attack = Attack(span, vocabulary)
            found = [attack.read(embeddings(prompt), prompt) for prompt in prompts]
            total = sum(prompt.shape[1] for prompt in prompts)
            shares[depth] = [sum(counts) / total for counts in zip(*found, strict=True)]
            samples.append(attack.times)
            with_prefix, without = (f"{100 * share:.1f} %" for share in shares[depth])
            rows.append((str(depth), with_prefix, without, f"{attack.times.median:.0f}"))
    title = f"tokens recovered, of {sum(prompt.shape[1] for prompt in prompts)} ({len(vocabulary)} in the vocabulary)"
    table(title, ("before block", "with the prefix", "without", "median ms per token"), rows)
    write_json(options.json, "inversion", SEED, samples, model=checkpoint.root, dtype=options.dtype, recovered=shares)


class Attack:
    """Reads what enters the block behind `span`, which are blocks 0:k; None is k = 0, the embeddings themselves."""

    def __init__(self, span: Span | None, vocabulary: Tensor) -> None:
        """vocabulary: [tokens, hidden_size], the embedding of every token."""
        self._span = span
        self._vocabulary = vocabulary
        self._alone = self._run_alone()
        self.times = Samples(f"blocks 0:{len(span.blocks) if span is not None else 0}, attacker's time per token")

    def read(self, embedded: Tensor, prompt: Tensor) -> tuple[int, int]:
        """Return how many of the prompt's tokens are recovered with the prefix, and without.

        embedded: [1, tokens, hidden_size], what the victim puts into block 0; prompt: [1, tokens], the truth.
        """
        seen = embedded if self._span is None else self._span.forward(embedded, cache=None)
        with_prefix = sum(int(a == b) for a, b in zip(self._with_prefix(seen[0]), prompt[0].tolist(), strict=True))
        nearest = torch.cdist(seen[0].float(), self._alone).argmin(-1)
        return with_prefix, int((nearest == prompt[0]).sum())

    def _with_prefix(self, seen: Tensor) -> list[int]:
        """Recover tokens one after the other. seen: [tokens, hidden_size]."""
        cache = self._span.new_cache() if self._span is not None else None
        recovered: list[int] = []
        for activation in seen:
            began = time.perf_counter()
            distances = []
            for start in range(0, len(self._vocabulary), CANDIDATES):
                tried = self._vocabulary[start : start + CANDIDATES, None]
                if self._span is not None and cache is not None:
                    if cache.length:
                        cache.gather(torch.zeros(len(tried), dtype=torch.int64))
                    tried = self._span.forward(tried, cache=cache)
                    cache.keep(len(recovered))
                distances.append((tried[:, 0].float() - activation.float()).norm(dim=-1))
            best = int(torch.cat(distances).argmin())
            recovered.append(best)
            if self._span is not None and cache is not None:
                if cache.length:
                    cache.gather(torch.zeros(1, dtype=torch.int64))
                self._span.forward(self._vocabulary[best][None, None], cache=cache)
            self.times.ms.append(1000 * (time.perf_counter() - began))
        return recovered

    def _run_alone(self) -> Tensor:
        alone = self._vocabulary[:, None]
        return (alone if self._span is None else self._span.forward(alone, cache=None))[:, 0].float()


if __name__ == "__main__":
    main()
