"""What the compute thread is given: tasks, and the tenure that a session's tasks belong to."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.compute.batch import SINGLE_ROWS_MAX, Ready
from swarm.model.packed import Segment
from swarm.model.past import SpanPast
from swarm.model.span import Span


class Tenure:
    """A session's past on a span, from its opening or a reset until the next reset or its end.

    All tasks of that time hold it. The loop sets `over`: from then on none of them counts, and none is computed.
    `past` belongs to the compute thread; its memory is free when the last task has let go.
    """

    __slots__ = ("__weakref__", "_past", "over", "owner", "rollback_max", "span")

    def __init__(self, owner: str, span: Span, rollback_max: int) -> None:
        """owner: the peer whose turn it is when tasks run. rollback_max: the most positions that a task takes back."""
        self.owner = owner
        self.span = span
        self.rollback_max = rollback_max
        self.over = False
        self._past: SpanPast | None = None

    @property
    def past(self) -> SpanPast:
        """The cache and the attention mask; made with the first task, since that takes longer than opening."""
        if self._past is None:
            self._past = SpanPast(self.span.new_cache(self.rollback_max))
        return self._past

    @property
    def is_masked(self) -> bool:
        """Whether some of the past is padding."""
        return self._past is not None and self._past.mask is not None


class Forward:
    """New positions of a session on their way through its span: alone, packed with others', in pieces."""

    __slots__ = ("_began", "_keep", "_outputs", "_rows", "_want", "activations", "done", "tenure")

    def __init__(
        self,
        tenure: Tenure,
        activations: Activations,
        *,
        keep: int,
        rows: Sequence[int] | None = None,
        want: int | None = None,
    ) -> None:
        """keep, rows: as in a Step. want: trailing positions that are returned; None returns all."""
        self.tenure = tenure
        self.activations = activations
        self.done = 0  # positions that were computed
        self._keep = keep
        self._rows = rows
        self._want = want
        self._began = False
        self._outputs: list[Tensor] = []

    def complete(self) -> Tensor | None:
        """Run what is left of it, alone. Returns its result."""
        self.run(self.tokens - self.done)
        return self.result()

    @property
    def rows(self) -> int:
        """Its batch."""
        return self.activations.rows

    @property
    def tokens(self) -> int:
        """Positions of each row."""
        return self.activations.tokens

    @property
    def is_single(self) -> bool:
        """Whether it is a single step of few rows."""
        return self.tokens == 1 and self.rows <= SINGLE_ROWS_MAX

    @property
    def is_gone(self) -> bool:
        """Whether it does not count any more."""
        return self.tenure.over

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        return self.is_gone or self.done == self.tokens

    @property
    def ready(self) -> Ready:
        """How the planner sees what is left."""
        span = self.tenure.span
        packs = span.packs and self.activations.mask is None and not self.tenure.is_masked
        group = (span.blocks, self.activations.hidden.dtype)
        return Ready(self.tenure.owner, group, self.rows, self.tokens - self.done, packs)

    def segment(self, tokens: int) -> Segment | None:
        """The next positions, to run in a packed step, whose output goes to `take`; None if it is gone."""
        if self.is_gone:
            return None
        past = self._begin()
        assert past.mask is None
        part = self.activations.part(self.done, self.done + tokens).to(self.tenure.span.device)
        return Segment(part.hidden, past.cache, part.positions)

    def run(self, tokens: int) -> None:
        """Compute the next positions alone."""
        if self.is_gone:
            return
        past = self._begin()
        self.take(past.forward(self.tenure.span, self.activations.part(self.done, self.done + tokens)))

    def take(self, output: Tensor) -> None:
        """Keep the output of the next positions."""
        self.done += output.shape[1]
        self._outputs.append(output)

    def result(self) -> Tensor | None:
        """Return the output on the host when all is computed; None once it is gone."""
        if self.is_gone or not self._outputs:
            return None
        output = self._outputs[0] if len(self._outputs) == 1 else torch.cat(self._outputs, dim=1)
        if self._want is not None and self._want < self.tokens:
            output = output[:, output.shape[1] - self._want :].clone()  # not to hold the rest
        return output.to("cpu")

    def _begin(self) -> SpanPast:
        """Bring the session's past to where this task starts."""
        past = self.tenure.past
        if not self._began:
            past.rewind(self._keep, self._rows)
            self._began = True
        return past


class Probe:
    """Something that runs alone in the compute thread: a measurement, a clean-up."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], Any]) -> None:
        """work: is called once."""
        self._work = work

    def complete(self) -> Any:  # noqa: ANN401 - of any kind
        """Run it. Returns its result."""
        return self._work()


Task: TypeAlias = Forward | Probe
Done = Callable[[Any], None]
"""Called in the loop with what a task returned or raised; None for one that did not count any more."""


class Executor(Protocol):
    """Runs tasks, those of one tenure in the order in which they were submitted."""

    def submit(self, task: Task, done: Done) -> None:
        """Run a task elsewhere and call `done` in the loop. Tasks may run together, and in pieces."""
        ...
