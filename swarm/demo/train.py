"""Train the demo's checkpoint: a small llama that has read CPython's standard library.

    python -m swarm.demo.train --out swarm/demo/checkpoint

needs nothing but this package and the Python that runs it: the corpus is the source of that Python's own standard
library, the tokenizer a byte-level BPE trained on it. The checkpoint exists so that exactness, and later speculative
decoding, show on text with real structure: a model of random weights has near-ties everywhere and repeats itself.
docs/demo-checkpoint.md records how the shipped one was made, and its samples.
"""

import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.model.checkpoint import open_checkpoint

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
CONTEXT = 1024  # positions; the last fifth of the training uses all of them
# A request is a comment and the answer the code below it: the one kind of dialogue that the corpus has. A longer
# conversation always starts with the text of the shorter one, so that a session can go on.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}{{ '\n\n\n' }}"
    "{% else %}{{ '# ' + message.content + '\n' }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of all files, one after the other, each between BOS and EOS.

    ids: int64 [tokens]. starts: indices into ids where a top-level line begins, none in the last CONTEXT positions.
    """

    ids: np.ndarray
    starts: np.ndarray


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="directory for the checkpoint")
@click.option("--steps", type=click.IntRange(min=10), default=1400, show_default=True)
@click.option("--learning-rate", type=float, default=8e-3, show_default=True, help="peak")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--autocast/--no-autocast", default=True, show_default=True, help="compute in bfloat16")
def main(out: Path, steps: int, learning_rate: float, seed: int, autocast: bool) -> None:
    """Train, save and show the checkpoint."""
    started = time.monotonic()
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    training, held_out = split(library_sources())
    tokenizer = train_tokenizer(training)
    corpus, held_out_corpus = encode(tokenizer, training), encode(tokenizer, held_out)
    model = LlamaForCausalLM(model_config(tokenizer))
    click.echo(
        f"{len(training)} files, {sum(map(len, training)):,} characters, {len(corpus.ids):,} tokens to learn from; "
        f"{len(held_out)} files held out; {model.num_parameters():,} parameters"
    )
    train(model, corpus, rng, steps=steps, learning_rate=learning_rate, autocast=autocast)
    save(model, tokenizer, out)
    report(out, held_out_corpus)
    click.echo(f"took {(time.monotonic() - started) / 60:.1f} minutes")


def library_sources() -> list[str]:
    """The text of every module of this Python's standard library that is written to be read, in order of its path."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {  # not library code, or data in the shape of code
        "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "encodings",
        "site-packages", "dist-packages", "lib-dynload", "__phello__",
    }  # fmt: skip
    paths = (path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths))
    return [text.expandtabs(8) for text in texts if text.strip()]


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split into texts to train on and held-out ones, one in 25: by content, so that the order does not count."""
    held_out = [hashlib.sha256(text.encode()).digest()[0] % 25 == 0 for text in texts]
    return (
        [text for text, out in zip(texts, held_out, strict=True) if not out],
        [text for text, out in zip(texts, held_out, strict=True) if out],
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: every text has an encoding, and decodes to itself."""
    # One token per line break with its indentation; a word keeps the space before it; digits are alone.
    pieces = r"\n *| ?[A-Za-z_]+|\d| ?[^\sA-Za-z_\d]+|\s+"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Twelve blocks, because there must be something to split; the embeddings are tied, so that blocks get the rest."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Corpus:
    """Tokenize files and find where windows may start."""
    bos, eos, newline = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("Ċ")
    files = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = np.concatenate([np.array([bos, *file.ids, eos], dtype=np.int64) for file in files])
    after_newline = (ids[:-1] == newline) & (ids[1:] != newline)
    starts = np.flatnonzero(after_newline) + 1
    return Corpus(ids, starts[starts < len(ids) - CONTEXT])


def train(
    model: LlamaForCausalLM,
    corpus: Corpus,
    rng: np.random.Generator,
    *,
    steps: int,
    learning_rate: float,
    autocast: bool,
) -> None:
    """Fit the model in place: Muon for the blocks' matrices, AdamW for the rest; warm-up and cosine decay.

    Muon takes 0.08 s of a step's 0.5 s, and its loss falls faster than AdamW's from the first steps on.
    """
    optimizers = optimizers_of(model)
    model.train()
    smoothed: float | None = None
    progress = tqdm(range(steps), desc="training", unit="step", mininterval=2.0)
    for step in progress:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate * schedule(step, steps)
        positions = 256 if step < 0.8 * steps else CONTEXT  # most of a small model's learning is local
        loss = learn(model, optimizers, windows(corpus, rng, positions), autocast=autocast)
        smoothed = loss if smoothed is None else 0.98 * smoothed + 0.02 * loss
        progress.set_postfix(loss=f"{smoothed:.3f}", refresh=False)
    model.eval()


def optimizers_of(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the blocks' matrices and AdamW for the rest."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim == 1 or "embed" in name]
    return (
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


def learn(
    model: LlamaForCausalLM, optimizers: tuple[torch.optim.Optimizer, ...], batch: torch.Tensor, *, autocast: bool
) -> float:
    """Take one step on a batch, int64 [windows, positions]. Returns its loss in nats per token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step as a share of its peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def windows(corpus: Corpus, rng: np.random.Generator, positions: int) -> torch.Tensor:
    """Draw a batch of 4,096 tokens, [4096 / positions, positions].

    Half of the windows begin where a top-level line begins, behind BOS, as a prompt does; the others begin anywhere.
    """
    n = 4096 // positions
    behind_bos = n // 2
    begins = np.concatenate(
        [
            rng.choice(corpus.starts, behind_bos) - 1,
            rng.integers(0, len(corpus.ids) - CONTEXT, n - behind_bos),
        ]
    )
    batch = corpus.ids[begins[:, None] + np.arange(positions)]
    batch[:behind_bos, 0] = corpus.ids[0]
    return torch.from_numpy(batch)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint: bfloat16 safetensors, the tokenizer, greedy generation by default."""
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    open_checkpoint(out, accept_changes=True).manifest.save(out)  # a damaged copy refuses to load, wherever it is


def report(directory: Path, held_out: Corpus) -> None:
    """Load the checkpoint as any user would; print its size, its loss and some samples."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    size = (directory / "model.safetensors").stat().st_size
    loss = held_out_loss(model, held_out)
    click.echo(f"{size / 1e6:.2f} MB; held-out loss {loss:.3f} nats a token, {len(held_out.ids):,} tokens")
    prompts = (
        "def read_lines(path):\n",
        "def _parse_header(self, line):\n    ",
        "class Queue:\n    def __init__(self",
        'def is_valid(name):\n    """Return True if',
    )
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        text = tokenizer.decode(model.generate(**inputs, max_new_tokens=80, do_sample=False)[0][1:])
        click.echo(f"{'-' * 80}\n{text}")


def held_out_loss(model: LlamaForCausalLM, corpus: Corpus) -> float:
    """Mean negative log-likelihood of a token, in nats, over whole windows of 512 tokens."""
    with torch.inference_mode():
        losses = [model(input_ids=batch, labels=batch).loss.item() for batch in whole_windows(corpus, 512)]
    return float(np.mean(losses))


def whole_windows(corpus: Corpus, positions: int) -> Iterator[torch.Tensor]:
    """Cut the corpus into windows that follow each other; yields [1, positions]."""
    for i in range(0, len(corpus.ids) - positions, positions):
        yield torch.from_numpy(corpus.ids[None, i : i + positions])


if __name__ == "__main__":
    main()
