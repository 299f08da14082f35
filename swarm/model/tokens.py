"""Both ends of a model as functions: token ids in, logits out, for many sessions in one call.

`generate()` runs the family's own forward for one batch. A program that drives many sessions at once needs its two ends
apart: the embedding of the next tokens, and norm and head over whatever hidden states are there.

The family's own forward computes both, with a stand-in where the blocks are (`swarm.model.ends`). Most families do
nothing more than call their embedding, and their norm and head. There the modules are called directly. Which families
these are is found out on the loaded model, bit by bit: scaled embeddings, learned positions or soft caps fail the
comparison, and their own forward stays.
"""

import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.model.ends import replace_blocks
from swarm.model.hollow import decoder_of
from swarm.model.traits import Traits


class TokenEnds:
    """Embeddings, final norm and head of one model. Any thread may call `embed`; heads run in one at a time."""

    def __init__(self, model: PreTrainedModel, traits: Traits) -> None:
        """model: from `load_ends`; it belongs to this object from now on."""
        self.traits = traits
        self.dtype = model.dtype
        self.device = model.device
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._model = model
        self._decoder, _ = decoder_of(model)
        self._wide = bool(getattr(model.config.get_text_config(decoder=True), "residual_in_fp32", False))
        self._computing = threading.Lock()  # a hollow model is not re-entrant
        self._embedded: Tensor | None = None  # by the forward that runs
        self._given: Tensor | None = None  # the last block's output for it
        replace_blocks(model, traits, self._blocks)
        with torch.inference_mode():
            self._embedding = self._direct_embedding()
            self._norm = self._direct_norm()

    @property
    def n_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(weight.nbytes for weight in {*self._model.parameters(), *self._model.buffers()})

    @property
    def position_bytes(self) -> int:
        """Size of one hidden state."""
        return self.traits.hidden_size * self.dtype.itemsize

    @property
    def is_direct(self) -> tuple[bool, bool]:
        """Whether embedding and head are called directly, and not by the family's own forward."""
        return self._embedding is not None, self._norm is not None

    def embed(self, ids: Tensor, start: int | Tensor) -> Tensor:
        """Return what block 0 gets for token ids, int [rows, tokens]: hidden states [rows, tokens, hidden_size].

        start: position of the first of them, the same for all rows or int [rows]. A token behind the model's last
        position, which ends an output and goes to no server, is embedded as if it were there.
        """
        with torch.inference_mode():
            if self._embedding is not None:
                hidden: Tensor = self._embedding(ids.to(torch.int64))
            else:
                with self._computing:
                    hidden = self._own_embedding(ids.to(torch.int64), start)
        return hidden.clone() if hidden.is_inference() else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, float32 [rows, vocabulary], of the last block's outputs [rows, hidden_size]."""
        with torch.inference_mode():
            hidden = hidden if self._wide else hidden.to(self.dtype)
            if self._norm is not None:
                head = self._model.get_output_embeddings()
                direct: Tensor = head(self._norm(hidden[:, None]))[:, -1].float()
                return direct
            with self._computing:
                return self._own_logits(hidden)

    # By the family's own forward

    def _blocks(self, hidden: Tensor) -> Tensor:
        """Stand for all blocks: note their input, and return the output that is given."""
        self._embedded = hidden
        return hidden if self._given is None else self._given

    def _own_embedding(self, ids: Tensor, start: int | Tensor) -> Tensor:
        rows, tokens = ids.shape
        first = start if isinstance(start, Tensor) else torch.full((rows,), start)
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.traits.takes_positions:
            last = None if self.traits.positions_max is None else self.traits.positions_max - 1
            arguments["position_ids"] = (first[:, None] + torch.arange(tokens)).clamp(max=last)
        self._decoder(**arguments)
        assert self._embedded is not None
        hidden, self._embedded = self._embedded, None
        return hidden

    def _own_logits(self, hidden: Tensor) -> Tensor:
        self._given = hidden[:, None]
        try:
            ids = torch.zeros(hidden.shape[0], 1, dtype=torch.int64)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[:, -1].float()
        finally:
            self._given = self._embedded = None
        return logits

    # Directly, where that is proved to be the same

    def _direct_embedding(self) -> nn.Module | None:
        embedding = self._model.get_input_embeddings()
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (2, 3), generator=drawn)
        same = all(
            torch.equal(self._own_embedding(ids, start), embedding(ids)) for start in (0, 5) if self._fits(start + 3)
        )
        return embedding if same else None

    def _direct_norm(self) -> nn.Module | None:
        drawn = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, self.traits.hidden_size, generator=drawn)
        hidden = hidden if self._wide else hidden.to(self.dtype)
        expected, head = self._own_logits(hidden), self._model.get_output_embeddings()
        for name in ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm"):
            norm = getattr(self._decoder, name, None)
            with suppress(RuntimeError):  # of shapes that do not fit: something else lies between the two
                if isinstance(norm, nn.Module) and torch.equal(head(norm(hidden[:, None]))[:, -1].float(), expected):
                    return norm
        return None

    def _fits(self, positions: int) -> bool:
        return self.traits.positions_max is None or positions <= self.traits.positions_max
