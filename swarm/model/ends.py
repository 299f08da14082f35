"""The client's part: a real causal language model with embeddings, final norm and head, whose blocks are elsewhere.

Block 0 computes all blocks by one call around the route. Most parents only iterate over their list of blocks. For them
the list ends after block 0, because each further placeholder costs three Python calls a token. A few parents do
something for each block themselves; those walk all placeholders. `replace_blocks` finds out which, on the loaded model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.model.cache import new_cache
from swarm.model.hollow import Placeholder, decoder_of, hidden_of
from swarm.model.traits import Traits

Remote = Callable[[Tensor], Tensor]  # hidden [batch, tokens, hidden_size] in, the same shape out


class RemoteBlocks(Placeholder):
    """Stands where block 0 is and computes all blocks by one call; the other placeholders hand its result on."""

    def __init__(self, original: nn.Module, remote: Remote, returns: int) -> None:
        super().__init__(original, returns)
        object.__setattr__(self, "_remote", remote)  # no submodule, even if it is a module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:  # noqa: ANN401
        """Send the embedded tokens around the route."""
        hidden = hidden_of(args, kwargs)
        output: Tensor = self.__dict__["_remote"](hidden)
        assert output.shape == hidden.shape, f"the blocks returned {tuple(output.shape)} for {tuple(hidden.shape)}"
        return self.wrap(output)


class OneStepBlocks(nn.ModuleList):
    """A list of as many blocks as the model has, which ends after block 0 for code that iterates over it."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self._modules["0"],))

    def __getitem__(self, index: int | slice) -> Any:  # noqa: ANN401 - as in torch
        if isinstance(index, slice):
            return tuple(self._modules.values())[index][:1] if index.start in {None, 0} else nn.ModuleList()
        return super().__getitem__(index)


def replace_blocks(model: PreTrainedModel, traits: Traits, remote: Remote) -> RemoteBlocks:
    """Let `remote` compute all blocks of a model from `load_ends`.

    remote is called once in every forward with the hidden state [batch, tokens, hidden_size] that block 0 would get,
    and returns the last block's output, in the same shape and dtype. Positions, attention mask and cache are the
    caller's to take from the model's own arguments. Replaces an earlier `remote`.
    """
    decoder, name = decoder_of(model)
    layers: nn.ModuleList = getattr(decoder, name)
    for layer in layers:
        assert isinstance(layer, Placeholder)
        layer.returns = traits.returns
    first = layers[0]
    assert isinstance(first, Placeholder)
    original = first.original
    if not isinstance(layers, OneStepBlocks) and _only_iterates(decoder, name, traits, original):
        layers = OneStepBlocks(layers.children())
        setattr(decoder, name, layers)
    blocks = RemoteBlocks(original, remote, traits.returns)
    layers[0] = blocks
    return blocks


def _only_iterates(decoder: PreTrainedModel, name: str, traits: Traits, original: nn.Module) -> bool:
    """Return whether this decoder computes the same, to the bit, if its list of blocks ends after block 0."""
    layers: nn.ModuleList = getattr(decoder, name)
    walked = nn.ModuleList(layers)
    walked[0] = RemoteBlocks(original, lambda hidden: hidden * 0.5, traits.returns)
    weight = next(decoder.parameters())
    drawn = torch.rand(1, 2, traits.embedding_size, generator=torch.Generator().manual_seed(0))
    embeddings = drawn.to(weight.device, decoder.dtype)

    def output(blocks: nn.ModuleList, *, use_cache: bool) -> Tensor:
        setattr(decoder, name, blocks)
        cache = new_cache(decoder.config, type(decoder).__module__, Blocks(0, traits.n_blocks), 0).inner
        arguments: dict[str, Any] = {traits.cache_argument: cache} if use_cache else {}
        with torch.no_grad():
            hidden: Tensor = decoder(inputs_embeds=embeddings, use_cache=use_cache, **arguments)[0]
        return hidden

    short = OneStepBlocks(walked)
    try:
        return all(
            torch.equal(output(walked, use_cache=use_cache), output(short, use_cache=use_cache))
            for use_cache in (False, True)
        )
    except Exception:  # noqa: BLE001 - a parent that needs more of its blocks breaks in any way
        return False
    finally:
        setattr(decoder, name, layers)
