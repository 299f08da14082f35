"""Steps of many sessions in one call: all their tokens as one row, and each session's past kept apart in attention.

Linear layers, norms and experts treat all tokens alike; they run once over [1, N, hidden]. Only attention needs the
sessions. They travel in arguments that a parent hands through anyway. Its cache is a `PackedCache`: `update` appends
every session's new keys to that session's own cache, and returns the pasts side by side. Its mask is a `PackedMask`: a
recipe, from which every session's own mask is made. Both reach the attention function registered here, which gives
each session to the family's own one. So positions, windows, chunks and sinks are the family's. Single steps with short
pasts go to it together (`swarm.model.together`), where its masks leave nothing of a past out.

Families whose blocks look at keys or masks before they hand them on, or whose states are no keys and values, break on
these replacements or disagree with solo runs: `swarm.model.probe` tries it when a span is loaded.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from swarm.model.cache import SpanCache
from swarm.model.growing import GrowingLimits
from swarm.model.together import Joined, Together

PACKED = "swarm_packed"  # the attention implementation while packed steps run


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's share of a packed step.

    hidden: [rows, tokens, hidden_size]. positions: int64 [rows or 1, tokens]; None counts on from the cache's length.
    No position is padding.
    """

    hidden: Tensor
    cache: SpanCache
    positions: Tensor | None = None

    @property
    def rows(self) -> int:
        """The session's rows."""
        return self.hidden.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of each row."""
        return self.hidden.shape[1]

    @property
    def size(self) -> int:
        """Tokens in the packed row, where they lie row after row."""
        return self.hidden.shape[0] * self.hidden.shape[1]


def packed_positions(segments: Sequence[Segment]) -> Tensor:
    """The position ids of all tokens of a packed step, int64 [N]."""
    if all(segment.positions is None and segment.size == 1 for segment in segments):  # a tensor for each takes longer
        return torch.tensor([segment.cache.length for segment in segments], device=segments[0].hidden.device)
    return torch.cat([_positions(segment) for segment in segments])


def _positions(segment: Segment) -> Tensor:
    positions, past, device = segment.positions, segment.cache.length, segment.hidden.device
    if positions is None:
        positions = torch.arange(past, past + segment.tokens, device=device)[None]
    return positions.expand(segment.rows, -1).reshape(-1)


class PackedCache(Cache):
    """The cache of a parent during a packed step."""

    def __init__(self, segments: Sequence[Segment], solo: Mapping[int, str], together: Together | None = None) -> None:
        """solo: for each of the model's configs, by its `id`, the attention implementation of solo steps.

        together: the model's shared pasts; None keeps each session's apart.
        """
        super().__init__(layers=list(segments[0].cache.bare_layers))  # for the kinds of layers
        self.segments = segments
        self.solo = solo
        self.pasts = [segment.cache.length for segment in segments]
        self.sizes = [segment.size for segment in segments]
        self._together = together

    @cached_property
    def joined(self) -> Joined | None:
        """The single steps with short pasts, in slots: the first layer that is updated brings them there."""
        if self._together is None:
            return None
        ends = list(accumulate(self.sizes))
        single = [number for number, size in enumerate(self.sizes) if size == 1]
        caches = [self.segments[number].cache for number in single]
        joined = self._together.join(caches, single, [ends[number] - 1 for number in single])
        for number in set(range(len(self.segments))).difference(joined.numbers if joined else ()):
            if self.segments[number].cache.slot is not None:
                self.segments[number].cache.come_out()
        return joined

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Append [1, heads, N, size] to the sessions' caches. Returns their pasts as `PackedStates`, twice."""
        keys, values = PackedStates(self), PackedStates(self)
        apart: Sequence[int] = range(len(self.segments))
        joined = self.joined
        if joined is not None and layer_idx in joined.slots.layers:
            keys.joined = values.joined = joined
            keys.states, values.states = joined.append(layer_idx, key_states, value_states)
            if len(joined.numbers) == len(self.segments):
                return keys, values
            apart = [number for number in apart if number not in joined.numbers]
        new_keys, new_values = key_states.split(self.sizes, dim=2), value_states.split(self.sizes, dim=2)
        for number in apart:
            segment = self.segments[number]
            layer = segment.cache.bare_layers[layer_idx]
            new = _rows(new_keys[number], segment), _rows(new_values[number], segment)
            keys.parts[number], values.parts[number] = layer.update(*new, *args, **kwargs)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: lengths are the sessions' own."""
        del layer_idx
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, as `get_seq_length`."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return sizes that no mask is made of: masks are made for each session."""
        del layer_idx
        return query_length, 0


@dataclass(slots=True)
class PackedStates:
    """Keys or values of all sessions of a packed step in one layer. No tensor, so that computing with it fails.

    states: those of the joined ones, as `Joined.append` returns them. parts: those of all others, by their numbers.
    """

    cache: PackedCache
    parts: dict[int, Tensor] = field(default_factory=dict)
    joined: Joined | None = None
    states: Tensor | None = None

    def part(self, number: int) -> Tensor:
        """Return one segment's, [rows, heads, length, size]."""
        if self.joined is None or self.states is None or number in self.parts:
            return self.parts[number]
        return self.joined.part(self.states, number)


class PackedMask:
    """A recipe of the masks that a parent would have made for each session alone."""

    def __init__(self, config: PretrainedConfig, arguments: dict[str, Any]) -> None:
        self._config = config
        self._arguments = arguments
        self._made: dict[tuple[int, int], Tensor | None] = {}

    @property
    def shows_all(self) -> bool:
        """Whether the last position of any past sees all of it."""
        plain = self._arguments.get("mask_function", causal_mask_function) is causal_mask_function
        return plain and self._arguments.get("allow_is_causal_skip", True) and not self._arguments.get("local_size")

    def of(self, cache: PackedCache, number: int, kv_length: int) -> Tensor | None:
        """The mask of segment `number` for the last `kv_length` of its positions, as its parent alone would make it."""
        key = number, kv_length
        if key not in self._made:
            segment, past = cache.segments[number], cache.pasts[number]
            make = ALL_MASK_ATTENTION_FUNCTIONS[cache.solo[id(self._config)]]
            self._made[key] = make(
                **self._arguments,
                config=self._config,
                batch_size=1,  # without padding all rows have the same
                q_length=segment.tokens,
                kv_length=kv_length,
                q_offset=past,
                kv_offset=past + segment.tokens - kv_length,
                attention_mask=None,
            )
        return self._made[key]


class Packing:
    """Turns one model to packed attention for the time of a call. Used by the model's one compute thread."""

    def __init__(self, configs: Sequence[PretrainedConfig], joins: GrowingLimits | None) -> None:
        """configs: all that the model's modules look at.

        joins: which pasts are short enough to be attended by one call; None for none.
        """
        self._configs = [(config, str(config._attn_implementation)) for config in configs]
        self.solo = {id(config): name for config, name in self._configs}
        self.joins = joins
        self.together = None if joins is None else Together(joins)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Use packed attention in this block."""
        for config, _ in self._configs:
            config._attn_implementation_internal = PACKED
        try:
            yield
        finally:
            for config, name in self._configs:
                config._attn_implementation_internal = name


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """All configs that modules of a model hold, each once."""
    found = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), PretrainedConfig)
    }
    return list(found.values())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: PackedStates,
    value: PackedStates,
    attention_mask: PackedMask | None,
    **kwargs: Any,  # noqa: ANN401 - as the family calls its attention
) -> tuple[Tensor, None]:
    """Give each session to the family's own attention. query: [1, heads, N, size]; returns [1, N, heads, size]."""
    cache = key.cache
    attend = _solo_attention(module, cache)
    positions = kwargs.pop("position_ids", None)
    of_each = None if positions is None else positions.split(cache.sizes, dim=1)
    outputs: list[Tensor | None] = [None] * len(cache.segments)
    joined = key.joined if _sees_all(attend, attention_mask) else None
    if joined is not None and key.states is not None and value.states is not None:
        mask = joined.mask(query)
        output = attend(module, joined.queries(query), key.states, value.states, mask, **kwargs)[0]
        output = joined.answers(output)
        if len(joined.numbers) == len(outputs):
            return output.transpose(0, 1), None
        for number, own in zip(joined.numbers, output.split(1), strict=True):
            outputs[number] = own
    states = query.split(cache.sizes, dim=2)
    for number, segment in enumerate(cache.segments):
        if outputs[number] is not None:
            continue
        keys = key.part(number)
        mask = attention_mask.of(cache, number, keys.shape[-2]) if attention_mask is not None else None
        if of_each is not None:
            kwargs["position_ids"] = of_each[number].reshape(segment.rows, segment.tokens)
        output = attend(module, _rows(states[number], segment), keys, value.part(number), mask, **kwargs)[0]
        one = output if output.shape[0] == 1 else output.reshape(1, cache.sizes[number], *output.shape[2:])
        outputs[number] = one
    return torch.cat([output for output in outputs if output is not None], dim=1), None


def _sees_all(attend: Callable[..., Any], mask: PackedMask | None) -> bool:
    """Whether single positions see all of their pasts, in an attention that takes a mask, and looks at nothing else."""
    return attend is sdpa_attention_forward and (mask is None or mask.shows_all)


def packed_mask(*, config: PretrainedConfig, **arguments: Any) -> PackedMask:  # noqa: ANN401 - as all mask makers
    """Return a recipe in the place of the mask that a parent wants to be made."""
    for own in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask"):
        arguments.pop(own, None)
    return PackedMask(config, arguments)


def _solo_attention(module: nn.Module, cache: PackedCache) -> Callable[..., Any]:
    """Return the attention of solo steps; a family's eager one is in its module."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(cache.solo[id(module.config)], eager)
    return found


def _rows(states: Tensor, segment: Segment) -> Tensor:
    """[1, heads, rows * tokens, size] -> [rows, heads, tokens, size]."""
    if segment.rows == 1:
        return states
    heads, size = states.shape[1], states.shape[3]
    return states.reshape(heads, segment.rows, segment.tokens, size).transpose(0, 1)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, packed_mask)
