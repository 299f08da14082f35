"""Where sessions come from, and ranges of blocks as functions: `model.blocks[a:b](hidden)`."""

from typing import Protocol

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.ledger import Audits
from swarm.client.hf.lead import RemoteSession
from swarm.client.planning.explain import ExplainedRoute
from swarm.errors import UsageError
from swarm.model.traits import Traits


class Backend(Protocol):
    """Where sessions come from."""

    traits: Traits
    dtype: torch.dtype

    def open_session(self, blocks: Blocks, *, positions_max: int, rollback_max: int) -> RemoteSession:
        """Return a session that opens with its first step, along the best route through `blocks`."""
        ...

    def route(self) -> ExplainedRoute:
        """Return the hops of the latest session, or a fresh plan where there was none."""
        ...

    @property
    def audits(self) -> Audits:
        """What the audits of this client's sessions have shown."""
        ...

    def close(self) -> None:
        """Leave the swarm."""
        ...


class RemoteRange:
    """Some blocks as a function, from `model.blocks[a:b]`."""

    def __init__(self, backend: Backend, blocks: Blocks) -> None:
        self._backend = backend
        self.blocks = blocks

    @torch.no_grad()
    def __call__(
        self, hidden: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Run hidden states [batch, tokens, hidden_size] through these blocks, without a past. Returns the same shape.

        attention_mask: [batch, tokens], 0 for padding. position_ids: int64 [batch or 1, tokens].
        """
        backend = self._backend
        if hidden.dim() != 3 or hidden.shape[2] != backend.traits.hidden_size:
            raise UsageError(
                f"hidden states are [batch, tokens, {backend.traits.hidden_size}], not {list(hidden.shape)}"
            )
        session = backend.open_session(self.blocks, positions_max=hidden.shape[1], rollback_max=0)
        try:
            output = session.step(
                Activations(hidden.to(backend.dtype), position_ids, padding(attention_mask, hidden.shape[1])),
                keep=0,
                rows=None,
                want=hidden.shape[1],
            )
        finally:
            session.close()
        return output if backend.traits.has_wide_residual else output.to(backend.dtype)  # hops may compute in others


class RemoteBlockList:
    """All blocks of the model, elsewhere; a slice of them is a function of hidden states."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __len__(self) -> int:
        return self._backend.traits.n_blocks

    def __getitem__(self, key: slice) -> RemoteRange:
        """Return blocks [a, b) for `[a:b]`. Raises BadBlocks."""
        if not isinstance(key, slice) or key.step is not None:
            raise UsageError("take blocks by a range, such as model.blocks[4:8]")
        start = 0 if key.start is None else key.start
        stop = len(self) if key.stop is None else key.stop
        return RemoteRange(self._backend, Blocks.parse(f"{start}:{stop}", len(self)))


def padding(mask: Tensor | None, tokens: int) -> Tensor | None:
    """Return the new columns of a 2-D attention mask as uint8, or None where there is no padding at all.

    Once padding was sent, later columns that are None count as real: a row's padding comes first.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise UsageError("only 2-D attention masks travel to the servers; they make the others themselves")
    new = mask[:, -tokens:]
    return None if bool((new != 0).all()) else (new != 0).to(torch.uint8)
