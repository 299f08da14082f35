"""Checks that need running blocks: made on a few blocks of every span that is loaded.

Two things make a span silently wrong while every test with one session passes: blocks that keep state in themselves,
so that sessions leak into each other, and blocks that leave something for later blocks in a container that they
share. Both are looked for where they would be: in the modules, and in the arguments.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.blocks import Blocks
from swarm.errors import UnsupportedArchitecture
from swarm.model.direct import DirectPath, pretend
from swarm.model.hollow import Placeholder, blocks_of
from swarm.model.packed import PackedCache, PackedMask, Segment, configs_of
from swarm.model.recording import ParentRecorder
from swarm.model.span import Span

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of a norm


def check_span(span: Span) -> None:
    """Run a few blocks with two sessions in turns. Raises UnsupportedArchitecture if they do not keep apart."""
    name = span.traits.model_type
    layers = blocks_of(span.model)
    for index in samples_of(span):
        block = layers[index]
        part = span.part(Blocks(index, index + 1))
        watch = _Watch(block, _unread(span))
        before = _state(block)
        try:
            with torch.inference_mode():
                alone, leaked = _sessions(part)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise UnsupportedArchitecture(name, f"block {index} does not run alone: {str(error)[:200]}") from error
        finally:
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
    learn_direct_path(span)
    if not span.is_direct:
        return
    with torch.inference_mode():
        samples = [span.part(Blocks(index, index + 1)) for index in samples_of(span)]
        try:
            proved = all(_agrees(part, batch) for part in samples for batch in (1, 2))
        except Exception:  # noqa: BLE001 - arguments that do not fit break a block in any way
            proved = False
    if not proved:
        span.shared.direct = None


def learn_direct_path(span: Span) -> None:
    """Find out whether decode steps can go without the parent. Unproved: `prove_direct_path` is the public way."""
    shared = span.shared
    parent = ParentRecorder(shared, span.blocks)
    shared.direct = None
    with contextlib.suppress(Exception), torch.inference_mode():  # a parent may not bear the calls that are tried here
        path = DirectPath(parent.layers, parent.record, span.new_cache, span.device, shared.limits.direct)
        shared.direct = path.learned()


def prove_packing(span: Span) -> None:
    """Let a span run steps of many sessions as one, if its blocks then give the same as in solo runs.

    Two proofs, because windows and scalings far out would cost much to run into: the parent's arguments at distant
    positions, compared exactly; and the blocks' outputs for short sessions, within the arithmetic's tolerance.
    """
    span.shared.packs = False
    if not set(span.traits.kinds) <= {"full", "sliding"}:
        return
    with torch.inference_mode():
        samples = [span.part(Blocks(index, index + 1)) for index in samples_of(span)]
        try:
            proved = _told_alike(span) and all(_pack_agrees(part) for part in samples)
        except Exception:  # noqa: BLE001 - stand-ins for keys and masks break a block in any way
            proved = False
    span.shared.packs = proved


def _told_alike(span: Span) -> bool:
    """Compare the blocks' arguments at scattered positions, packed and alone."""
    far = 1 << 17
    limit = min(span.traits.positions_max or far, far)
    positions = sorted({limit - 1, 1, limit // 2, 5, limit // 3}, reverse=True)
    caches = [span.new_cache() for _ in positions]
    for cache, position in zip(caches, positions, strict=True):
        pretend(cache, position)
    parent = ParentRecorder(span.shared, span.blocks)
    alone = [parent.recorded(cache, position) for cache, position in zip(caches, positions, strict=True)]
    dummy = torch.zeros(1, 1, span.hidden_size, dtype=span.dtype, device=span.device)
    packed = parent.recorded_packed([Segment(dummy, cache) for cache in caches])
    return all(_joins(list(calls), call) for *calls, call in zip(*alone, packed, strict=True))


def _joins(parts: list[Any], whole: Any) -> bool:  # noqa: ANN401 - any argument of any block
    """Whether a packed step's argument is those of its sessions, put together."""
    if isinstance(whole, (PackedCache, PackedMask)):
        return True  # made of the sessions' own
    if isinstance(whole, Tensor):
        return all(isinstance(part, Tensor) and part.dim() == whole.dim() for part in parts) and _tile(parts, whole)
    if not all(type(part) is type(whole) for part in parts):
        return False
    if isinstance(whole, (tuple, list, dict)):
        return all(len(part) == len(whole) for part in parts) and _joins_each(parts, whole)
    return all(part == whole for part in parts)


def _joins_each(parts: list[Any], whole: Any) -> bool:  # noqa: ANN401 - a tuple, a list or a dictionary
    keys = list(whole) if isinstance(whole, dict) else list(range(len(whole)))
    return all(_joins([part[key] for part in parts], whole[key]) for key in keys)


def _tile(parts: list[Tensor], whole: Tensor) -> bool:
    """Whether a tensor is the parts side by side along some axis, or the same as every one of them."""
    joined = (torch.cat(parts, dim=axis) for axis in range(whole.dim()) if whole.shape[axis] == len(parts))
    return any(torch.equal(whole, each) for each in joined) or all(torch.equal(whole, part) for part in parts)


def _pack_agrees(part: Span) -> bool:
    """Compare a few ragged steps with solo ones. Where numbers are rounded, other experts may be chosen now and then.

    Quantised weights may come with rounded activations: there a difference in the last bit becomes one of a step.
    """
    exact = part.dtype is torch.float32 and not part.numeric_class.weights
    error_max = (
        TOLERANCES.get(part.dtype, 0.0) if exact else max(TOLERANCES.get(part.dtype, 0.0), TOLERANCES[torch.float16])
    )
    return any(_ragged_error(part, seed) < error_max for seed in range(1 if exact else 4))


def _ragged_error(part: Span, seed: int) -> float:
    """Return the largest error of a session's step relative to the solo one's norm."""
    generator = torch.Generator().manual_seed(seed)
    rows_of = (1, 1, 2, 1)  # the sessions of a ragged batch
    alone = [part.new_cache() for _ in rows_of]
    packed = [part.new_cache() for _ in rows_of]
    worst = 0.0
    for counts in ((3, 9, 2, 1), (1, 4, 1, 1), (1, 1, 1, 5)):  # their tokens, step by step
        steps = [_random(part, count, generator, rows) for count, rows in zip(counts, rows_of, strict=True)]
        expected = [part.forward(step, cache=cache) for step, cache in zip(steps, alone, strict=True)]
        got = part.forward_packed([Segment(step, cache) for step, cache in zip(steps, packed, strict=True)])
        errors = [
            (left - right).float().norm() / right.float().norm() for left, right in zip(got, expected, strict=True)
        ]
        worst = max(worst, *(error.item() for error in errors))
    return worst


def _agrees(part: Span, batch: int) -> bool:
    """Compare decode steps with and without the parent."""
    generator = torch.Generator().manual_seed(1)
    left, right = part.new_cache(), part.new_cache()
    prompt = _random(part, 3, generator, batch)
    part.forward_through_parent(prompt, cache=left)
    part.forward_through_parent(prompt, cache=right)
    for _ in range(3):
        step = _random(part, 1, generator, batch)
        direct = part.forward_directly(step, left)
        if direct is None or not torch.equal(direct, part.forward_through_parent(step, cache=right)):
            return False
    return True


def samples_of(span: Span) -> list[int]:
    """Return the first hosted block of each kind of class and memory, four at most: probing reads a block's weights."""
    layers = blocks_of(span.model)
    kinds: dict[tuple[str, ...], int] = {}
    for index in span.blocks:
        parts = tuple(sorted({type(module).__name__ for module in layers[index].modules()}))
        kinds.setdefault((span.traits.kinds[index], *parts), index)
    return list(kinds.values())[:4]


def outputs_of(part: Span) -> list[Tensor]:
    """Return the outputs of a short prefill and of one token behind it."""
    generator = torch.Generator().manual_seed(2)
    cache = part.new_cache()
    steps = [_random(part, tokens, generator) for tokens in (9, 1)]
    return [part.forward_through_parent(step, cache=cache) for step in steps]


def agrees(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    """Whether outputs are the same. tolerance: of a difference's norm, relative to that of the expected one."""
    return all(
        float((left - right).float().norm() / right.float().norm()) < tolerance
        for left, right in zip(got, expected, strict=True)
    )


def replace_attention(span: Span, old: str, new: str, tolerance: float) -> bool:
    """Use another attention implementation if it gives the same outputs, as `agrees` says. Returns whether it does."""
    if all(config._attn_implementation != old for config in configs_of(span.model)):
        return False  # before blocks are run for it
    parts = [span.part(Blocks(index, index + 1)) for index in samples_of(span)]
    with torch.inference_mode():
        expected = [output for part in parts for output in outputs_of(part)]
        span.shared.change_attention(old, new)
        try:
            got = [output for part in parts for output in outputs_of(part)]
        except Exception:  # noqa: BLE001 - a family may look at the name
            got = []
    if got and agrees(got, expected, tolerance):
        return True
    span.shared.change_attention(new, old)
    return False


def _sessions(part: Span) -> tuple[Tensor, Tensor]:
    """Run one session alone, then the same one taking turns with another. Returns both outputs."""
    generator = torch.Generator().manual_seed(0)
    counts = (3, 1, 2)  # tokens of a prefill, of a decode step, of a chunk after history
    steps = [_random(part, count, generator) for count in counts]
    others = [_random(part, count, generator) for count in counts]
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

    def __init__(self, block: nn.Module, unread: Collection[str]) -> None:
        """unread: arguments that no block reads."""
        self.wrote = False
        self._unread = unread
        self._sizes: list[int] = []
        self._hooks = (
            block.register_forward_pre_hook(self._before, with_kwargs=True),
            block.register_forward_hook(self._after, with_kwargs=True),
        )

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._sizes = self._sizes_of(args, kwargs)

    def _after(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: object) -> None:
        self.wrote |= self._sizes != self._sizes_of(args, kwargs)

    def _sizes_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        values = (*args, *(value for name, value in kwargs.items() if name not in self._unread))
        return [len(container) for container in _containers(values)]


def _unread(span: Span) -> Collection[str]:
    """Return arguments that no block reads: Gemma 4's writes keys there in `transformers` 5.24 if none are shared."""
    config = span.model.config.get_text_config(decoder=True)
    return ("shared_kv_states",) if getattr(config, "num_kv_shared_layers", None) == 0 else ()


def _containers(values: Sequence[Any]) -> Iterator[Any]:
    """Yield arguments that a block could leave data in: dictionaries, lists and the like."""
    for value in values:
        if hasattr(value, "__setitem__") and hasattr(value, "__len__") and not isinstance(value, Tensor):
            yield value


def _state(block: nn.Module) -> dict[str, object]:
    """Return the state of a block besides its parameters: attributes by identity, buffers by version."""
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
