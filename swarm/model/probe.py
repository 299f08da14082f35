"""What only shows when blocks run: checked on a few blocks whenever a span is loaded.

Two things make a span silently wrong while every test with one session passes: blocks that keep state in themselves,
so that sessions leak into each other, and blocks that leave something for later blocks in a container that they
share. Both are looked for where they would be: in the modules, and in the arguments.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from swarm.blocks import Blocks
from swarm.errors import UnsupportedArchitecture
from swarm.model.hollow import Placeholder, blocks_of
from swarm.model.span import Span

PROBE_TOKENS = (3, 1, 2)  # prefill, decode, a chunk after history
PROBE_DECODES = 3
PROBE_BLOCKS_MAX = 4  # one of each kind is enough, and probing reads a block's weights


def check_span(span: Span) -> None:
    """Run a few blocks with two sessions in turns. Raises UnsupportedArchitecture if they do not keep apart."""
    name = span.traits.model_type
    layers = blocks_of(span.model)
    for index in _samples(span):
        block = layers[index]
        part = span.part(Blocks(index, index + 1))
        watch = _Watch(block)
        before = _state(block)
        with torch.inference_mode():
            alone, leaked = _sessions(part)
        watch.end()
        if _differs(before, _state(block)):
            raise UnsupportedArchitecture(
                name, f"block {index} keeps state in itself; sessions would leak into each other"
            )
        if not torch.equal(alone, leaked):
            raise UnsupportedArchitecture(name, f"block {index} computes something else when two sessions take turns")
        if watch.wrote:
            raise UnsupportedArchitecture(name, f"block {index} leaves data for later blocks in an argument they share")


def prove_direct_path(span: Span) -> None:
    """Let a span take the short way for decode, if on its blocks it gives the same bits as the parent's."""
    span.learn_direct_path()
    if not span.is_direct:
        return
    with torch.inference_mode():
        samples = [span.part(Blocks(index, index + 1)) for index in _samples(span)]
        try:
            proved = all(_agrees(part, batch) for part in samples for batch in (1, 2))
        except Exception:  # noqa: BLE001 - arguments that do not fit break a block in any way
            proved = False
    if not proved:
        span.forget_direct_path()


def _agrees(part: Span, batch: int) -> bool:
    """Compare decode steps with and without the parent."""
    generator = torch.Generator().manual_seed(1)
    left, right = part.new_cache(), part.new_cache()
    prompt = _random(part, PROBE_TOKENS[0], generator, batch)
    part.forward_through_parent(prompt, cache=left)
    part.forward_through_parent(prompt, cache=right)
    for _ in range(PROBE_DECODES):
        step = _random(part, 1, generator, batch)
        direct = part.forward_directly(step, left)
        if direct is None or not torch.equal(direct, part.forward_through_parent(step, cache=right)):
            return False
    return True


def _samples(span: Span) -> list[int]:
    """The first hosted block of each kind of class and memory."""
    layers = blocks_of(span.model)
    kinds: dict[tuple[str, ...], int] = {}
    for index in span.blocks:
        parts = tuple(sorted({type(module).__name__ for module in layers[index].modules()}))
        kinds.setdefault((span.traits.kinds[index], *parts), index)
    return list(kinds.values())[:PROBE_BLOCKS_MAX]


def _sessions(part: Span) -> tuple[Tensor, Tensor]:
    """Run one session alone, then the same one taking turns with another. Returns both outputs."""
    generator = torch.Generator().manual_seed(0)
    steps = [_random(part, count, generator) for count in PROBE_TOKENS]
    others = [_random(part, count, generator) for count in PROBE_TOKENS]
    cache = part.new_cache()
    alone = [part.forward(step, cache=cache) for step in steps]
    first, second = part.new_cache(), part.new_cache()
    turns = []
    for step, other in zip(steps, others, strict=True):
        turns.append(part.forward(step, cache=first))
        part.forward(other, cache=second)
    return torch.cat(alone, 1), torch.cat(turns, 1)


def _random(part: Span, tokens: int, generator: torch.Generator, batch: int = 1) -> Tensor:
    return torch.randn(batch, tokens, part.hidden_size, generator=generator).to(part.device, part.dtype)


class _Watch:
    """Looks whether a block changes a container among its arguments."""

    def __init__(self, block: nn.Module) -> None:
        self.wrote = False
        self._sizes: list[int] = []
        self._hooks = (
            block.register_forward_pre_hook(self._before, with_kwargs=True),
            block.register_forward_hook(self._after, with_kwargs=True),
        )

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._sizes = [len(container) for container in _containers(args, kwargs)]

    def _after(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: object) -> None:
        self.wrote |= self._sizes != [len(container) for container in _containers(args, kwargs)]


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments that a block could leave something in: dictionaries, lists and the like."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "__setitem__") and hasattr(value, "__len__") and not isinstance(value, Tensor):
            yield value


def _state(block: nn.Module) -> dict[str, object]:
    """What a block has besides its parameters: attributes by identity, buffers by version."""
    state: dict[str, object] = {}
    for name, module in block.named_modules():
        if isinstance(module, Placeholder):
            continue
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "training":
                state[f"{name}.{key}"] = (value, _version(value)) if isinstance(value, Tensor) else value
        for key, buffer in module.named_buffers(recurse=False):
            state[f"{name}.{key}"] = (buffer, _version(buffer))
    return state


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors made under inference_mode do not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _differs(before: dict[str, object], after: dict[str, object]) -> bool:
    """Compare two states: tensors by identity and version, other attributes by identity or value."""
    if before.keys() != after.keys():
        return True
    return any(not _same(before[key], after[key]) for key in before)


def _same(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right) == 2:
        return left[0] is right[0] and left[1] == right[1]
    if left is right:
        return True
    return type(left) is type(right) and isinstance(left, (int, float, str, bool, tuple, list)) and left == right
