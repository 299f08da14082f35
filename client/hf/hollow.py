"""Methods of `transformers` that would do the wrong thing without a word, because the blocks are not here.

They raise UsageError, which names the method and a way that works. Everything that concerns embeddings, norm and
head alone works as usual: `to(device)`, `resize_token_embeddings`, `config.save_pretrained`.
"""

from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm.errors import UsageError


class HollowModel(PreTrainedModel):
    """The refusals of a model without blocks. Mixed in before the family's class."""

    def save_pretrained(self, *_: object, **__: object) -> NoReturn:
        """Refuse: the checkpoint would lack the blocks. Raises UsageError."""
        self._refuse_to_save("save_pretrained")

    def push_to_hub(self, *_: object, **__: object) -> NoReturn:  # type: ignore[override]
        """Refuse: the checkpoint would lack the blocks. Raises UsageError."""
        self._refuse_to_save("push_to_hub")

    def state_dict(self, *_: object, **__: object) -> NoReturn:
        """Refuse: it would be the weights of the ends alone. Raises UsageError."""
        self._refuse_to_save("state_dict")

    def load_adapter(self, *_: object, **__: object) -> NoReturn:
        """Refuse: adapters change the blocks. Raises UsageError."""
        _refuse_adapters("load_adapter")

    def add_adapter(self, *_: object, **__: object) -> NoReturn:
        """Refuse: adapters change the blocks. Raises UsageError."""
        _refuse_adapters("add_adapter")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "a distributed model holds connections and cannot be copied or pickled; "
            "load it again with AutoDistributedModel.from_pretrained"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the ends, as `to(device)` and `cuda()` do. `half()` and all other changes of dtype come here, too."""
        dtype = self.dtype
        changed = fn(torch.empty(1, dtype=dtype)).dtype
        if changed != dtype:
            names = tuple(str(each).removeprefix("torch.") for each in (changed, dtype))
            raise UsageError(
                "the dtype of a distributed model is that of its servers: this one computes in {1}; "
                "load another one with AutoDistributedModel.from_pretrained(..., dtype=torch.{0})".format(*names)
            )
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

    def _refuse_to_save(self, method: str) -> NoReturn:
        raise UsageError(
            f"{method}: the blocks of this model are on the servers, so they would be missing. Its weights are those "
            f"of {self.name_or_path}: copy that. The configs can be saved, by model.config.save_pretrained(...) and "
            "model.generation_config.save_pretrained(...); embeddings, norm and head are in model.named_parameters()"
        )


def _refuse_adapters(method: str) -> NoReturn:
    raise UsageError(
        f"{method}: adapters change the blocks, and those are on the servers; "
        "serve a checkpoint into which the adapter is merged"
    )


class _NoGradient(torch.autograd.Function):
    """The output of the blocks, where their input asks for a gradient: to be used, not to be differentiated."""

    @staticmethod
    def forward(_: Any, hidden: Tensor, output: Tensor) -> Tensor:  # noqa: ANN401 - torch's context
        del hidden
        return output.view_as(output)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> NoReturn:  # noqa: ANN401
        raise UsageError(
            "gradients do not pass through the swarm. To train the norm and the head alone, freeze the embeddings: "
            "model.get_input_embeddings().requires_grad_(False)"
        )


def without_gradient(hidden: Tensor, output: Tensor) -> Tensor:
    """Return the blocks' output so that a backward pass into their input raises UsageError instead of ending there."""
    if not (torch.is_grad_enabled() and hidden.requires_grad):
        return output
    guarded: Tensor = _NoGradient.apply(hidden, output)  # type: ignore[no-untyped-call]
    return guarded
