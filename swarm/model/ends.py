"""The client's part: a real causal language model with embeddings, final norm and head, whose blocks are elsewhere."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.model.hollow import Placeholder, blocks_of, hidden_of
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


def replace_blocks(model: PreTrainedModel, traits: Traits, remote: Remote) -> RemoteBlocks:
    """Let `remote` compute all blocks of a model from `load_ends`.

    remote is called once in every forward with the hidden state [batch, tokens, hidden_size] that block 0 would get,
    and returns what the last block would, in the same shape and dtype. Positions, attention mask and cache are the
    caller's to take from the model's own arguments. Replaces an earlier `remote`.
    """
    layers = blocks_of(model)
    for layer in layers:
        assert isinstance(layer, Placeholder)
        layer.returns = traits.returns
    original = layers[0].original
    assert isinstance(original, nn.Module)
    blocks = RemoteBlocks(original, remote, traits.returns)
    layers[0] = blocks
    return blocks
