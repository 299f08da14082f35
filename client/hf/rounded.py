"""Embeddings and head of a distributed model in int8, for clients that are short of memory or read it slowly.

The head becomes what servers' linear layers become with `--quantize int8` (`swarm.model.integer`): its rows are
rounded, and so are activations. Embeddings are rounded by rows, and a token's row is widened as it is looked up.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.errors import BadConfiguration
from swarm.limits import limit
from swarm.model.eightbits import IntegerMatrix, is_supported, rounded
from swarm.model.ends import replace_blocks
from swarm.model.integer import nothing, to_integers
from swarm.model.traits import Traits


@dataclass(frozen=True, slots=True)
class RoundedLimits:
    """When a family's forward counts as the same."""

    far: float = limit(0.05, "of a norm", "logits may be further from the exact ones; then the head is refused")


class RoundedEmbedding(nn.Embedding):
    """Embeddings in int8. Made of an `nn.Embedding` by `round_ends`."""

    integers: tuple[Tensor, Tensor]  # int8 [vocabulary, width], and the float32 scale of each row

    def forward(self, input: Tensor) -> Tensor:
        """Look up; int64 [...] -> [..., width]."""
        integers, scales = self.integers
        return (integers[input].float() * scales[input].unsqueeze(-1)).to(self.weight.dtype)


def round_ends(model: PreTrainedModel, traits: Traits, limits: RoundedLimits = RoundedLimits()) -> tuple[int, int]:
    """Round the client's part of a model, from `load_ends`. Returns the bytes of the head, and of the embeddings.

    Embeddings that do more than look up stay as they are. Raises BadConfiguration where the head cannot be rounded.
    """
    head: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    if not is_supported() or next(model.parameters()).device.type != "cpu":
        raise BadConfiguration("head", "int8 needs an x86 processor or llvmlite, and embeddings and head on the CPU")
    if type(head) is not nn.Linear:
        raise BadConfiguration("head", "the family's head is no plain linear layer, so it cannot be int8")
    exact = _logits(model, traits)
    are_tied = head.weight is embeddings.weight
    matrix = IntegerMatrix.of(head.weight)
    to_integers(head, IntegerMatrix, [matrix])
    if type(embeddings) is nn.Embedding and embeddings.max_norm is None:
        kept = matrix.parts if are_tied else rounded(embeddings.weight)
        vars(embeddings)["integers"] = kept
        embeddings.weight = nn.Parameter(nothing(embeddings.weight.shape, embeddings.weight.dtype), requires_grad=False)
        embeddings.__class__ = RoundedEmbedding
    logits = _logits(model, traits)
    if not float((logits - exact).norm() / exact.norm()) < limits.far:  # NaN where a family goes around the modules
        raise BadConfiguration("head", "the family uses the head's weight in a way of its own, so it cannot be int8")
    return matrix.n_bytes, _bytes_beside(matrix, embeddings)


def _bytes_beside(matrix: IntegerMatrix, embeddings: nn.Module) -> int:
    """Return what embeddings take beside a head, whose integers they may share."""
    own = vars(embeddings).get("integers")
    if own is None:
        return cast(Tensor, embeddings.weight).nbytes
    shared = {part.data_ptr() for part in matrix.parts}
    return sum(part.nbytes for part in own if part.data_ptr() not in shared)


def _logits(model: PreTrainedModel, traits: Traits) -> Tensor:
    """Run the family's own forward once, over its embeddings and a drawn hidden state of the blocks'. [vocabulary]."""
    drawn = torch.randn(1, 1, traits.hidden_size, generator=torch.Generator().manual_seed(0))
    replace_blocks(model, traits, lambda hidden: drawn.to(hidden.dtype) + 0 * hidden)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    return logits.float()[0, 0]
