"""From a model and texts to a draft: collect the model's final states, train a head on them, write it."""

import hashlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from swarm.client.distilling.limits import DistilLimits
from swarm.client.distilling.training import Ends, Training
from swarm.client.distilling.work import Plan, States, Work
from swarm.model.draftfiles import save_draft
from swarm.model.drafthead import HeadShape
from swarm.model.hollow import decoder_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is made. width, layers, mlp: its sizes. steps: of training, each on so many windows (rows).

    depths: guesses behind each other that it is trained for, in the last steps. alone: share of the steps that have
    one guess alone; they cost a quarter. learning_rate: at its peak. autocast: multiply in bfloat16.
    """

    width: int
    layers: int
    mlp: int
    steps: int
    rows: int = 8
    depths: int = 4
    alone: float = 0.9
    learning_rate: float = 0.02
    autocast: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """The model that a head is distilled from. model: whole, or its ends before a swarm. root: of its checkpoint."""

    model: PreTrainedModel
    name: str
    root: str

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """Return the model's final states behind its last norm, [windows, positions, hidden_size]."""
        decoder: Any = decoder_of(self.model)[0]
        states: Tensor = decoder(input_ids=tokens.to(self.model.device, torch.int64), use_cache=False)[0]
        return states

    @property
    def ends(self) -> Ends:
        """Its embeddings and head."""
        model: Any = self.model
        return Ends(model.get_input_embeddings(), model.get_output_embeddings())

    def plan(self, tokens: Tensor, recipe: Recipe) -> Plan:
        """Return what is made of these windows."""
        config: Any = self.model.config.get_text_config(decoder=True)
        embedding_size = self.ends.embed(tokens[:1, :1].long()).shape[-1]
        head_size = 32 if recipe.width % 64 else 64
        shape = HeadShape(
            hidden_size=config.hidden_size,
            embedding_size=embedding_size,
            width=recipe.width,
            mlp=recipe.mlp,
            layers=recipe.layers,
            heads=max(1, recipe.width // head_size),
            head_size=head_size,
            window=tokens.shape[1],
        )
        return Plan(
            root=self.root,
            texts=hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            windows=tokens.shape[0],
            positions=tokens.shape[1],
            shape=shape,
            vocabulary=config.vocab_size,
            steps=recipe.steps,
            rows=min(recipe.rows, tokens.shape[0] - 1),
            depths=recipe.depths,
            alone=recipe.alone,
            autocast=recipe.autocast,
            learning_rate=recipe.learning_rate,
            seed=recipe.seed,
        )


class Stop:
    """The wish to end, from a signal. What is at work ends where it can go on; a second signal ends it at once."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True


@contextmanager
def stopping() -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM while the block runs."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.ask) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def distil(
    source: Source,
    tokens: Tensor,
    out: Path,
    recipe: Recipe,
    stop: Stop,
    limits: DistilLimits = DistilLimits(),  # noqa: B008 - frozen
) -> bool:
    """Make a draft in a folder, or go on with it. Returns whether it is complete; False after a signal.

    tokens: int32 [windows, positions]. Raises SwarmError; what was done until then is kept.
    """
    plan = source.plan(tokens, recipe)
    work = Work.begin(out / "work", plan, limits)
    if not _collect(source, tokens, work, stop, limits):
        return False
    training = Training(plan, source.ends, limits.logits_max)
    if work.training.exists():
        training.load(work.training)
    states = work.states()
    held = tokens.shape[0] - max(1, min(limits.held_out_max, int(limits.held_out * tokens.shape[0])))
    _train(training, tokens, states, held, work, stop, limits)
    save_draft(training.head, out, root=plan.root, model=source.name)
    right = training.right(tokens, states, torch.arange(held, tokens.shape[0]), plan.depths)
    click.echo(f"right on windows held out, by depth: {', '.join(f'{each:.3f}' for each in right)}")
    if training.step < plan.steps:
        return False
    work.delete()
    return True


def _collect(source: Source, tokens: Tensor, work: Work, stop: Stop, limits: DistilLimits) -> bool:
    """Get the states of all windows that are not there yet. Returns whether all are there."""
    plan, begin = work.plan, work.collected
    rows = max(1, min(limits.step_rows_max, limits.step_bytes_max * plan.windows // plan.state_bytes))
    with tqdm(total=plan.windows, initial=begin, desc="states", unit="window", disable=begin == plan.windows) as bar:
        for first in range(begin, plan.windows, rows):
            if stop.asked:
                return False
            part = tokens[first : first + rows]
            work.add(source.states(part))
            bar.update(len(part))
    return True


def _train(
    training: Training, tokens: Tensor, states: States, usable: int, work: Work, stop: Stop, limits: DistilLimits
) -> None:
    """Train to the last step, or to a signal. The state is kept now and then, and at the end."""
    steps, saved, smoothed = work.plan.steps, time.monotonic(), None
    with tqdm(total=steps, initial=training.step, desc="training", unit="step", mininterval=2.0) as bar:
        while training.step < steps and not stop.asked:
            loss = training.learn(tokens, states, usable)
            smoothed = loss if smoothed is None else 0.98 * smoothed + 0.02 * loss
            bar.set_postfix(loss=f"{smoothed:.3f}", refresh=False)
            bar.update()
            if time.monotonic() - saved > limits.save_s:
                training.save(work.training)
                saved = time.monotonic()
    training.save(work.training)
