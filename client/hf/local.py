"""The first blocks on this machine: a backend that runs them here, and the others wherever the swarm has them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.ledger import Audits
from swarm.client.hf.lead import Pending, RemoteSession
from swarm.client.hf.ranges import Backend
from swarm.client.planning.explain import ExplainedRoute
from swarm.errors import PromptTooLong
from swarm.model.past import SpanPast
from swarm.model.span import Span


class LocalFirst:
    """A Backend whose first blocks are a span of this process, in front of another Backend."""

    def __init__(self, span: Span, behind: Backend) -> None:
        """span: blocks 0:k."""
        assert span.blocks.start == 0
        self.traits = behind.traits
        self.dtype = behind.dtype
        self._span = span
        self._behind = behind
        self._computing = threading.Lock()  # a span is not re-entrant, and several threads may generate

    def open_session(self, blocks: Blocks, *, positions_max: int, rollback_max: int) -> RemoteSession:
        """Return a session through `blocks`; those that are here stay here."""
        border = self._span.blocks.stop
        bounds = {"positions_max": positions_max, "rollback_max": rollback_max}
        if blocks.start >= border:
            return self._behind.open_session(blocks, **bounds)
        here = self._span.part(Blocks(blocks.start, min(blocks.stop, border)))
        rest = Blocks(border, blocks.stop) if blocks.stop > border else None
        behind = self._behind.open_session(rest, **bounds) if rest is not None else None
        return _Session(here, behind, self._computing, **bounds)

    def route(self) -> ExplainedRoute:
        """Return the hops behind the local blocks."""
        return self._behind.route()

    @property
    def audits(self) -> Audits:
        """As `Backend.audits`, of the blocks behind the local ones."""
        return self._behind.audits

    def close(self) -> None:
        """Leave the swarm."""
        self._behind.close()


class _Session:
    """A RemoteSession whose first blocks are here. Their cache follows every rollback and gather."""

    def __init__(
        self,
        span: Span,
        behind: RemoteSession | None,
        computing: threading.Lock,
        *,
        positions_max: int,
        rollback_max: int,
    ) -> None:
        self._span = span
        self._behind = behind
        self._computing = computing
        self._positions_max = positions_max
        self._past = SpanPast(span.new_cache(rollback_max))

    def step(
        self,
        activations: Activations,
        *,
        keep: int,
        rows: Sequence[int] | None,
        want: int,
    ) -> Tensor:
        """As `swarm.client.session.session.Session.step`."""
        output = self._compute(activations, keep, rows)
        if self._behind is None:
            return output[:, output.shape[1] - want :].clone()  # an ordinary tensor, for whatever the caller does next
        return self._behind.step(activations.with_hidden(output), keep=keep, rows=rows, want=want)

    def put(self, activations: Activations, *, keep: int) -> Pending:
        """As `swarm.client.session.session.Session.put`. The blocks here compute at once."""
        output = self._compute(activations, keep, None)
        if self._behind is None:
            return _Computed(output.clone())
        return self._behind.put(activations.with_hidden(output), keep=keep)

    def _compute(self, activations: Activations, keep: int, rows: Sequence[int] | None) -> Tensor:
        if keep + activations.tokens > self._positions_max:  # before the blocks here compute
            raise PromptTooLong(keep + activations.tokens, self._positions_max, "the session")
        with self._computing, torch.inference_mode():
            self._past.rewind(keep, rows)
            return self._past.forward(self._span, activations)

    @property
    def load(self) -> float:
        """As `RemoteSession.load`."""
        return self._behind.load if self._behind is not None else 0.0

    @property
    def step_s(self) -> float:
        """As `RemoteSession.step_s`."""
        return self._behind.step_s if self._behind is not None else 0.0

    def close(self) -> None:
        """Free the leases. Closing twice is fine."""
        if self._behind is not None:
            self._behind.close()


@dataclass(frozen=True, slots=True)
class _Computed:
    """The answer of a step that needs no other machine."""

    output: Tensor
    is_done: bool = True

    def wait(self) -> Tensor:
        return self.output
