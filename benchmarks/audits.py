"""How far apart honest outputs are, and how far off wrong ones: what the bounds of audits follow from.

    python benchmarks/audits.py [--model DIRECTORY] [--audits 20] [--check] [--json FILE]

A session has a prompt of 64 tokens of held-out text, and 64 steps of one token, on three spans. An audit computes all
128 positions anew as one prompt, on two spans, and compares the 64 outputs. Distances are relative to the norm of the
audit's own output: the median of the positions, and the largest.

Honest: in each class, with this processor's kernels, and with those of a process that may use none beyond SSE4.1.
Wrong, in the second span: a block is left out; two are swapped; each block has the weights of the next; weights in 4
bits; one output of 64 is 5 % off, which is within the noise of bfloat16.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import SEED, table, write_json
from quantised import CLASSES, DEMO, OLD_KERNELS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.client.auditing.bounds import Distance, bounds_of, distance
from swarm.demo import train
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import load_ends, load_span
from swarm.model.span import Span

PROMPT, STEPS = 64, 64
OFF = "1 output of 64 is 5 % off"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The distances of many audits of one kind."""

    numeric_class: str
    kind: str
    distances: Sequence[Distance]

    @property
    def found(self) -> int:
        """How many audits fail."""
        bounds = bounds_of([NumericClass.parse(self.numeric_class)])
        return sum(not bounds.allow(each) for each in self.distances)

    @property
    def expected(self) -> int:
        """How many should fail. One output that is 5 % off is within the noise of bfloat16."""
        is_found = not self.kind.startswith("honest") and (self.kind != OFF or self.numeric_class.startswith("float32"))
        return len(self.distances) if is_found else 0

    def row(self) -> tuple[str, ...]:
        """Return the table's row."""
        typical = [each.typical for each in self.distances]
        worst = [each.worst for each in self.distances]
        figures = (min(typical), median(typical), max(typical), min(worst), max(worst))
        return (self.numeric_class, self.kind, *(f"{x:.1e}" for x in figures), f"{self.found} of {len(worst)}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=DEMO, help="a checkpoint")
    arguments.add_argument("--audits", type=int, default=20, help="of each kind")
    arguments.add_argument("--classes", nargs="*", default=list(CLASSES))
    arguments.add_argument("--claims", type=Path, help="write the honest outputs of each class, and nothing else")
    arguments.add_argument("--check", action="store_true", help="exit with 1 where a bound does not hold")
    arguments.add_argument("--json", type=Path, help="where the figures go")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    windows = held_out(options.model, options.audits)
    if options.claims is not None:
        save_file({name: honest_claims(options.model, name, windows) for name in options.classes}, options.claims)
        return
    others = claims_of_others(options)
    outcomes = [each for name in options.classes for each in audits_of(options.model, name, windows, others[name])]
    columns = ("class", "server", "median, least", "median", "median, most", "largest, least", "largest, most", "found")
    rows = [outcome.row() for outcome in outcomes]
    table("relative distance of outputs", columns, rows)
    write_json(options.json, "audits", SEED, [], columns=columns, rows=rows)
    unlike = [each for each in outcomes if each.found != each.expected]
    if options.check and unlike:
        sys.exit("; ".join(f"{each.numeric_class}, {each.kind}: {each.found} found" for each in unlike))


def held_out(model: Path, windows: int) -> Tensor:
    """Return windows of held-out text, [windows, tokens]."""
    texts = train.split(train.library_sources())[1]
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)("\n".join(texts), add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // (PROMPT + STEPS) * (PROMPT + STEPS)].view(-1, PROMPT + STEPS)
    return rows[torch.linspace(0, len(rows) - 1, windows).long()]


def claims_of_others(options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the honest outputs of a process with an older processor's kernels, [windows, steps, hidden_size]."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        path = Path(folder, "claims.safetensors")
        line = [sys.executable, __file__, "--model", str(options.model), "--audits", str(options.audits)]
        line += ["--classes", *options.classes, "--claims", str(path)]
        subprocess.run(line, env={**os.environ, **OLD_KERNELS}, check=True)
        return load_file(path)


def honest_claims(model: Path, name: str, windows: Tensor) -> Tensor:
    """Return what honest servers answer to each step, [windows, steps, hidden_size]."""
    checkpoint, embed = opened(model, name)
    a, b = cuts(checkpoint.n_blocks)
    spans = [loaded(checkpoint, name, Blocks(*each)) for each in ((0, a), (a, b), (b, checkpoint.n_blocks))]
    return sessions(embed(windows), spans)


def audits_of(model: Path, name: str, windows: Tensor, others: Tensor) -> list[Outcome]:
    """Audit sessions of honest and of wrong servers."""
    checkpoint, embed = opened(model, name)
    a, b = cuts(checkpoint.n_blocks)
    first, second, third = (
        loaded(checkpoint, name, Blocks(*each)) for each in ((0, a), (a, b), (b, checkpoint.n_blocks))
    )
    half = [loaded(checkpoint, name, blocks) for blocks in (Blocks(0, b - 1), Blocks(b - 1, checkpoint.n_blocks))]
    references = audited(embed(windows), half)
    kinds = {"honest": sessions(embed(windows), [first, second, third]), "honest, other kernels": others}
    middle = range(a, b)
    skipping = [second.part(Blocks(n, n + 1)) for n in middle if n != a + 1]
    swapped = [second.part(Blocks(n, n + 1)) for n in (a + 1, a, *range(a + 2, b))]
    shifted = loaded(checkpoint, name, Blocks(a + 1, b + 1))
    coarse = load_span(checkpoint, Blocks(a, b), dtype=CLASSES[name][0])
    round_to_four_bits(coarse)
    wrong: dict[str, list[Span]] = {"a block left out": skipping, "two blocks swapped": swapped}
    wrong |= {"weights of the next block": [shifted], "weights in 4 bits": [coarse]}
    for kind, spans in wrong.items():
        kinds[kind] = sessions(embed(windows), [first, *spans, third])
    kinds[OFF] = sessions(embed(windows), [first, second, third], off=1)
    return [
        Outcome(name, kind, [distance(claim, told) for claim, told in zip(claims, references, strict=True)])
        for kind, claims in kinds.items()
    ]


def opened(model: Path, name: str) -> tuple[Checkpoint, Callable[[Tensor], Tensor]]:
    """Return a checkpoint, and what embeds token ids: [rows, tokens] to [rows, tokens, hidden_size]."""
    checkpoint = open_checkpoint(model)
    ends: Any = load_ends(checkpoint, dtype=CLASSES[name][0])
    return checkpoint, ends.get_input_embeddings()


def cuts(blocks: int) -> tuple[int, int]:
    """Return where the second of three spans begins and ends."""
    return blocks // 3, 2 * blocks // 3


def loaded(checkpoint: Checkpoint, name: str, blocks: Blocks) -> Span:
    """Return a span in a class."""
    dtype, quantize = CLASSES[name]
    return load_span(checkpoint, blocks, dtype=dtype, quantize=quantize)


def sessions(embedded: Tensor, spans: Sequence[Span], off: int | None = None) -> Tensor:
    """Return the outputs of the steps behind prompts, [sessions, steps, hidden_size]. embedded: of all positions.

    off: the span that is 5 % off in one output of each session, each in another step.
    """
    parts = [(span, span.new_cache()) for span in spans]
    outputs = []
    with torch.inference_mode():
        for start, stop in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))):
            hidden = embedded[:, start:stop]
            for number, (span, cache) in enumerate(parts):
                hidden = span.forward(hidden, cache=cache)
                if off == number and start:
                    wrong = torch.arange(len(hidden)) % STEPS == start - PROMPT
                    noise = torch.randn_like(hidden) * wrong[:, None, None]
                    hidden = hidden + 0.05 * noise * hidden.norm(dim=-1, keepdim=True) / hidden.shape[-1] ** 0.5
            if start:
                outputs.append(hidden[:, 0])
    return torch.stack(outputs, dim=1)


def audited(embedded: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the same outputs from all positions at once."""
    with torch.inference_mode():
        for span in spans:
            embedded = span.forward(embedded, cache=span.new_cache())
    return embedded[:, PROMPT:].clone()


def round_to_four_bits(span: Span) -> None:
    """Round weights to 4 bits, in blocks of 32 with a scale each."""
    for module in span.model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            groups = module.weight.data.float().view(-1, 32)
            scale = groups.abs().amax(1, keepdim=True) / 7
            rounded = (groups / scale.clamp(min=1e-12)).round().clamp(-8, 7) * scale
            module.weight.data.copy_(rounded.view_as(module.weight))


if __name__ == "__main__":
    main()
