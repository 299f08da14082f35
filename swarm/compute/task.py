"""The compute thread's work: tasks, and the tenure that a session's tasks belong to."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from swarm.activations import Activations, is_finite
from swarm.compute.batch import Ready
from swarm.model.packed import Segment
from swarm.model.past import SpanPast, fitting, fitting_dtype
from swarm.model.prefix import Cutting, PastBlock, refill
from swarm.model.span import Span
from swarm.protocol.marked import Marked


class Tenure:
    """A session's past on a span, from its opening or a reset until the next reset or its end.

    All tasks of that time hold it. The loop sets `over`: from then on none of them counts, and none is computed.
    `past` belongs to the compute thread; its memory is free when the last task has come back. held: blocks that the
    past begins with; set before the first task, which takes them. marked: the prompt, while the loop keeps blocks of
    it. waiting: the loop's steps that have not come back from the compute thread, in order.
    """

    __slots__ = (
        "__weakref__",
        "_past",
        "held",
        "marked",
        "n_blocks",
        "over",
        "owner",
        "rollback_max",
        "span",
        "tenant",
        "waiting",
    )

    def __init__(self, owner: str, span: Span, rollback_max: int, tenant: str | None = None) -> None:
        """owner: the peer whose turn it is when tasks run; tenant: whose turn within the peer's.

        rollback_max: the most positions that a task takes back.
        """
        self.owner = owner
        self.tenant = tenant
        self.span = span
        self.n_blocks = len(span.blocks)
        self.rollback_max = rollback_max
        self.over = False
        self.held: tuple[PastBlock, ...] = ()
        self.marked: Marked | None = None
        self.waiting: deque[Forward | Void] = deque()
        self._past: SpanPast | None = None

    def skip(self, keep: int) -> None:
        """Skip the steps that are not begun, and of whose positions none stays: a step comes that keeps so many."""
        for task in reversed(self.waiting):
            if not task.skip(keep):
                return

    def release(self) -> None:
        """Let go of the past, when it is over and no task of it is left: others may hold this longer than they know."""
        assert self.over
        self._past, self.held = None, ()

    def anew(self, owner: str) -> "Tenure":
        """Return the tenure that follows a reset."""
        return Tenure(owner, self.span, self.rollback_max, self.tenant)

    @property
    def past(self) -> SpanPast:
        """The cache and the attention mask; made with the first task, since that takes longer than opening."""
        if self._past is None:
            self._past = SpanPast(self.span.new_cache(self.rollback_max))
            refill(self._past.cache, self.held)
            self.held = ()
        return self._past

    @property
    def is_masked(self) -> bool:
        """Whether some of the past is padding."""
        return self._past is not None and self._past.mask is not None


class Task(Protocol):
    """One thing to compute. The scheduler reads its fields, and the thread runs it.

    tenure: whose tasks run in order; None where it belongs to no session. owner: the peer whose turn it takes. cost:
    tasks with the same take as long as each other; None where its cost tells nothing about others. rows: of its batch.
    tokens: positions of each row. done: how many of them are computed. has_past: whether the session has positions
    before these. replays: it brings a past back that was lost. is_skipped: a later task of its session makes it
    pointless; it keeps its place all the same. is_chore: it uses no device, so its success says nothing of one.
    """

    owner: str
    rows: int
    tokens: int
    done: int
    has_past: bool
    replays: bool
    is_skipped: bool
    is_chore: bool

    @property
    def cost(self) -> Hashable | None:
        """Tasks with the same take as long as each other; None tells nothing about others."""
        ...

    @property
    def tenure(self) -> Tenure | None:
        """The session's past that it belongs to."""
        ...

    def ready(self, *, decodes: bool) -> Ready:
        """Return its remaining positions, for the planner. decodes: whether it is a decode step."""
        ...

    def run(self, tokens: int) -> None:
        """Compute the next positions alone."""
        ...

    def result(self) -> Any:  # noqa: ANN401 - of any kind
        """Return its output once it is over."""
        ...

    def complete(self) -> Any:  # noqa: ANN401 - of any kind
        """Compute the remaining positions alone. Returns the result."""
        ...


class Packable(Task, Protocol):
    """A task that can run together with others of its group."""

    def segment(self, tokens: int) -> Any:  # noqa: ANN401 - the group's own kind
        """Return its next positions, for `forward_packed`; None if it is gone."""
        ...

    def forward_packed(self, segments: Sequence[Any]) -> Sequence[Any]:
        """Compute segments of its group at once. Returns an output for each; where it raises, nothing changed."""
        ...

    def take(self, output: Any) -> None:  # noqa: ANN401 - the group's own kind
        """Keep the output of its segment."""
        ...


def is_gone(task: Task) -> bool:
    """Whether a task is not to be computed any more."""
    return task.is_skipped or (task.tenure is not None and task.tenure.over)


class Checked(NamedTuple):
    """An output of a span. finite: whether all of its numbers are known to be finite."""

    hidden: Tensor
    finite: bool


class Place(NamedTuple):
    """Where a session's new positions go, and how many trailing ones come back: as in a Step. want: None for all."""

    keep: int
    rows: Sequence[int] | None = None
    want: int | None = None


class Forward:
    """New positions of a session on their way through its span: alone, packed with others', in pieces."""

    __slots__ = (
        "_outputs",
        "_place",
        "activations",
        "cutting",
        "done",
        "finite",
        "has_past",
        "is_skipped",
        "owner",
        "replays",
        "rows",
        "tenure",
        "tokens",
    )

    is_chore = False

    def __init__(self, tenure: Tenure, activations: Activations, place: Place, *, replays: bool = False) -> None:
        """tenure: the past that they continue. replays: they are of a past that was lost."""
        self.tenure = tenure
        self.owner = tenure.owner
        self.activations = activations
        self.rows, self.tokens, _ = activations.hidden.shape
        self.done = 0
        self.has_past = place.keep > 0
        self.replays = replays
        self.is_skipped = False
        self.finite = True  # whether all of the output's numbers are known to be finite
        self.cutting: Cutting | None = None  # blocks of the past to cut, once this is computed
        self._place = place
        self._outputs: list[Tensor] | None = None  # from when it is begun

    def complete(self) -> Tensor | None:
        """Run the remaining positions alone. Returns the result."""
        self.run(self.tokens - self.done)
        return self.result()

    @property
    def cost(self) -> Hashable | None:
        """Spans of as many blocks take as long."""
        return self.tenure.n_blocks

    def skip(self, keep: int) -> bool:
        """Skip this if a later step keeps so few positions that none of these stays. Called in the loop, newest first.

        Returns False for a task that was begun, gathers rows, or has positions that stay: then those before it count.
        The compute thread may begin it in this very moment. Then it is computed as if this had not been called.
        """
        if self._outputs is not None or self._place.rows is not None or self._place.keep < keep:
            return False
        self.is_skipped = True
        return True

    def ready(self, *, decodes: bool) -> Ready:
        """Return its remaining positions, for the planner. decodes: whether it is a decode step."""
        tenure, span = self.tenure, self.tenure.span
        packs = span.packs and self.activations.mask is None and not tenure.is_masked
        group = (span.blocks.start, span.blocks.stop, fitting_dtype(self.activations.hidden.dtype, span))
        return Ready(self.owner, group, self.rows, self.tokens - self.done, packs, decodes=decodes)

    def segment(self, tokens: int) -> Segment | None:
        """Return the next positions, for a packed step; None if it is gone."""
        if is_gone(self):
            return None
        past = self._begin()
        assert past.mask is None
        part, span = self.activations.part(self.done, self.done + tokens), self.tenure.span
        positions = None if part.positions is None else part.positions.to(span.device)
        return Segment(fitting(part.hidden, span), past.cache, positions)

    def forward_packed(self, segments: Sequence[Segment]) -> list[Checked]:
        """Run segments of its group as one step."""
        outputs = self.tenure.span.forward_packed(segments)
        try:
            finite = is_finite(torch.cat([output.flatten() for output in outputs]))  # one look for all
        except RuntimeError:  # no memory for it: the steps are computed, and must not be computed again
            finite = False
        return [Checked(output, finite) for output in outputs]

    def run(self, tokens: int) -> None:
        """Compute the next positions alone."""
        if is_gone(self):
            return
        past = self._begin()
        new = self.activations if tokens == self.tokens else self.activations.part(self.done, self.done + tokens)
        self.take(Checked(past.forward(self.tenure.span, new), finite=False))

    def take(self, output: Checked) -> None:
        """Keep the output of the next positions."""
        hidden, finite = output
        self.done += hidden.shape[1]
        self.finite = self.finite and finite
        assert self._outputs is not None
        self._outputs.append(hidden)

    def result(self) -> Tensor | None:
        """Return the output on the host when all is computed; None once it is gone, or where it was skipped."""
        if self.tenure.over or self.done < self.tokens or self._outputs is None:
            return None
        if self.cutting is not None:
            self.cutting.cut(self.tenure.past.cache)
        output = self._outputs[0] if len(self._outputs) == 1 else torch.cat(self._outputs, dim=1)
        want = self._place.want
        if want is not None and want < self.tokens:
            output = output[:, output.shape[1] - want :].clone()  # not to hold the rest
        output = output.to("cpu")
        self.finite = self.finite or is_finite(output)  # here, where what torch needs for it is in the caches
        return output

    def _begin(self) -> SpanPast:
        """Bring the session's past to where this task starts."""
        past = self.tenure.past
        if self._outputs is None:
            past.rewind(self._place.keep, self._place.rows)
            self._outputs = []
        return past


class Void:
    """A step that is skipped before it comes: it only keeps its place among the tasks of its session."""

    __slots__ = ("owner", "tenure")

    cost: Hashable | None = None
    rows = tokens = 1
    done = 0
    has_past = replays = is_chore = False
    is_skipped = True

    def __init__(self, tenure: Tenure) -> None:
        """tenure: the session's past that it would have belonged to."""
        self.tenure = tenure
        self.owner = tenure.owner

    def skip(self, keep: int) -> bool:
        """It is skipped already."""
        del keep
        return True

    def ready(self, *, decodes: bool) -> Ready:
        """Never planned: it is gone."""
        return Ready(self.owner, None, 1, 1, packs=False, cuts=False, decodes=decodes)

    def run(self, tokens: int) -> None:
        """Nothing is computed."""

    def result(self) -> None:
        """There is none."""

    def complete(self) -> None:
        """There is nothing to compute."""


class Probe:
    """Something that runs alone in the compute thread: a measurement, a clean-up."""

    __slots__ = ("_result", "_work", "done", "is_chore")

    tenure: Tenure | None = None
    owner = ""
    cost: Hashable | None = None
    rows = tokens = 1
    has_past = replays = is_skipped = False

    def __init__(self, work: Callable[[], Any], *, is_chore: bool = False) -> None:
        """work: is called once. is_chore: it uses no device."""
        self._work = work
        self.is_chore = is_chore
        self._result: Any = None
        self.done = 0

    def ready(self, *, decodes: bool) -> Ready:
        """Return what the planner needs: it runs alone."""
        return Ready(owner="", group=None, rows=1, tokens=1, packs=False, cuts=False, decodes=decodes)

    def complete(self) -> Any:  # noqa: ANN401 - of any kind
        """Run it. Returns its result."""
        self.run(1)
        return self._result

    def run(self, tokens: int) -> None:
        """Run it; `tokens` is 1."""
        self.done = tokens
        self._result = self._work()

    def result(self) -> Any:  # noqa: ANN401 - of any kind
        """Return the result of the work."""
        return self._result


Done = Callable[[Any], None]
"""Called in the loop with what a task returned or raised; None for one that did not count any more."""


class Executor(Protocol):
    """Runs tasks, those of one tenure in the order in which they were submitted."""

    def submit(self, task: Task, done: Done) -> None:
        """Run a task elsewhere and call `done` in the loop. Tasks may run together, and in pieces."""
        ...
