"""Traits of a model family: found from its classes on the meta device, before any weight is fetched.

A family is refused here, with the reason, when something besides one hidden state [batch, tokens, hidden_size] passes
from the embeddings or from block to block. A few are refused by name; unknown ones by a trace: the tokens that go
into the model are marked, every operation hands the mark on, and a block that receives a marked tensor beside its
hidden state depends on the tokens. Traits that only show when blocks run (state in modules, keys shared through a
dictionary) are refused by `swarm.model.probe`.
"""

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from swarm.blocks import BLOCKS_MAX, Blocks
from swarm.errors import UnsupportedArchitecture
from swarm.model.cache import new_cache
from swarm.model.hollow import Placeholder, blocks_of, decoder_of, hidden_of, hollow_class, skeleton, text_config

TRACE_TOKENS = 3  # of the traced call

REFUSED = {
    "recurrent_gemma": "its blocks keep their state in themselves, so that sessions would leak into each other",
    "gemma3n": "its blocks hand on a stack of four states and share keys and values",
    "gemma3n_text": "its blocks hand on a stack of four states and share keys and values",
    "deepseek_v4": "its blocks need the token ids, and hand on several states at once",
}


@dataclass(frozen=True, slots=True)
class Traits:
    """The facts that are the same for every span and every client of a model."""

    model_type: str
    n_blocks: int
    hidden_size: int  # of the state between blocks
    embedding_size: int  # of the decoder's inputs_embeds; OPT's differs from hidden_size
    kinds: tuple[str, ...]  # per block, its memory: "full", "sliding", "conv", "linear" or "none"
    returns: int  # 0: blocks return a tensor; n: a tuple of n that it leads
    idle: tuple[str, ...]  # the decoder's own modules, such as its final norm, whose weights a span does not need
    cache_argument: str  # the decoder's keyword for the cache, such as "past_key_values"
    takes_positions: bool  # whether the decoder has position_ids
    can_roll_back: bool  # whether positions can be taken back, given that the session was opened with a rollback
    positions_max: int | None  # the config's declared limit, if any
    has_wide_residual: bool  # whether blocks hand on float32 in whatever dtype they compute, as Mamba's do

    def cache_in(self, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the caller passed
        """Return the cache among a forward's keyword arguments, and leave it there by the name that the family has."""
        for name in cache_names():
            if name != self.cache_argument and name in arguments:
                arguments.setdefault(self.cache_argument, arguments.pop(name))
        return arguments.get(self.cache_argument)


def cache_names() -> tuple[str, ...]:
    """Return the keywords by which forwards have taken their cache, the newest first."""
    return "cache", "cache_params", "past_key_values"


def cache_argument_of(parameters: Container[str]) -> str:
    """Return a forward's keyword for its cache. Code that is not `transformers`' own may still have an older one."""
    return next((name for name in cache_names() if name in parameters), cache_names()[-1])


def traits_of(config: PretrainedConfig) -> Traits:
    """Examine a family. Raises UnsupportedArchitecture with the reason why it cannot be split."""
    decoder_config = text_config(config)
    _refuse_by_config(config, decoder_config)
    try:
        model = skeleton(hollow_class(config, None), config)
    except UnsupportedArchitecture:
        raise
    except Exception as error:  # a family's own constructor may break in any way
        raise UnsupportedArchitecture(str(config.model_type), f"its model cannot be built: {error}") from error
    decoder, _ = decoder_of(model)
    # Some parents warn about padding by looking at the tokens' values, which tokens on the meta device do not have.
    decoder.config = copy.copy(decoder.config)
    decoder.config.pad_token_id = None
    parameters = inspect.signature(decoder.forward).parameters
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    kinds = _kinds(decoder_config, decoder)
    cache_argument = cache_argument_of(parameters)
    returns = _trace(model, int(decoder_config.hidden_size), cache_argument)
    return Traits(
        model_type=str(config.model_type),
        n_blocks=int(decoder_config.num_hidden_layers),
        hidden_size=int(decoder_config.hidden_size),
        embedding_size=int(embeddings.shape[-1]),
        kinds=kinds,
        returns=returns,
        idle=_idle_modules(model, returns, cache_argument),
        cache_argument=cache_argument,
        takes_positions="position_ids" in parameters,
        can_roll_back="linear" not in kinds,
        positions_max=_positions_max(decoder_config),
        has_wide_residual=bool(getattr(decoder_config, "residual_in_fp32", False)),
    )


def _refuse_by_config(config: PretrainedConfig, decoder_config: PretrainedConfig) -> None:
    """Refuse families whose config shows that they cannot be split."""
    name = str(config.model_type)
    n_blocks = decoder_config.num_hidden_layers
    if not isinstance(n_blocks, int) or not 1 <= n_blocks <= BLOCKS_MAX:  # before any is made
        raise UnsupportedArchitecture(name, f"its config says {n_blocks!r:.40} blocks; 1 to {BLOCKS_MAX} are possible")
    for model_type in (name, str(decoder_config.model_type)):
        if model_type in REFUSED:
            raise UnsupportedArchitecture(name, REFUSED[model_type])
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(name, "it has an encoder")
    if getattr(decoder_config, "hidden_size_per_layer_input", None):
        raise UnsupportedArchitecture(
            name, "each of its blocks needs its own embedding of the tokens (per-layer inputs)"
        )
    shares = "reuse" in (getattr(decoder_config, "kv_sharing_modes", None) or ())
    if shares or getattr(decoder_config, "num_kv_shared_layers", None):
        raise UnsupportedArchitecture(name, "its later blocks use the keys and values of earlier ones")
    _refuse_dynamic_scaling(name, decoder_config)


def _refuse_dynamic_scaling(name: str, decoder_config: PretrainedConfig) -> None:
    if any(scaling.get("rope_type") == "dynamic" for scaling in _scalings(decoder_config)):
        raise UnsupportedArchitecture(name, "dynamic rotary scaling changes with the longest session so far")


def _scalings(decoder_config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary embeddings' parameters: those of all layers, or of each type of layer."""
    rope = getattr(decoder_config, "rope_parameters", None) or {}
    return [scaling for scaling in (rope, *rope.values()) if isinstance(scaling, dict)]


def _positions_max(decoder_config: PretrainedConfig) -> int | None:
    """Return the config's limit.

    Beyond the original length, `longrope` takes other factors for all positions of a call. Keys of earlier calls keep
    theirs, so the outputs would depend on how a prompt is cut.
    """
    limits = [getattr(decoder_config, "max_position_embeddings", None)]
    for scaling in _scalings(decoder_config):
        if scaling.get("rope_type") == "longrope":
            original = getattr(decoder_config, "original_max_position_embeddings", None)
            limits.append(scaling.get("original_max_position_embeddings") or original)
    return min((limit for limit in limits if limit is not None), default=None)


def _kinds(decoder_config: PretrainedConfig, decoder: PreTrainedModel) -> tuple[str, ...]:
    """Name the kind of each block's cache. Raises UnsupportedArchitecture for a cache that is not known."""
    if hasattr(sys.modules[type(decoder).__module__], "MiniMaxCache"):
        return tuple("linear" if kind == "linear_attention" else "full" for kind in decoder_config.layer_types)
    layer_types = getattr(decoder_config, "layer_types", None) or ()
    try:
        layers = DynamicCache(config=decoder_config).layers
    except (KeyError, AttributeError, TypeError) as error:
        raise UnsupportedArchitecture(
            str(decoder_config.model_type), f"transformers has no cache for it: {error}"
        ) from None
    kinds = []
    for index, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kinds.append("conv" if index < len(layer_types) and layer_types[index] == "conv" else "linear")
        elif isinstance(layer, DynamicSlidingWindowLayer):
            kinds.append("sliding")
        else:
            kinds.append("full" if hasattr(layer, "lazy_initialization") else "none")
    return tuple(kinds)


class _Marked(torch.Tensor):
    """A tensor that was computed from the tokens: torch hands the subclass on to every result."""


class _Witness(Placeholder):
    """Takes the place of a block while tracing; keeps its arguments and its result."""

    def __init__(self, original: nn.Module, returns: int, *, fills: bool) -> None:
        """fills: what it returns beside its hidden state are marked tensors, not None."""
        super().__init__(original, returns)
        self.got: Any = None
        self.beside: list[Any] = []
        self.gave: Tensor | None = None
        self._fills = fills

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return a fresh tensor of the input's shape, so that the next block's input differs from this one's."""
        self.got = hidden_of(args, kwargs)
        self.beside = [*args[1:], *(value for key, value in kwargs.items() if key != "hidden_states")]
        self.gave = torch.empty_like(self.got)
        wrapped = self.wrap(self.gave)
        if not self._fills or not isinstance(wrapped, tuple):
            return wrapped
        return wrapped[0], *(torch.empty_like(self.got).as_subclass(_Marked) for _ in wrapped[1:])


def _trace(model: PreTrainedModel, hidden_size: int, cache_argument: str) -> int:
    """Run the model's own code around its blocks on marked tokens. Returns their return structure: `Traits.returns`.

    The client never has a block to look at, so it is the parent that is asked: with the right structure, the next block
    receives the very object that a block returned.
    """
    name = str(model.config.model_type)
    first_failure: Exception | None = None
    for returns in (0, 1, 2, 3):  # the most frequent first: a tensor, or a tuple of so many
        witnesses, failure = _run(model, returns, cache_argument, marked=True)
        first_failure = first_failure or failure
        _refuse_boundary(name, witnesses[0], hidden_size)
        handed_on = all(b.got is not None and b.got is a.gave for a, b in itertools.pairwise(witnesses))
        if handed_on and (failure is None or len(witnesses) > 1):
            _refuse_side_channel(name, witnesses)
            if returns > 1:
                filled, _ = _run(model, returns, cache_argument, marked=False, fills=True)
                _refuse_second_state(name, filled, model.config)
            return returns
    why = f"the result of a block does not reach the next block unchanged ({first_failure})"
    raise UnsupportedArchitecture(name, why)


def _run(
    model: PreTrainedModel, returns: int, cache_argument: str, *, marked: bool, fills: bool = False
) -> tuple[list[_Witness], Exception | None]:
    """Call the decoder with witnesses in the place of its blocks. marked: the tokens. fills: as of a witness."""
    layers = blocks_of(model)
    witnesses: list[_Witness] = []
    for index, layer in enumerate(layers):
        assert isinstance(layer, Placeholder)
        witnesses.append(_Witness(layer.original, returns, fills=fills))
        layers[index] = witnesses[-1]
    tokens = torch.zeros(1, TRACE_TOKENS, dtype=torch.long, device="meta")
    decoder, _ = decoder_of(model)
    cache = new_cache(model.config, type(decoder).__module__, Blocks(0, len(layers)), 0)
    arguments = {"use_cache": True, cache_argument: cache.inner}  # without a cache, masks look at the positions' values
    try:
        with torch.no_grad():
            decoder(input_ids=tokens.as_subclass(_Marked) if marked else tokens, **arguments)
    except Exception as error:  # noqa: BLE001 - the wrong structure breaks a parent in any way
        return witnesses, error
    return witnesses, None


def _idle_modules(model: PreTrainedModel, returns: int, cache_argument: str) -> tuple[str, ...]:
    """Find the decoder's own weights that no block ever feels but through its hidden state.

    Now the results of those modules are marked. If a mark arrives beside a hidden state, all of them count as used.
    """
    decoder, list_name = decoder_of(model)
    called: set[str] = set()

    def mark(name: str) -> Callable[[nn.Module, object, object], object]:
        def hook(_module: nn.Module, _args: object, output: object) -> object:
            if not isinstance(output, Tensor):
                return output
            called.add(name)
            return output.as_subclass(_Marked)

        return hook

    hooks = [
        child.register_forward_hook(mark(name))
        for name, child in decoder.named_children()
        if name != list_name and next(child.parameters(), None) is not None
    ]
    witnesses, _ = _run(model, returns, cache_argument, marked=False)
    for item in hooks:
        item.remove()
    felt = any(isinstance(tensor, _Marked) for witness in witnesses for tensor in _tensors(witness.beside))
    return () if felt else tuple(sorted(called))


def _refuse_boundary(name: str, first: _Witness, hidden_size: int) -> None:
    if first.got is None:
        return
    if first.got.shape != (1, TRACE_TOKENS, hidden_size):
        raise UnsupportedArchitecture(
            name, f"its blocks hand on {list(first.got.shape)} instead of [batch, tokens, {hidden_size}]"
        )


def _refuse_side_channel(name: str, witnesses: Iterable[_Witness]) -> None:
    for index, witness in enumerate(witnesses):
        if any(isinstance(tensor, _Marked) for tensor in _tensors(witness.beside)):
            raise UnsupportedArchitecture(name, f"block {index} needs more of the tokens than its hidden state")
        if "input_ids" in inspect.signature(witness.original.forward).parameters:
            raise UnsupportedArchitecture(name, "its blocks need the token ids")


def _refuse_second_state(name: str, witnesses: Iterable[_Witness], config: PretrainedConfig) -> None:
    """Refuse a family whose blocks hand on more than their hidden state. witnesses: they marked what lies beside it."""
    if set(getattr(text_config(config), "indexer_types", None) or ()) == {"full"}:
        return  # each block chooses its own positions, and looks at no other block's
    if any(isinstance(tensor, _Marked) for witness in witnesses for tensor in _tensors(witness.beside)):
        raise UnsupportedArchitecture(name, "its blocks hand on more than one hidden state")


def _tensors(value: object) -> Iterable[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
