"""Measures how large the inputs of each layer are in texts (`swarm.model.importance`), a few blocks at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn
from tqdm import tqdm

from swarm.blocks import Blocks
from swarm.model.checkpoint import Checkpoint
from swarm.model.ends import replace_blocks
from swarm.model.fourbits import FourBitMatrix
from swarm.model.hollow import blocks_of, class_for, decoder_of, skeleton
from swarm.model.kinds import kinds_in
from swarm.model.loading import block_bytes, load_ends, load_span
from swarm.model.quantising import refuse_to_quantise
from swarm.model.span import Span


def measured(checkpoint: Checkpoint, windows: Tensor) -> dict[str, Tensor]:
    """Return the mean squares of the inputs of all layers that int4 rounds, by the model's names of their weights.

    windows: tokens, int32 [windows, positions]; each is read by itself, in float32. Half of the free memory has blocks
    at a time. Experts have none: a text may never come to some of them. Raises what `load_span` does for "int4".
    """
    every = Blocks(0, checkpoint.n_blocks)
    refuse_to_quantise(checkpoint, skeleton(class_for(checkpoint.config), checkpoint.config), every, "int4")
    hidden = _embedded(checkpoint, windows)
    found: dict[str, Tensor] = {}
    at_once = max(1, psutil.virtual_memory().available // 2 // block_bytes(checkpoint, torch.float32))
    with tqdm(total=len(every) * len(hidden), desc="reading texts", unit="block", disable=None) as bar:
        for start in range(0, len(every), at_once):
            blocks = Blocks(start, min(start + at_once, len(every)))
            span = load_span(checkpoint, blocks, dtype=torch.float32)
            with _squares(span) as squares, torch.inference_mode():
                for number, each in enumerate(hidden):
                    hidden[number] = span.forward(each, cache=span.new_cache())
                    bar.update(len(blocks))
            found |= {name: (sums / windows.numel()).float() for name, sums in squares.items()}
            del span  # or the next one would be loaded beside it
    return found


def _embedded(checkpoint: Checkpoint, windows: Tensor) -> list[Tensor]:
    """Return the first block's input of each window, [1, positions, hidden_size]."""
    ends, found = load_ends(checkpoint, dtype=torch.float32), list[Tensor]()

    def keep(hidden: Tensor) -> Tensor:
        found.append(hidden)
        return hidden

    replace_blocks(ends, checkpoint.traits, keep)
    decoder, _ = decoder_of(ends)
    with torch.inference_mode():
        for window in windows:
            decoder(input_ids=window[None].long(), use_cache=False)
    return found


@contextmanager
def _squares(span: Span) -> Iterator[dict[str, Tensor]]:
    """Add up the squares of a span's inputs as they come: float64 [in], by the names of weights."""
    paths = {module: name for name, module in span.model.named_modules()}
    sums: dict[str, Tensor] = {}

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums[f"{paths[module]}.weight"] += inputs[0].double().square().flatten(0, -2).sum(0)

    hooks = []
    for index in span.blocks:
        for module, kind in kinds_in(blocks_of(span.model)[index], FourBitMatrix).items():
            if kind is FourBitMatrix and isinstance(module, nn.Linear):
                sums[f"{paths[module]}.weight"] = torch.zeros(module.in_features, dtype=torch.float64)
                hooks.append(module.register_forward_pre_hook(add))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
