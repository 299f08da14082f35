"""`swarm-serve` that computes something else than it announces: `python -m tests.support.lying_server`."""

import os
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from swarm.model.loading import load_span
from swarm.model.span import Span
from swarm.server import loader
from swarm.server.cli import main

LIE = "SWARM_TEST_LIE"  # one of LIES
OFF, RARELY = 0.05, 0.01


def weights_of(span: Span, block: int) -> dict[str, nn.Parameter]:
    """The parameters of one block, by their names within it."""
    mark = f"layers.{block}."
    return {name.partition(mark)[2]: each for name, each in span.model.named_parameters() if mark in name}


def leave_out(span: Span) -> None:
    """A block of which attention and feed-forward add nothing."""
    for name, parameter in weights_of(span, span.blocks.start).items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()


def swap(span: Span) -> None:
    """Two blocks that have changed places."""
    first, second = (weights_of(span, span.blocks.start + at) for at in (0, 1))
    for name, parameter in first.items():
        kept = parameter.data.clone()
        parameter.data.copy_(second[name].data)
        second[name].data.copy_(kept)


def take_others(span: Span) -> None:
    """Each block has the weights of the next; the last one those of the first."""
    blocks = list(span.blocks)
    before = {at: {name: each.data.clone() for name, each in weights_of(span, at).items()} for at in blocks}
    for at, other in zip(blocks, (*blocks[1:], blocks[0]), strict=True):
        for name, parameter in weights_of(span, at).items():
            parameter.data.copy_(before[other][name])


def round_weights(span: Span) -> None:
    """Weights in 4 bits, in groups of 32 with a scale each, announced as what they were."""
    for at in span.blocks:
        for parameter in weights_of(span, at).values():
            if parameter.dim() == 2 and parameter.numel() % 32 == 0:
                groups = parameter.data.float().view(-1, 32)
                scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
                parameter.data.copy_(((groups / scale).round().clamp(-8, 7) * scale).view_as(parameter))


def perturb(span: Span) -> None:
    """One of 100 positions is 5 % off, in steps of one position and in prompts alike."""
    drawn, residual = Random(0), Tensor()
    last = {name.partition(f"layers.{span.blocks.stop - 1}.")[2]: each for name, each in span.model.named_modules()}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal residual
        residual = inputs[0]

    def change(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        wrong = torch.tensor([drawn.random() < RARELY for _ in range(output.shape[-2])])
        whole = residual.view_as(output) + output
        noise = torch.randn_like(output) * wrong[:, None] * whole.norm(dim=-1, keepdim=True)
        return output + OFF * noise / output.shape[-1] ** 0.5

    last["post_attention_layernorm"].register_forward_pre_hook(note)
    last["mlp"].register_forward_hook(change)


LIES = {"left out": leave_out, "swapped": swap, "others": take_others, "4 bits": round_weights, "1 of 100": perturb}


def lying(*arguments: Any, **options: Any) -> Span:
    """Load a span as `load_span` does, and change it."""
    span = load_span(*arguments, **options)
    with torch.no_grad():
        LIES[os.environ[LIE]](span)
    return span


if __name__ == "__main__":
    loader.load_span = lying
    main()
