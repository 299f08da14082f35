"""Train the demo's draft: a head that foresees the demo checkpoint's next tokens.

    python -m swarm.demo.train_draft --out swarm/demo/draft

reads the same files as `swarm.demo.train`, with the same ones held out, and computes the checkpoint's blocks here. All
else is what `swarm-draft` does. docs/demo-checkpoint.md records how the shipped one was made.
"""

import time
from pathlib import Path

import click
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from swarm.client.distilling.run import Recipe, Source, distil, stopping
from swarm.client.distilling.texts import windows
from swarm.demo.cli import CHECKPOINT
from swarm.demo.train import library_sources, split
from swarm.model.checkpoint import open_checkpoint


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="directory for the draft")
@click.option("--steps", type=click.IntRange(min=1), default=2400, show_default=True)
@click.option("--learning-rate", type=float, default=2e-2, show_default=True, help="peak")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--autocast/--no-autocast", default=True, show_default=True, help="compute in bfloat16")
def main(out: Path, steps: int, learning_rate: float, seed: int, autocast: bool) -> None:
    """Train and save the draft, or go on with one."""
    started = time.monotonic()
    training, _ = split(library_sources())
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(CHECKPOINT)
    source = Source(model, checkpoint.public_name, checkpoint.root)
    tokens = windows(tokenizer, training, positions=256, windows_max=1 << 20, vocabulary=model.config.vocab_size)
    recipe = Recipe(
        width=128, layers=3, mlp=416, steps=steps, learning_rate=learning_rate, seed=seed, autocast=autocast
    )
    with stopping() as stop:
        is_complete = distil(source, tokens, out, recipe, stop)
    click.echo(f"{'complete' if is_complete else 'stopped'} after {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
