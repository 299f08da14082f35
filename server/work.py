"""What the compute thread gets of a session: a step, or a piece of its past."""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.model.packed import Segment
from swarm.model.past import SpanPast
from swarm.protocol.messages import Rebuild, Step
from swarm.server.batch import SINGLE_ROWS_MAX, Ready
from swarm.server.session import HostedSession


def step_work(session: HostedSession, step: Step, activations: Activations) -> "SessionWork":
    """What an accepted step is for the compute thread."""
    session.hand_over()
    return SessionWork(session, step.keep, step.rows, step.want, activations)


def rebuild_work(session: HostedSession, piece: Rebuild, activations: Activations) -> "SessionWork":
    """What an accepted piece of the past is for the compute thread."""
    session.hand_over()
    return SessionWork(session, piece.start, None, None, activations)


class SessionWork:
    """One of them on its way through the compute thread: alone, packed with others', in pieces.

    Called as a whole it runs alone, and returns the output on the host: all positions, or for the owner the wanted
    ones; None once it is gone.
    """

    __slots__ = (
        "_activations",
        "_began",
        "_generation",
        "_keep",
        "_outputs",
        "_rows",
        "_want",
        "done",
        "session",
    )

    def __init__(
        self,
        session: HostedSession,
        keep: int,
        rows: Sequence[int] | None,
        want: int | None,
        activations: Activations,
    ) -> None:
        """want: trailing positions that the owner gets; None keeps all, whoever gets them."""
        self.session = session
        self.done = 0  # positions that were computed
        self._generation = session.generation
        self._keep = keep
        self._rows = rows
        self._want = want
        self._activations = activations
        self._began = False
        self._outputs: list[Tensor] = []

    def __call__(self) -> Tensor | None:
        """Run what is left of it, alone."""
        self.run(self.tokens - self.done)
        return self.result()

    @property
    def rows(self) -> int:
        """Its batch."""
        return self._activations.rows

    @property
    def tokens(self) -> int:
        """Positions of each row."""
        return self._activations.tokens

    @property
    def is_single(self) -> bool:
        """Whether it is a single step of few rows."""
        return self.tokens == 1 and self.rows <= SINGLE_ROWS_MAX

    @property
    def input_bytes(self) -> int:
        """Memory that its activations take."""
        return self._activations.n_bytes

    @property
    def is_gone(self) -> bool:
        """Whether nobody wants it any more: the session is closed, or its past was forgotten."""
        return self.session.closed or self.session.generation != self._generation

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        return self.is_gone or self.done == self.tokens

    @property
    def ready(self) -> Ready:
        """How the planner sees what is left."""
        session = self.session
        packs = session.span.packs and self._activations.mask is None and not session.is_masked
        group = (session.span.blocks, self._activations.hidden.dtype)
        return Ready(session.owner.peer, group, self.rows, self.tokens - self.done, packs)

    def segment(self, tokens: int) -> Segment | None:
        """The next positions, to run in a packed step, whose output goes to `take`; None if it is gone."""
        if self.is_gone:
            return None
        past = self._begin()
        assert past.mask is None
        part = self._activations.part(self.done, self.done + tokens).to(self.session.span.device)
        return Segment(part.hidden, past.cache, part.positions)

    def run(self, tokens: int) -> None:
        """Compute the next positions alone."""
        if self.is_gone:
            return
        past, span = self._begin(), self.session.span
        self.take(past.forward(span, self._activations.part(self.done, self.done + tokens)))

    def take(self, output: Tensor) -> None:
        """Keep the output of the next positions."""
        self.done += output.shape[1]
        self._outputs.append(output)

    def result(self) -> Tensor | None:
        """What is delivered when all is computed."""
        if self.is_gone or not self._outputs:
            return None
        output = self._outputs[0] if len(self._outputs) == 1 else torch.cat(self._outputs, dim=1)
        if self._want is not None and self._want < self.tokens and not self.session.has_next:
            output = output[:, output.shape[1] - self._want :].clone()  # not to hold the rest
        return output.to("cpu")

    def _begin(self) -> SpanPast:
        """Bring the session's past to where this work starts."""
        past = self.session.past
        if not self._began:
            past.rewind(self._keep, self._rows)
            self._began = True
        return past
