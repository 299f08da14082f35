"""A `transformers` cache whose keys and values are on the servers: it knows their length and the next changes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache, CacheLayerMixin

from swarm.activations import Activations
from swarm.client.hf.ahead import AheadSession
from swarm.client.hf.lead import Drafting
from swarm.errors import SessionClosed, SwarmError, UsageError
from swarm.model.traits import Traits
from swarm.protocol.messages import ROWS_MAX

ASSISTED_ROLLBACK = 64  # positions that speculative decoding may take back at a time


class RemoteCache(Cache):
    """Opens its session at the first step. Rollbacks and gathers travel with the next step's message."""

    def __init__(self, traits: Traits, open_session: Callable[[int], AheadSession], rollback_max: int = 0) -> None:
        """open_session: called with the largest rollback that will be asked for."""
        self._layer = _RemoteLayer()
        super().__init__(layers=[self._layer])
        self._traits = traits
        self._open_session = open_session
        self._rollback_max = rollback_max
        self._session: AheadSession | None = None
        self._rows: list[int] | None = None
        self._n_rows = 0
        self._padding: Tensor | None = None  # bool [rows, positions] of the past; None: there is none
        self.remembers = False  # its tokens, for `take_back_to`; to be set before the first step
        self._told: _Told | None = None  # None also where rows were gathered, or something else than tokens came

    @property
    def length(self) -> int:
        """Positions that the servers hold after the next step's rollback."""
        return self._layer.length

    @classmethod
    def at(cls, traits: Traits, length: int) -> "RemoteCache":
        """Return a cache of so many positions that has no session: for what a model does before its blocks."""

        def no_session(_: int) -> AheadSession:
            raise AssertionError("only the embeddings run")

        cache = cls(traits, no_session)
        cache._layer.length = length
        return cache

    def step(
        self,
        activations: Activations,
        *,
        want: int,
        ids: Tensor | None = None,
        drafting: Drafting | None = None,
        processors: LogitsProcessorList | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run new positions through the blocks. Shapes as in `Session.step`, the rest as in `AheadSession.step`.

        mask: [rows, positions] of all positions, 0 for padding, as the model's caller gave it, or only of new ones.
        Raises UsageError where it shows or hides others of the past than when these came: servers keep what came first.
        An interrupt such as Ctrl-C ends the session, because the state of the blocks is not known then.
        """
        if self._session is None:
            if self.length:
                raise SessionClosed("it was interrupted")
            self._session = self._open_session(self._rollback_max)
        length, batch = self._layer.length, activations.hidden.shape[0]
        if batch > ROWS_MAX:  # before blocks that run here compute
            raise UsageError(f"a batch of {batch} is more than a session can have ({ROWS_MAX}); split it")
        held = self._n_rows if self._rows is None else len(self._rows)
        if length and batch != held:
            raise UsageError(f"this conversation has {held} rows, and the input has {batch}")
        rows = self._rows if length else None
        padding = self._padding[self._rows_now, :length] if length and self._padding is not None else None
        if mask is not None and mask.shape[1] == length + activations.tokens:
            _check_past((mask[:, :length] == 0).expand(batch, length), padding)
        try:
            output = self._session.step(
                activations,
                keep=length,
                rows=rows,
                want=want,
                ids=ids,
                drafting=drafting,
                processors=processors,
            )
            self._rows = None
            self._n_rows, tokens, _ = activations.hidden.shape
            self._layer.length += tokens
            empty = padding is None and activations.mask is None
            self._padding = None if empty else _longer(padding, activations, length)
            if not length:
                self._told = _Told() if self.remembers else None
            if self._told is not None:
                self._told = self._told.with_part(length, ids) if rows is None else None
        except SwarmError:
            raise  # it has ended by itself, or nothing has changed
        except BaseException:
            session, self._session = self._session, None
            session.close()
            raise
        return output

    def close(self) -> None:
        """Free the leases on the servers."""
        if self._session is not None:
            self._session.close()

    def take_back_to(self, ids: Tensor) -> None:
        """Take back what the past has beyond the beginning that it shares with a prompt [rows, tokens].

        The prompt's last token is always computed anew. Raises UsageError where so much cannot be taken back.
        """
        length = self._layer.length
        past = self._told.tensor(length) if self._told is not None and self._rows is None else None
        if not length or past is None or past.shape[0] != ids.shape[0]:
            return
        both = max(0, min(length, ids.shape[1] - 1))
        differs = (past[:, :both] != ids[:, :both].to(past.device)).any(0).nonzero()
        keep = int(differs[0]) if len(differs) else both
        forgets = any(kind in {"sliding", "conv"} for kind in self._traits.kinds)
        if keep < length and (not self.is_croppable or (forgets and length - keep > self._rollback_max)):
            raise UsageError(
                f"the conversation has {length} positions, and the prompt goes on behind {keep} of them: this "
                f"{self._traits.model_type} model's past cannot be taken back so far; pass the conversation as it was, "
                "or begin anew (model.inference_session(rollback_max=...) for models with windows)"
            )
        self.crop(keep - length)

    # Called by `generate()`

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last positions; a negative number of them, as in `transformers`."""
        if tokens_to_remove > 0:
            raise ValueError("pass a negative number of tokens to remove")
        if tokens_to_remove and not self.is_croppable:
            raise UsageError(f"{self._traits.model_type} models have a recurrent state that cannot be rolled back")
        self._layer.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i gets the past of row beam_idx[i]."""
        self._gather(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._gather(torch.arange(len(self._rows_now))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._gather([row for row in range(len(self._rows_now)) for _ in range(repeats)])

    def activate_past_recording(self) -> None:
        """Prepare for rollbacks: their size is agreed on when the session opens."""
        if self._session is None:
            self._rollback_max = max(self._rollback_max, ASSISTED_ROLLBACK)
        elif self._rollback_max == 0 and any(kind in {"sliding", "conv"} for kind in self._traits.kinds):
            raise UsageError(
                f"{self._traits.model_type} models forget positions beyond their window: to roll this conversation "
                "back, open it with model.inference_session(rollback_max=...)"
            )

    def reset(self) -> None:
        """Forget everything."""
        self._layer.length = 0
        self._rows = None

    @property
    def is_croppable(self) -> bool:
        """Whether positions can be taken back without a trace."""
        return self._traits.can_roll_back

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        return len(self._rows_now) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that the servers hold."""
        del layer_idx
        return self._layer.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of a mask; the servers make the mask itself."""
        del layer_idx
        return self._layer.length + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a past."""
        del layer_idx, state_idx
        return self.length > 0

    @property
    def _rows_now(self) -> list[int]:
        """For each row, which of the servers' rows it is: they learn of a gather with the next step."""
        return self._rows if self._rows is not None else list(range(self._n_rows))

    def _gather(self, rows: list[int]) -> None:
        before = self._rows_now
        after = [before[row] for row in rows]
        self._rows = None if after == list(range(self._n_rows)) else after


def _check_past(hidden: Tensor, padding: Tensor | None) -> None:
    """Raise UsageError where a mask hides others of the past than are padding. Both: bool [rows, positions]."""
    if not (bool(hidden.any()) if padding is None else not torch.equal(hidden, padding.to(hidden.device))):
        return
    raise UsageError(
        "attention_mask hides other tokens of the past than it did when they came, and servers keep what came first: "
        "pass the mask as it was then, with columns for the new tokens behind it, or begin anew (model.new_cache())"
    )


def _longer(padding: Tensor | None, new: Activations, length: int) -> Tensor:
    """Return the padding of a past of so many positions and of new ones behind it."""
    rows, tokens, _ = new.hidden.shape
    past = torch.zeros(rows, length, dtype=torch.bool) if padding is None else padding
    added = (
        torch.zeros(rows, tokens, dtype=torch.bool) if new.mask is None else (new.mask.cpu() == 0).expand(rows, tokens)
    )
    return torch.cat([past, added], dim=1)


class _Told(list[tuple[int, Tensor]]):
    """The tokens of a past, in parts [rows, tokens], each with its first position; later ones overwrite others."""

    def with_part(self, start: int, ids: Tensor | None) -> "_Told | None":
        """Add a part; None where there is none."""
        if ids is None:
            return None
        self.append((start, ids.clone()))  # a view would keep the whole text that it is of
        return self

    def tensor(self, length: int) -> Tensor | None:
        """Return the first `length` tokens of each row; None where they are not all there."""
        whole: Tensor | None = None
        for start, ids in self:
            if start > (0 if whole is None else whole.shape[1]):
                return None
            whole = ids if whole is None else torch.cat([whole[:, :start], ids.to(whole.device)], dim=1)
        self[:] = [] if whole is None else [(0, whole)]
        return whole[:, :length] if whole is not None and whole.shape[1] >= length else None


class _RemoteLayer(CacheLayerMixin):
    """The one layer of a RemoteCache: it knows how long the cache is, and does not know the cache.

    With a cycle between them, leases would be freed only when the garbage collector gets to it.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - the parent's signature
        """Never called, because no block runs here."""
        raise AssertionError("a client holds no keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See RemoteCache."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """See RemoteCache."""
        return self.length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1
