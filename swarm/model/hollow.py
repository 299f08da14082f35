"""Hollow parents: a full-depth model in which the parts that live elsewhere are parameter-free placeholders.

Slicing a config or wrapping architectures by hand goes wrong one family at a time. Here the parent stays the class
that `transformers` has for the config, with all its blocks at their absolute indices; masks, rotary tables and alibi
come from it, and weights are loaded by its own `from_pretrained`, which never materialises a tensor without a place in
the model.
"""

import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from swarm.blocks import Blocks
from swarm.errors import UnsupportedArchitecture


class Placeholder(nn.Module):
    """Takes the place of a block that lives elsewhere; hands its input on, in the family's block return structure.

    Parents read static attributes of their blocks (`block_type`, `attention_type`, ...): those come from `original`,
    which is a block on the meta device, or the hosted block itself in the subclasses of `swarm.model.span`.
    """

    def __init__(self, original: nn.Module | None = None, returns: int = 0) -> None:
        super().__init__()
        # In a list, so that the original is no submodule: its weights are not ours to load, move or count.
        object.__setattr__(self, "_original", [original])
        self.returns = returns

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any block is anything
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__["_original"][0]
            if original is None or name.startswith("__"):
                raise
            return getattr(original, name)

    @property
    def original(self) -> nn.Module:
        """The block whose place this takes."""
        module = self.__dict__["_original"][0]
        assert isinstance(module, nn.Module)
        return module

    def wrap(self, hidden: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """Put a block's result into the structure that the parent takes apart: a tensor, or a tuple that it leads."""
        return (hidden, *(None,) * (self.returns - 1)) if self.returns else hidden

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:  # noqa: ANN401
        """Hand the hidden state on unchanged."""
        return self.wrap(hidden_of(args, kwargs))


class Absent(nn.Module):
    """Takes the place of an embedding, a head or a vision tower that this process does not hold."""

    weight = None

    def forward(self, x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """Hand the input on unchanged."""
        return x


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state that a parent calls its block with."""
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, Tensor)
    return hidden


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a (composite) config that describes the decoder."""
    return config.get_text_config(decoder=True)


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config that the family's class takes: some composite families have a class for their text part alone.

    The same choice as `AutoModelForCausalLM` makes. Raises UnsupportedArchitecture.
    """
    part = config.sub_configs.get("text_config")
    if part is None or class_for(config).config_class != part:
        return config
    text: PretrainedConfig = config.get_text_config()
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and getattr(text, "quantization_config", None) is None:
        text.quantization_config = quantization
    return text


def class_for(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that `transformers` itself would use for generation. Raises UnsupportedArchitecture."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            cls: type[PreTrainedModel] = found[0] if isinstance(found, (tuple, list)) else found
            return cls
    raise UnsupportedArchitecture(str(config.model_type), "transformers has no causal language model for it")


def hollow_class(config: PretrainedConfig, blocks: Blocks | None) -> type[PreTrainedModel]:
    """Return a subclass of the family's class whose instances are hollow.

    With `blocks` an instance holds those blocks alone, without embeddings, head and vision tower; with None it is the
    client's part: embeddings, final norm and head, and a placeholder for every block. Name and module are the original
    class's, because weight conversions are looked up by them.
    """
    parent = class_for(config)

    def __init__(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        parent.__init__(self, config, *args, **kwargs)
        _hollow(self, blocks)

    return type(parent.__name__, (parent,), {"__init__": __init__, "__module__": parent.__module__})


_loading = threading.Lock()


def one_at_a_time() -> threading.Lock:
    """Hold this while `from_pretrained` of `transformers` runs: no other thread loads a model meanwhile.

    For the time of a load it changes torch's default dtype, and its own tying of weights, for the whole process. Two
    loads that overlap may each take the other's change for the former state, and leave it behind.
    """
    return _loading


def skeleton(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of this class on the meta device: all shapes, no weights (0.1 s for 671 billion parameters)."""
    with torch.device("meta"):
        return cls(config)


def beyond_blocks(config: PretrainedConfig) -> re.Pattern[str] | None:
    """Return what matches a checkpoint's names of the blocks for multi-token prediction, behind the last one; or None.

    No part of the model itself needs them.
    """
    text = text_config(config)
    count = getattr(text, "num_mtp_layers", None) or 0
    if not count:
        return None
    whole = skeleton(class_for(config), config)
    # The family's own patterns know its released sizes alone.
    whole._keys_to_ignore_on_load_unexpected = [
        *(type(whole)._keys_to_ignore_on_load_unexpected or ()),
        *(rf"layers\.{block}\." for block in range(text.num_hidden_layers, text.num_hidden_layers + count)),
    ]
    pattern: re.Pattern[str] = MtpModel.get_mtp_weights_regex(whole)
    return pattern


def decoder_of(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """Return the module that holds the list of blocks, and the list's name in it. Raises UnsupportedArchitecture."""
    n_blocks = text_config(model.config).num_hidden_layers
    for candidate in _decoders(model):
        lists = [
            (name, child)
            for name, child in candidate.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == n_blocks
        ]
        if lists:  # several, e.g. one small projection per block: the blocks are the list with the most in it
            name, _ = max(lists, key=lambda item: _weight(item[1]))
            return candidate, name
    raise UnsupportedArchitecture(str(model.config.model_type), f"no list of its {n_blocks} blocks was found")


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's list of blocks, with placeholders for those that are not here."""
    decoder, name = decoder_of(model)
    layers = getattr(decoder, name)
    assert isinstance(layers, nn.ModuleList)
    return layers


def absent_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the parameter-name prefixes ("model.layers.3.") of everything that is not here."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, (Placeholder, Absent)))


def _decoders(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`get_decoder()` first; where that is not the holder of the blocks (llama4), every model within the model."""
    yield model.get_decoder()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            yield module


def _weight(layers: nn.ModuleList) -> int:
    """Count a list's parameters; placeholders count as their originals."""
    return sum(
        parameter.numel()
        for layer in layers.children()
        for parameter in (layer.original if isinstance(layer, Placeholder) else layer).parameters()
    )


def _hollow(model: PreTrainedModel, blocks: Blocks | None) -> None:
    """Replace the modules that this part of the model does not hold."""
    decoder, name = decoder_of(model)
    layers = getattr(decoder, name)
    for index in range(len(layers)):
        if blocks is None or index not in blocks:
            layers[index] = Placeholder(layers[index])
    if blocks is not None or text_config(model.config) is not model.config:
        _drop_towers(model, decoder)
    if blocks is not None:
        _drop_ends(model)


def _drop_towers(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Drop the modules beside the decoder of a composite model (vision tower, projector); head and embeddings stay."""
    path = _path_of(model, decoder)
    keep = [model.get_output_embeddings(), model.get_input_embeddings()]
    holder = path.rpartition(".")[0]
    while path and holder != path:
        parent = model.get_submodule(holder)
        for child_name, child in list(parent.named_children()):
            full = f"{holder}.{child_name}" if holder else child_name
            needed = path == full or any(module is kept for module in child.modules() for kept in keep)
            if not needed and any(True for _ in child.parameters()):
                setattr(parent, child_name, Absent())
        path, holder = holder, holder.rpartition(".")[0]


def _drop_ends(model: PreTrainedModel) -> None:
    """Drop embeddings and head, and with them every weight tie."""
    for end in (model.get_output_embeddings(), model.get_input_embeddings()):
        if isinstance(end, nn.Module):
            path = _path_of(model, end)
            holder, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(holder), leaf, Absent())
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._tied_weights_keys = {}
            module.all_tied_weights_keys = {}


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is wanted]
    return names[0]
