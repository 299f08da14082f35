"""The hop's end of a session's stream of steps: each is computed once, in order, and answered as often as it comes.

Steps have numbers without gaps. The state is two counters, the answers of the last steps, and no more:

    applied  <=  accepted  <=  applied + window        both only rise, by one; a reset sets them anew

    offer(step)             `accepted` + 1          -> New         the owner checks it, then accept(step), or refuses it
                                                    -> Full        a whole window of steps waits to be computed
                            behind that             -> Early       a step before it is missing
                            in (applied, accepted]  -> Busy        it is being computed, its answer goes out anyway
                            in the last `window`    -> Again       the owner sends the answer that it gets here
                                                    -> Forgotten   that answer was evicted: the session cannot go on
                            before these            -> Late        its sender has had the answer
    accept(step)            the step is New and goes to the compute thread
    computed(...)           the oldest accepted step is computed, or skipped; its answer is kept. Never called for work
                            from before a reset: such work counts no more (the owner's tenure says so)
    reset(after_step)       the past is forgotten and comes anew: no work is under way, no answer is kept
    journal_dropped()       answers of which the tensors were in the journal only are forgotten

`offer` changes nothing, so it may be asked first and obeyed in parts, between other checks. An answer is kept with its
tensors if the session has no journal; else the journal has them. Kept bytes are counted as they come and go. The oldest
answers are evicted if there is no room for all; `fits` takes the room. `Excuses` is a rule about refused steps: which
of them cost their sender nothing.

A server calls `offer` for each step of the right sender and epoch, matches the verdict, and calls `accept` last, after
memory was charged. tests/protocol/test_stream.py drives this end against `outbox` over a wire that loses, repeats and
reorders.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.limits import limit

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class InboxLimits:
    """Bounds on one session's steps at a hop."""

    window_steps: int = limit(32, "steps", "a hop refuses a step beyond so many that wait; it keeps as many answers")
    again_s: float = limit(0.25, "s", "a refused step that comes again sooner is charged")


@dataclass(frozen=True, slots=True)
class New:
    """The step is the next one."""


@dataclass(frozen=True, slots=True)
class Again(Generic[Kept]):
    """The step was computed before. in_journal: the tensors of its answer are in the session's journal."""

    answer: Kept
    in_journal: bool


@dataclass(frozen=True, slots=True)
class Early:
    """A step before it is missing."""

    why: str


@dataclass(frozen=True, slots=True)
class Late:
    """The step is older than all answers that a hop keeps."""

    why: str


@dataclass(frozen=True, slots=True)
class Busy:
    """The step is being computed."""

    why: str


@dataclass(frozen=True, slots=True)
class Full:
    """The step is the next one, behind a whole window of steps that are not computed yet."""

    why: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The answer was evicted although its sender may lack it."""

    why: str


Verdict = New | Again[Kept] | Early | Late | Busy | Full | Forgotten


@dataclass(frozen=True, slots=True)
class _Answer(Generic[Kept]):
    step: int
    answer: Kept
    n_bytes: int
    in_journal: bool


class Inbox(Generic[Kept]):
    """The steps of one session at one hop. Kept: an answer, with or without its tensors."""

    def __init__(self, after_step: int = 0, limits: InboxLimits | None = None) -> None:
        """after_step: the last step that the session is behind already."""
        self.accepted = after_step
        self.under_way = 0  # steps that were accepted and are not computed
        self.n_bytes = 0  # of the answers that are kept here
        self._window = (limits or InboxLimits()).window_steps
        self._answers: deque[_Answer[Kept]] = deque()

    @property
    def applied(self) -> int:
        """The last step that was computed."""
        return self.accepted - self.under_way

    def offer(self, step: int) -> Verdict[Kept]:
        """Tell new steps from others. Changes nothing."""
        due = self.accepted + 1
        if step > due:
            return Early(f"step {step} came, {due} is the next")
        if step == due:
            return New() if self.under_way < self._window else Full(f"more than {self._window} steps under way")
        for kept in self._answers:
            if kept.step == step:
                return Again(kept.answer, kept.in_journal)
        if step > self.applied:
            return Busy(f"step {step} is still being computed")
        if step > self.accepted - self._window:
            return Forgotten(f"the output of step {step} was too much to keep")
        return Late(f"step {step} is long past; the next is {due}")

    def accept(self, step: int) -> None:
        """Count a New step that goes to be computed."""
        assert step == self.accepted + 1
        assert self.under_way < self._window
        self.accepted = step
        self.under_way += 1

    def computed(
        self, step: int, answer: Kept, n_bytes: int, fits: Callable[[int], bool], *, in_journal: bool = False
    ) -> None:
        """Count a computed step and keep its answer.

        n_bytes: memory that the answer takes here; 0 for one in the journal. fits: takes room for so many bytes in
        all, more or less than before, or returns False; it must have room for none.
        """
        assert step == self.accepted - self.under_way + 1
        self.under_way -= 1
        if self._answers and self._answers[0].step <= step - self._window:
            self._forget_oldest()
        self._answers.append(_Answer(step, answer, n_bytes, in_journal))
        self.n_bytes += n_bytes
        while not fits(self.n_bytes):
            self._forget_oldest()

    def journal_dropped(self) -> None:
        """Forget the answers whose tensors were in the journal."""
        self._answers = deque(answer for answer in self._answers if not answer.in_journal)

    def reset(self, after_step: int) -> None:
        """Begin anew behind this step: the past comes again."""
        self.accepted, self.under_way, self.n_bytes = after_step, 0, 0
        self._answers.clear()

    def _forget_oldest(self) -> None:
        self.n_bytes -= self._answers.popleft().n_bytes


class Excuses:
    """Which refused steps cost their sender nothing: those for which there was no room, and those behind such a one.

    As many steps as a window has may be on their way before the sender learns of the refusal: each of them is free
    once. The step itself is free again only if its sender has waited for half of the time that it was told to wait.
    """

    def __init__(self, limits: InboxLimits | None = None) -> None:
        self._limits = limits or InboxLimits()
        self._step = 0  # the last step for which there was no room
        self._again_at = 0.0  # when it may come again
        self._behind: set[int] = set()  # steps that were perhaps on their way behind it

    def excuse(self, step: int, due: int, retry_after_s: float | None, now: float) -> bool:
        """Say whether this refusal is free.

        due: the step that the inbox takes next. retry_after_s: as in the refusal; None for a step that is not to come
        again.
        """
        if retry_after_s is None or step != due:
            free = step in self._behind
            self._behind.discard(step)
            return free
        if step == self._step:
            if now < self._again_at:
                return False
        else:
            self._behind = set(range(step + 1, step + self._limits.window_steps))
        self._step = step
        self._again_at = now + max(self._limits.again_s, retry_after_s / 2)
        return True
