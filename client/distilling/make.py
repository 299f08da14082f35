"""`swarm-draft` at work: the model, its tokenizer and the texts become a draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

from swarm.client.distilling.run import Recipe, Source, distil, stopping
from swarm.client.distilling.texts import texts_in, windows
from swarm.client.hf.auto import AutoDistributedModel
from swarm.client.hf.statedraft import last_norm
from swarm.errors import BadConfiguration
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.draftfiles import is_draft
from swarm.model.hollow import one_at_a_time


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. tokens: of the texts, at most. positions: of a window. is_local: the blocks are computed here.

    width, mlp: None for sizes that go with the model's.
    """

    model: str
    texts: Path
    out: Path
    tokens: int
    positions: int
    steps: int
    width: int | None
    layers: int
    mlp: int | None
    autocast: bool
    device: str
    is_local: bool

    def recipe(self, hidden_size: int) -> Recipe:
        """Return how the head of a model with states of this size is made."""
        width = self.width or max(16, min(hidden_size, 1024) // 16 * 16)
        return Recipe(width, self.layers, self.mlp or 3 * width, self.steps, autocast=self.autocast)


def make(
    wish: Wish,
    *,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    **joining: Any,  # noqa: ANN401 - handed on to from_pretrained, which names and types them
) -> None:
    """Make a draft, or go on with one. Raises SwarmError."""
    if is_draft(wish.out) and not (wish.out / "work").exists():
        raise BadConfiguration("out", f"{str(wish.out)!r} has a draft that is complete; name another folder")
    try:
        torch.empty(1, device=wish.device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no CUDA at all
        raise BadConfiguration("device", f"{wish.device!r}: {str(error).splitlines()[0][:200]}") from None
    hub = {"revision": revision, "token": token, "cache_dir": cache_dir}
    checkpoint = open_checkpoint(wish.model, **hub)  # type: ignore[arg-type]
    limit = checkpoint.traits.positions_max
    if limit is not None and wish.positions > limit:
        raise BadConfiguration("positions", f"{wish.positions}; the model has {limit}")
    tokenizer = checkpoint.texts().tokenizer()
    config: Any = checkpoint.config.get_text_config(decoder=True)
    try:
        found = windows(
            tokenizer,
            texts_in(wish.texts),
            positions=wish.positions,
            windows_max=max(2, wish.tokens // wish.positions),
            vocabulary=config.vocab_size,
        )
    except OSError as error:
        raise BadConfiguration("texts", f"{error.filename}: {error.strerror}") from None
    with _source(checkpoint, wish, hub, joining) as source:
        recipe = wish.recipe(checkpoint.traits.hidden_size)
        plan = source.plan(found, recipe)
        click.echo(
            f"{found.numel():,} tokens; their states take {plan.state_bytes / 1e6:,.0f} MB in {str(wish.out)!r} "
            f"until the draft is made"
        )
        try:
            with stopping() as stop:
                is_complete = distil(source, found, wish.out, recipe, stop)
        except OSError as error:
            why = f"{error.strerror}; when that is mended, the same command goes on"
            raise BadConfiguration("out", f"{str(wish.out)!r}: {why}") from None
    if is_complete:
        click.echo(f"the draft is complete: swarm-generate {wish.model} --draft {wish.out}")
    else:
        click.echo("stopped; the same command goes on from here")


@contextmanager
def _source(checkpoint: Checkpoint, wish: Wish, hub: dict[str, Any], joining: dict[str, Any]) -> Iterator[Source]:
    """Load the model: all of it, or its ends before a swarm that is left again. Raises SwarmError."""
    name, root = checkpoint.public_name, checkpoint.root
    if wish.is_local:
        try:
            with one_at_a_time():
                whole: Any = AutoModelForCausalLM.from_pretrained(
                    wish.model, dtype="auto", trust_remote_code=False, attn_implementation=None, **hub
                )
        except (OSError, ValueError, KeyError) as error:
            raise BadConfiguration("model", f"it does not load: {str(error).splitlines()[0][:200]}") from None
        last_norm(whole)
        yield Source(whole.to(wish.device).eval(), name, root)
        return
    with AutoDistributedModel.from_pretrained(
        wish.model, root=root, draft="none", device=wish.device, **hub, **joining
    ) as model:
        last_norm(model)
        yield Source(model, name, root)
