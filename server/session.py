"""A session as one hop holds it.

Each part owns its state: `Seat` (the grant and the neighbours' names, replaced whole by a reroute), `Inbox` (the order
of steps and their answers), `PastReceiver` (a past that comes), `History` (a past that is kept and sent), `Holdings`
(memory), `Tenure` (the compute thread's cache, and whether its work still counts). The session joins them: it applies
the messages that the gates let pass.
"""

from collections import deque
from dataclasses import dataclass, field

import structlog

from swarm.activations import Activations, NumericClass
from swarm.compute.task import Forward, Place, Tenure, Void
from swarm.model.prefix import PastBlock
from swarm.model.span import Span
from swarm.net.channel import Channel
from swarm.protocol.inbox import Again, Excuses, Inbox, InboxLimits
from swarm.protocol.journal import Entry, Past
from swarm.protocol.messages import POSITIONS_MAX, Open, Output, Progress, Rebuild, Reroute, Step
from swarm.protocol.replay import PastReceiver
from swarm.protocol.seat import Client, Seat
from swarm.protocol.tensors import coding_of, meta_of
from swarm.server.history import History
from swarm.server.holdings import Holdings
from swarm.server.limits import HostedLimits

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class Answer:
    """The message that a computed step leads to. activations: None if the client wants none, or in the journal."""

    message: Step | Output
    activations: Activations | None


@dataclass(slots=True, eq=False)
class Neighbours:
    """The channels of one session. used_at: when the session last moved, in the loop's time, seconds.

    next: while there is a connection to the next hop; the owner's, if the owner relays. source: the channel that
    activations last came from. early: steps that were computed before the first connection to the next hop; None once
    there was one, or a reroute: then the owner sends such steps again.
    """

    owner: Channel
    used_at: float
    next: Channel | None = None
    source: Channel | None = None
    early: deque[int] | None = field(default_factory=lambda: deque(maxlen=InboxLimits().window_steps))


class HostedSession:
    """One session on one hop. Its public parts are its state; each changes by its own rules."""

    def __init__(
        self, request: Open, owner: Channel, span: Span, holdings: Holdings, limits: HostedLimits, now: float
    ) -> None:
        """span: the part that the session uses. now: in the loop's time, seconds."""
        self.id = request.session
        self.peers = Neighbours(owner, now)
        self.seat = Seat.of(request, owner.peer, now)
        self.positions_max = min(request.positions_max, span.traits.positions_max or POSITIONS_MAX)
        self.rows = self.length = 0  # positions of each row, those of accepted steps and pieces included
        self.inbox: Inbox[Answer] = Inbox(request.after_step, limits.inbox)
        self.excuses = Excuses(limits.inbox)
        self.receiver = PastReceiver(self.positions_max, rebuild=request.rebuild, limits=limits.replay)
        self.holdings = holdings
        coding = coding_of(NumericClass.parse(request.numeric_class).wire)  # Hosting has accepted it
        tallies = bool(request.receipt)
        self.history = History(holdings, limits, keeps=self.seat.has_next, coding=coding, tallies=tallies)
        self.tenure = Tenure(owner.peer, span, request.rollback_max, request.tenant)  # another one after a reset

    @property
    def owner(self) -> Channel:
        """The channel of the peer that opened the session and controls it."""
        return self.peers.owner

    @property
    def span(self) -> Span:
        """The blocks that it runs."""
        return self.tenure.span

    @property
    def has_begun(self) -> bool:
        """Whether a step was accepted, as far as the past that it began with matters."""
        return self.tenure.marked is None or self.tenure.marked.stop is not None

    def payer(self, sender: Channel) -> Channel:
        """Return the channel that pays for activations that are refused: a hop that passes them on is not to blame.

        If the owner is not read already, the sender pays: else it could send without end in the owner's name.
        """
        owner = self.peers.owner
        return sender if sender.peer == owner.peer or owner.is_paused else owner

    # Work

    def accept(self, message: Step | Rebuild, activations: Activations) -> Forward:
        """Apply a message that passed all gates, which took its memory. Returns the task that computes it."""
        rows, tokens, _ = activations.hidden.shape
        if self.seat.grant.tokens is not None:
            seat = self.seat.spend(rows * tokens)
            assert seat is not None
            self.seat = seat
        self.rows = rows
        if isinstance(message, Rebuild):
            self.length = message.start + tokens
            self.receiver.accept(message)
            return Forward(self.tenure, activations, Place(message.start), replays=True)
        self.length = message.keep + tokens
        self.inbox.accept(message.step)
        if message.skips:
            self.tenure.skip(message.keep)
        want = message.want if isinstance(self.seat.next, Client) else None
        task = Forward(self.tenure, activations, Place(message.keep, message.rows, want))
        self.tenure.waiting.append(task)
        return task

    def is_void(self, step: Step) -> bool:
        """Whether a step is not to be computed: a hop before has skipped it, or one whose positions it continues.

        A later step takes all of them back. Else the client finds its answer missing, and fails this hop.
        """
        return step.hidden is None or step.keep > self.length

    def accept_void(self, step: Step) -> Void:
        """Count a step that is not to be computed, and that passed the gates. Returns the task that keeps its place."""
        self.length = min(self.length, step.keep)
        self.inbox.accept(step.step)
        task = Void(self.tenure)
        self.tenure.waiting.append(task)
        return task

    def skip(self, step: Step) -> Answer:
        """Return the answer to a step that was skipped, and keep it."""
        answer = Answer(Output(session=self.id, epoch=step.epoch, step=step.step), None)
        if self.seat.has_next:
            nothing = {"rows": None, "hidden": None, "positions": None, "mask": None}
            answer = Answer(step.model_copy(update=nothing), None)
        self.inbox.computed(step.step, answer, 0, self.holdings.answers)
        return answer

    def begin_with(self, blocks: tuple[PastBlock, ...], positions: int) -> bool:
        """Begin with a past that another session has left, at its opening. Returns False where it does not fit.

        There are no outputs of it, so there is no journal: a repair replays it from further up.
        """
        if not self.holdings.begin(positions):
            return False
        self.rows, self.length, self.tenure.held = 1, positions, blocks
        self.drop_journal()
        if self.history.tally is not None:
            self.history.tally.lose("it began with a kept past")
        return True

    def begun(self, keep: int) -> None:
        """Take the first step of a session that may have begun with a past. keep: positions of it that stay."""
        if not keep and self.history.journal is None and self.seat.has_next:
            self.history.begin_anew()

    def answer(self, step: Step, output: Activations, took_s: float) -> Answer:
        """Return the message that a step leads to: the same with new activations, or the output for the client."""
        coding = self.history.coding
        if not isinstance(self.seat.next, Client):
            left_ms = max(0, step.budget_ms - int(took_s * 1000))
            changes = {"budget_ms": left_ms, "hidden": meta_of(output.hidden, coding)}
            return Answer(step.model_copy(update=changes), output)
        hidden = meta_of(output.hidden, coding) if step.want else None
        last = Output(session=self.id, epoch=step.epoch, step=step.step, hidden=hidden)
        if hidden is None:
            return Answer(last, None)
        alone = output.positions is None and output.mask is None
        return Answer(last, output if alone else Activations(output.hidden))

    def keep(self, step: Step, answer: Answer) -> None:
        """Keep a computed step's answer in case the step comes again. Its activations may be in the journal already."""
        if self.history.journal is not None:
            kept = Answer(answer.message, None)
            self.inbox.computed(step.step, kept, 0, self.holdings.answers, in_journal=True)
            return
        n_bytes = 0 if answer.activations is None else answer.activations.n_bytes
        self.inbox.computed(step.step, answer, n_bytes, self.holdings.answers)

    def kept(self, again: Again[Answer]) -> Answer:
        """Return a kept answer with its activations."""
        if not again.in_journal:
            return again.answer
        assert self.history.journal is not None  # the inbox forgets such answers with the journal
        message = again.answer.message
        return Answer(message, self.history.journal.output_of(message.step))

    def note(self, step: int, rows: tuple[int, ...] | None, start: int, output: Activations) -> None:
        """Keep an output for replay. A journal for which there is no room is dropped, which costs no other session."""
        if self.history.journal is None or self.history.note(Entry(step, rows, Past(start, output))):
            return
        _log.warning("journal dropped: --journal-memory is used up", session=self.id[:8])
        self.drop_journal()

    def drop_journal(self) -> None:
        """Keep no outputs for replay from now on, and none of those before."""
        self.history.drop()
        self.inbox.journal_dropped()

    # Changes

    def reroute(self, request: Reroute, now: float) -> None:
        """Take a new seat; forget the past if it is to come anew."""
        self.seat = Seat.of(request, self.owner.peer, now)
        self.peers.used_at, self.peers.early = now, None
        self.history.begin_epoch()
        self.holdings.end_window()
        if request.reset or not self.seat.has_next:
            self.drop_journal()
        if request.reset:
            self._reset(request.after_step)
        if self.history.journal is None and self.seat.has_next and self.length == 0:
            self.history.begin_anew()

    def _reset(self, after_step: int) -> None:
        self.tenure.over = True
        self.tenure = self.tenure.anew(self.owner.peer)
        self.inbox.reset(after_step)
        self.holdings.answers(0)
        self.receiver.reset()
        if self.history.tally is not None:
            self.history.tally.reset()
        self.rows = self.length = 0

    def end(self) -> None:
        """End it, and give back its memory: all but the part that the compute thread still has."""
        self.tenure.over = True
        self.history.end()
        self.holdings.end()
        if not self.holdings.is_computing:
            self.tenure.release()

    # Reports

    def progress(self, jobs_done: int, now: float) -> Progress:
        """Say how far it is. jobs_done: of the server, for all sessions."""
        # The inquiry itself comes from the owner, behind everything that the owner has sent before.
        source = self.peers.source or self.owner
        heard_at = self.peers.used_at if source is self.owner else source.heard_at
        quiet_s = 0.0 if source.is_paused else now - heard_at  # its bytes wait here; they are not lost
        return Progress(
            session=self.id,
            epoch=self.seat.epoch,
            applied=self.inbox.applied,
            length=self.length,
            under_way=self.inbox.under_way + self.receiver.under_way,
            jobs_done=jobs_done,
            quiet_ms=max(0, int(1000 * quiet_s)),
        )
