"""A stock model beside the same model as a ring of spans, for comparing logits."""

import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from swarm.blocks import Blocks
from swarm.model.cache import SpanCache
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.ends import replace_blocks
from swarm.model.growing import GrowingLimits
from swarm.model.loading import load_ends, load_span
from swarm.model.span import Span, SpanLimits
from tests.families import make

SHARD_SIZE = "60KB"  # several files for every family
GROWS = SpanLimits(growing=GrowingLimits(small_bytes=0))  # these models are small, and grow as large ones do
CUTS = ((0, 1), (1, 4), (4, 6))  # uneven; the second and third are without block 0


def save_family(name: str, directory: Path) -> Path:
    """Write a family's tiny random model as a checkpoint of several files."""
    return save_model(make(name), directory)


def save_model(config: PretrainedConfig, directory: Path) -> Path:
    """Write a random model of this config."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases that are all zero and norms that are all one would hide mistakes.
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    return directory


@dataclass(frozen=True, slots=True)
class Pair:
    """One family: stock model, opened checkpoint, and the client's part of it."""

    full: PreTrainedModel
    checkpoint: Checkpoint
    ends: PreTrainedModel
    loaded: dict[tuple[int, int], Span] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> "Pair":
        checkpoint = open_checkpoint(directory)
        return cls(AutoModelForCausalLM.from_pretrained(directory).eval(), checkpoint, load_ends(checkpoint))

    def spans(self, *cuts: tuple[int, int]) -> list[Span]:
        """Spans of these blocks, each loaded by itself and kept; their weights are not to be changed."""
        for cut in cuts:
            if cut not in self.loaded:
                self.loaded[cut] = load_span(self.checkpoint, Blocks(*cut), limits=GROWS)
        return [self.loaded[cut] for cut in cuts]

    def ring(self, spans: list[Span], rollback_max: int = 0) -> "Ring":
        return Ring(self, spans, rollback_max)

    def stock(self) -> "Stock":
        return Stock(self)

    def inputs(self, tokens: Tensor, past: int, mask: Tensor | None) -> dict[str, Tensor]:
        """Positions as generate() passes them, and the mask, where the family takes them."""
        positions = torch.arange(past, past + tokens.shape[1])[None]
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        given = {"attention_mask": mask, "position_ids": positions}
        known = inspect.signature(self.full.forward).parameters
        return {key: value for key, value in given.items() if key in known and value is not None}


class Stock:
    """One session of the stock model."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        module = sys.modules[type(pair.full.get_decoder()).__module__]
        special = getattr(module, "MiniMaxCache", None)
        self.cache = special() if special is not None else DynamicCache(config=pair.full.config)
        self.length = 0

    def step(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens: [batch, n]. Returns logits [batch, n, vocabulary]."""
        arguments = self.pair.inputs(tokens, self.length, mask)
        cache = {self.pair.checkpoint.traits.cache_argument: self.cache}
        self.length += tokens.shape[1]
        return self.pair.full(tokens, use_cache=True, **cache, **arguments).logits


class Ring:
    """One session of the spans, with the client's part in front and behind."""

    def __init__(self, pair: Pair, spans: list[Span], rollback_max: int) -> None:
        self.pair = pair
        self.spans = spans
        self.caches: list[SpanCache] = [span.new_cache(rollback_max) for span in spans]

    @property
    def length(self) -> int:
        return self.caches[0].length

    def step(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens: [batch, n]. Returns logits [batch, n, vocabulary]."""
        arguments = self.pair.inputs(tokens, self.length, mask)
        positions = arguments.get("position_ids") if mask is not None else None

        def remote(hidden: Tensor) -> Tensor:
            for span, cache in zip(self.spans, self.caches, strict=True):
                hidden = span.forward(hidden, cache=cache, positions=positions, mask=mask)
            return hidden

        replace_blocks(self.pair.ends, self.pair.checkpoint.traits, remote)
        return self.pair.ends(tokens, use_cache=False, **arguments).logits

    def keep(self, n_positions: int) -> None:
        for cache in self.caches:
            cache.keep(n_positions)

    def gather(self, rows: Tensor) -> None:
        for cache in self.caches:
            cache.gather(rows)


def difference(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference."""
    assert left.shape == right.shape
    return float((left - right).abs().max())


def tokens(batch: int, count: int, seed: int = 1) -> Tensor:
    """Random token ids without special ones, [batch, count]."""
    return torch.randint(3, 120, (batch, count), generator=torch.Generator().manual_seed(seed))
