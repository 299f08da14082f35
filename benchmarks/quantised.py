"""What weights in int8 and int4 cost and gain: quality on held-out text, speed, memory and start, in one run.

    python benchmarks/quantised.py [--model DIRECTORY] [--windows 24] [--hidden 768] [--blocks 12] [--quick] [--check]

Quality: the demo model, or another checkpoint, reads held-out windows of 512 tokens of Python's standard library. All
its blocks are one span; embeddings and head are plain. KL is that of the next token to float32's, in nats. "weighed" is
int4 by how large inputs are in 64 windows of the library's other modules, as swarm-importance measures it.

Speed: a random llama's blocks on one thread, behind 64 positions: a step of one session, packed steps of four and
eight, and a prompt of 512. The classes take turns. Set ONEDNN_MAX_CPU_ISA=AVX2, ATEN_CPU_CAPABILITY=avx2,
MKL_ENABLE_INSTRUCTIONS=AVX2 and FBGEMM_ENABLE_INSTRUCTIONS=AVX2 for the kernels that an older processor would have.

Other kernels: a process whose libraries may use no vectors beyond SSE4.1 reads four of the windows, too. A flip is a
token of which both processes have another first choice.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import SEED, Samples, interleaved, table, write_json
from load import save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from swarm.blocks import Blocks
from swarm.client.distilling.texts import windows as text_windows
from swarm.demo import train
from swarm.model.checkpoint import open_checkpoint
from swarm.model.importance import IMPORTANCE_NAME, write_importance
from swarm.model.kernels import choose_kernels
from swarm.model.loading import load_ends, load_span
from swarm.model.packed import Segment
from swarm.model.span import Span
from swarm.model.weighing import measured

DEMO = Path(train.__file__).with_name("checkpoint")
WINDOW = 512
CLASSES: dict[str, tuple[torch.dtype, str | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float32+int8": (torch.float32, "int8"),
    "bfloat16+int8": (torch.bfloat16, "int8"),
    "float32+int4": (torch.float32, "int4"),
    "bfloat16+int4": (torch.bfloat16, "int4"),
}
WEIGHED = "float32+int4, weighed"
BY_TORCH = "bfloat16 by torch"  # as a span computes without `choose_kernels`
MOST = {  # KL, and perplexity to float32's
    "float32+int8": (0.0005, 1.002),
    "float32+int4": (0.05, 1.04),
    WEIGHED: (0.05, 1.04),
}
FLIP_WINDOWS = 4
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "FBGEMM_ENABLE_INSTRUCTIONS")
OLD_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}


@dataclass(frozen=True, slots=True)
class Quality:
    """How a class reads text. kl: to float32, nats a token. same: the share of tokens with float32's first choice."""

    perplexity: float
    kl: float
    same: float


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=DEMO, help="a checkpoint whose quality is measured")
    arguments.add_argument("--windows", type=int, default=24, help="of 512 tokens")
    arguments.add_argument("--hidden", type=int, default=768, help="width of the random llama")
    arguments.add_argument("--blocks", type=int, default=12)
    arguments.add_argument("--count", type=int, default=20, help="samples of each step")
    arguments.add_argument(
        "--classes",
        nargs="+",
        choices=[*CLASSES, BY_TORCH],
        default=list(CLASSES),
        help="what is measured; quality needs float32",
    )
    alone = arguments.add_mutually_exclusive_group()
    alone.add_argument("--no-speed", action="store_true", help="quality alone")
    alone.add_argument("--no-quality", action="store_true", help="speed alone")
    arguments.add_argument("--weigh", action="store_true", help="quality of int4 that regards inputs' sizes, too")
    arguments.add_argument("--no-flips", action="store_true", help="without another process of other kernels")
    arguments.add_argument("--choices", type=Path, help="write the first choices of four windows, and nothing else")
    arguments.add_argument("--quick", action="store_true", help="little of everything, to see that it works")
    arguments.add_argument("--check", action="store_true", help="exit with 1 where integers are too far from float32")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if options.choices is not None:
        save_file(choices_of(options.model), options.choices)
        return
    far: list[str] = []
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    samples: list[Samples] = []
    if not options.no_speed:
        hidden, blocks = (256, 2) if options.quick else (options.hidden, options.blocks)
        columns, rows, samples = speed_of(options.classes, hidden, blocks, 2 if options.quick else options.count)
        table(f"{blocks} blocks of width {hidden}: quickest, and in times of bfloat16's speed", columns, rows)
    if not options.no_quality:
        classes = [name for name in CLASSES if name == "float32" or name in options.classes]
        with weighed(options.model) if options.weigh else nullcontext(options.model) as model:
            qualities = quality_of(model, 2 if options.quick else options.windows, classes)
            flips = {} if options.no_flips else flips_of(model)
        columns, rows, far = compared(qualities, flips)
        table("held-out text", columns, rows)
    write_json(
        options.json,
        "quantised",
        SEED,
        samples,
        columns=columns,
        rows=rows,
        kernels={name: os.environ[name] for name in LIMITS if name in os.environ},
    )
    if options.check and far:
        sys.exit(f"further from float32 than they may be: {', '.join(far)}")


def compared(
    qualities: dict[str, Quality], flips: dict[str, int]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Return the table's columns and rows, and which classes are further from float32 than they may be."""
    columns = ("class", "perplexity", "to float32's", "KL, nats", "same first choice")
    columns += (f"flips of {FLIP_WINDOWS * WINDOW:,}",) if flips else ()
    exact = qualities["float32"].perplexity
    rows = [
        (name, f"{q.perplexity:.3f}", f"{q.perplexity / exact:.4f}", f"{q.kl:.5f}", f"{q.same:.4f}")
        + ((str(flips[name]),) if flips else ())
        for name, q in qualities.items()
    ]
    far = [
        name
        for name, (kl, ratio) in MOST.items()
        if name in qualities
        and (
            qualities[name].kl > kl
            or qualities[name].perplexity / exact > ratio
            or (name == "float32+int8" and flips.get(name, 0))  # which promises equal tokens on any processors
        )
    ]
    return columns, rows, far


def quality_of(model: Path, windows: int, classes: Sequence[str]) -> dict[str, Quality]:
    """Read held-out text in each class, float32 first, and at last by inputs' sizes where the checkpoint has them."""
    rows, kinds = held_out(model, windows), kinds_of(model)
    found: dict[str, Quality] = {}
    expected: list[Tensor] = []
    for name in (*classes, *(kinds.keys() - CLASSES.keys())):
        loss = kl = same = 0.0
        for number, likely in enumerate(read(model, *kinds[name], rows)):
            if name == "float32":
                expected.append(likely)
            reference = expected[number]
            loss -= float(likely[:-1].gather(1, rows[number, 1:, None]).mean())
            kl += float((reference.exp() * (reference - likely)).sum(-1).mean())
            same += float((likely.argmax(-1) == reference.argmax(-1)).float().mean())
        found[name] = Quality(math.exp(loss / windows), kl / windows, same / windows)
    return found


def kinds_of(model: Path) -> dict[str, tuple[torch.dtype, str | None]]:
    """Return the dtype and the weights of each class that a checkpoint can have."""
    importance = open_checkpoint(model).importance()
    return CLASSES if importance is None else {**CLASSES, WEIGHED: (torch.float32, importance.named("int4"))}


@contextmanager
def weighed(model: Path) -> Iterator[Path]:
    """Make a checkpoint of the same files that has its inputs' sizes, too."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        for path in model.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        checkpoint = open_checkpoint(folder)
        texts = train.split(train.library_sources())[0]
        random.Random(SEED).shuffle(texts)
        sizes = {"positions": WINDOW, "windows_max": 64, "vocabulary": checkpoint.config.vocab_size}
        squares = measured(checkpoint, text_windows(checkpoint.texts().tokenizer(), texts, **sizes))
        write_importance(str(folder), folder / IMPORTANCE_NAME, checkpoint.root, squares)
        yield folder


def flips_of(model: Path) -> dict[str, int]:
    """Count the first choices that a process with an older processor's kernels has otherwise."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        path = Path(folder, "choices.safetensors")
        line = [sys.executable, __file__, "--model", str(model), "--choices", str(path)]
        subprocess.run(line, env={**os.environ, **OLD_KERNELS}, check=True)
        others = load_file(path)
    return {name: int((choices != others[name]).sum()) for name, choices in choices_of(model).items()}


def choices_of(model: Path) -> dict[str, Tensor]:
    """Return each class's first choices. Shape of each: [windows * tokens]."""
    rows = held_out(model, FLIP_WINDOWS)
    kinds = kinds_of(model)
    return {name: torch.cat([likely.argmax(-1) for likely in read(model, *kind, rows)]) for name, kind in kinds.items()}


def held_out(model: Path, windows: int) -> Tensor:
    """Return windows of held-out text, [windows, tokens]."""
    texts = train.split(train.library_sources())[1]
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)("\n".join(texts), add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return rows[torch.linspace(0, len(rows) - 1, windows).long()]


def read(model: Path, dtype: torch.dtype, quantize: str | None, rows: Tensor) -> Iterator[Tensor]:
    """Yield the logarithms of the next token's chances in each window, [tokens, vocabulary]."""
    checkpoint = open_checkpoint(model)
    span = load_span(checkpoint, Blocks(0, checkpoint.n_blocks), dtype=dtype, quantize=quantize)
    ends: Any = load_ends(checkpoint, dtype=dtype)
    for row in rows:
        with torch.inference_mode():
            hidden = span.forward(ends.get_input_embeddings()(row[None]), cache=span.new_cache())
            yield ends.get_output_embeddings()(ends.get_decoder().norm(hidden))[0].float().log_softmax(-1)


def speed_of(
    classes: Sequence[str], hidden: int, blocks: int, count: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[Samples]]:
    """Time a random model's blocks in some classes, in turns. Returns the table's columns and rows, and the samples."""
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden if hidden >= 2048 else 8 * hidden // 3}
    shape |= {"num_hidden_layers": blocks, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    spans: dict[str, Span] = {}
    loads: dict[str, float] = {}
    ways: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        save_checkpoint(Path(folder), "llama", torch.bfloat16, SEED, **shape)
        checkpoint = open_checkpoint(folder)
        for name in classes:
            dtype, quantize = CLASSES["bfloat16" if name == BY_TORCH else name]
            began = time.perf_counter()
            spans[name] = load_span(checkpoint, Blocks(0, blocks), dtype=dtype, quantize=quantize)
            loads[name] = time.perf_counter() - began
            kind = None if name == BY_TORCH else choose_kernels(spans[name])
            ways[name] = "as they are" if kind is None else kind.says
    rows: list[tuple[str, ...]] = []
    timed: dict[str, Samples] = {}
    with torch.inference_mode():
        works = {name: works_of(span) for name, span in spans.items()}
        kinds = list(works[classes[0]])
        for what in kinds:
            turns = {f"{what}, {name}": works[name][what] for name in spans}
            interleaved(1, turns)  # warms up
            timed |= interleaved(max(3, count // 5) if what.startswith("prompt") else count, turns)
    base = "bfloat16" if "bfloat16" in classes else classes[0]
    for name, span in spans.items():
        best = [min(timed[f"{what}, {name}"].ms) for what in kinds]
        plain = [min(timed[f"{what}, {base}"].ms) for what in kinds]
        ratios = [f"{ms:.2f} ({other / ms:.2f}x)" for ms, other in zip(best, plain, strict=True)]
        rows.append((name, ways[name], f"{span.weight_bytes / 1e6:.0f}", f"{loads[name]:.1f}", *ratios))
    columns = ("class", "weights", "MB", "load, s", *(f"{what}, ms" for what in kinds))
    return columns, rows, list(timed.values())


def works_of(span: Span) -> dict[str, Callable[[], object]]:
    """Return what is timed. Steps leave their caches as long as they were."""
    token = torch.randn(1, 1, span.hidden_size).to(span.dtype)
    prompt = torch.randn(1, 512, span.hidden_size).to(span.dtype)
    caches = [span.new_cache(rollback_max=1) for _ in range(9)]
    for cache in caches:
        span.forward(prompt[:, :64], cache=cache)
    lone, *others = caches

    def alone() -> None:
        span.forward(token, cache=lone)
        lone.keep(64)

    def packed(together: Sequence[Any]) -> None:
        span.forward_packed([Segment(token, cache) for cache in together])
        for cache in together:
            cache.keep(64)

    return {
        "1 session": alone,
        "4 sessions": lambda: packed(others[:4]),
        "8 sessions": lambda: packed(others),
        "prompt of 512": lambda: span.forward(prompt, cache=span.new_cache()),
    }


if __name__ == "__main__":
    main()
