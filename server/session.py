"""A session as one hop holds it: who may use it, how far it is, and what it computes.

The loop decides and counts. The cache and the attention mask are the compute thread's: a `Tenure` of them is the
session's, and its tasks run in the order in which the loop accepted their steps.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.compute.task import Forward, Tenure
from swarm.model.span import Span
from swarm.net.channel import Channel
from swarm.protocol.journal import REPLAY_BYTES_MAX, Entry, Journal, Unconfirmed, rebuild_messages
from swarm.protocol.messages import POSITIONS_MAX, ROWS_MAX, Open, Output, Rebuild, RefusalCode, Replay, Reroute, Step
from swarm.protocol.tensors import CHUNK_BYTES, TENSOR_BYTES_MAX, is_finite, meta_of
from swarm.server.pool import Lease, NoRoom, Pool, Prices

RETRY_AFTER_S = 1.0  # for whom there is no room
AGAIN_S = 0.25  # a refused step that comes again sooner was not waited with
WINDOW_STEPS = 8  # steps of one session that may be under way at a hop: a prefill's chunks
STEP_BYTES_MAX = 4 * CHUNK_BYTES  # of one step's activations, unless it is but one token of every row


class Declined(Exception):
    """A request that is not carried out."""

    def __init__(self, code: RefusalCode, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.retry_after_s = retry_after_s


class Forgotten(Exception):
    """A step came again whose output is not kept any more: this hop cannot go on with the session."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a step's output was, for the case that the step arrives again."""

    step: int
    message: Step | Output
    activations: Activations | None
    in_journal: bool = False  # the activations are there, and not here

    @property
    def n_bytes(self) -> int:
        """Memory that the tensors take."""
        return 0 if self.activations is None else self.activations.n_bytes


@dataclass(slots=True)
class Grant:
    """For how long and how much the previous hop may push. ends_at: in the loop's time."""

    ends_at: float
    tokens: int | None

    @classmethod
    def of(cls, request: Open | Reroute, now: float) -> "Grant":
        """What the owner grants with a request."""
        return cls(now + request.lifetime_s, request.tokens_max)

    def check(self, now: float) -> None:
        """Raise Declined if it has ended."""
        if now > self.ends_at:
            raise Declined("grant_over", "the owner's grant has ended")

    def left(self, tokens: int) -> int | None:
        """Return what is left after so many tokens of all rows. Raises Declined if that is too many."""
        if self.tokens is not None and tokens > self.tokens:
            raise Declined("grant_over", f"{tokens} tokens, the owner's grant has {self.tokens} left")
        return None if self.tokens is None else self.tokens - tokens


@dataclass(frozen=True, slots=True)
class Leases:
    """What a session holds of its server's memory.

    cache: tokens, which cost what `prices` says. inputs: bytes of activations that are not computed yet. Both are held
    until the compute thread has no work of the session's any more, even after its end: no sooner is the memory free.
    outputs: bytes kept in case a step comes again. journal: bytes.
    """

    prices: Prices
    cache: Lease
    inputs: Lease
    outputs: Lease
    journal: Lease


@dataclass(frozen=True, slots=True)
class _Refused:
    """The last step for which there was no room, when it may come again, and those that were on their way behind it."""

    step: int
    again_at: float
    behind: set[int]


class HostedSession:
    """One session on one hop."""

    def __init__(self, request: Open, owner: Channel, span: Span, leases: Leases, now: float) -> None:
        """now: in the loop's time, seconds."""
        self.id = request.session
        self.epoch = request.epoch
        self.owner = owner
        self.previous = request.previous or owner.peer
        self.has_next = request.next_record is not None or request.relay  # else outputs are the route's
        self.next: Channel | None = None  # while there is a connection to it; the owner's, where that one relays
        self.source: Channel | None = None  # where activations last came from
        self.journal: Journal | None = Journal() if self.has_next else None
        self.leases = leases
        self.replay: Iterator[tuple[Rebuild, Activations]] | None = None  # what is still to be sent of it
        self._replay_bytes = 0  # that this keeps, whatever becomes of the journal, and what was noted since
        self.unconfirmed = Unconfirmed()  # by the next hop: of the journal, or of a past that goes on from here
        self.window: Lease | None = None  # room for what may come at once of a past that is being rebuilt
        self._rebuilt_bytes = 0  # since somebody last looked whether the window is used
        self.used_at = now
        self.grant = Grant.of(request, now)
        self.closed = False
        self.tenure = Tenure(owner.peer, span, request.rollback_max)  # another one when the past is forgotten
        self._sent: deque[Sent] = deque(maxlen=WINDOW_STEPS)
        self._promised = leases.prices.tokens(request.batch, request.positions_soon, request.rollback_max)
        self._positions_max = min(request.positions_max, span.traits.positions_max or POSITIONS_MAX)
        self._rollback_max = request.rollback_max
        self._step = request.after_step  # the last accepted one
        self._rows = 0
        self._length = 0
        self._steps_under_way = self._pieces_under_way = 0  # accepted and not computed yet
        self._works = 0  # that the compute thread has, those included that count no more
        self.span = span
        self._rebuild_from: int | None = 0 if request.rebuild else None  # the next position to be rebuilt
        self._refused = _Refused(0, now, set())

    # In the loop

    @property
    def step(self) -> int:
        """The last step that was accepted."""
        return self._step

    @property
    def applied(self) -> int:
        """The last step that was computed."""
        return max(0, self._step - self._steps_under_way)

    @property
    def still_promised(self) -> int:
        """Cached tokens that it was opened for and does not hold yet."""
        return max(0, self._promised - self.leases.cache.amount)

    @property
    def under_way(self) -> int:
        """Accepted steps and pieces of the past that are not computed yet."""
        return self._steps_under_way + self._pieces_under_way

    @property
    def length(self) -> int:
        """Positions, those of accepted steps included."""
        return self._length

    def payer(self, sender: Channel) -> Channel:
        """Whose channel is charged for activations that are refused: a hop that hands them on is not to blame.

        But if the owner's is not read already, whoever sends them regardless is.
        """
        return sender if sender.peer == self.owner.peer or self.owner.is_paused else self.owner

    def excuses(self, step: int, declined: Declined, now: float) -> bool:
        """Whether a refused step costs nobody anything: there was no room, or none for one before it.

        So many as may be under way come before their sender can know; later the one that is asked for comes again.
        """
        last = self._refused
        if declined.retry_after_s is None or step != self._step + 1:
            excused = step in last.behind
            last.behind.discard(step)
            return excused
        if step == last.step and now < last.again_at:
            return False
        behind = last.behind if step == last.step else set(range(step + 1, step + WINDOW_STEPS))
        self._refused = _Refused(step, now + max(AGAIN_S, declined.retry_after_s / 2), behind)
        return True

    def close(self) -> None:
        """End it, and give back what it holds: all but what the compute thread still has."""
        self.closed = self.tenure.over = True
        self.end_replay()
        self.leave_window()
        self.leases.outputs.release()
        self.drop_journal()
        self._settle()

    def reroute(self, request: Reroute, now: float) -> None:
        """Take new neighbours and a new grant; forget the past if it is to come anew."""
        self.epoch = request.epoch
        self.used_at = now
        self.grant = Grant.of(request, now)
        self.end_replay()
        self.replay, self.unconfirmed = None, Unconfirmed()
        self.leave_window()
        if request.reset or (request.next_record is None and not request.relay):
            self.drop_journal()
        self.previous = request.previous or self.owner.peer
        self.has_next = request.next_record is not None or request.relay
        if request.reset:
            self.tenure.over = True
            self.tenure = Tenure(self.owner.peer, self.span, self._rollback_max)
            self._sent.clear()
            self.leases.outputs.release()
            self._step, self._length, self._rows = request.after_step, 0, 0
            self._steps_under_way = self._pieces_under_way = 0
            self._rebuild_from = 0
        if self.journal is None and self.has_next and self._length == 0:
            self.journal = Journal()  # there is nothing yet that it would lack

    def note(self, entry: Entry) -> bool:
        """Keep an output for replay; False, and no journal any more, where there is no room for it."""
        if self.journal is None:
            return True
        replayed = self._replay_bytes + entry.past.n_bytes if self._replay_bytes else 0
        try:  # first, since the journal may copy much more than what it is given
            self.leases.journal.resize(max(self.journal.n_bytes_with(entry), replayed))
        except NoRoom:
            self.drop_journal()
            return False
        self._replay_bytes = replayed
        self.journal.add(entry)
        return True

    def drop_journal(self) -> None:
        """Keep no outputs for replay from now on, and none of those before."""
        self.journal = None
        self.leases.journal.resize(self._replay_bytes)

    def start_replay(self, request: Replay) -> Iterator[tuple[Rebuild, Activations]]:
        """Return the past that the next hops lack, in the pieces in which it is to be sent. Raises Declined."""
        if self.journal is None:
            raise Declined("bad_request", "there is no journal of this session")
        self._replay_bytes = self.journal.n_bytes
        self.unconfirmed = Unconfirmed()
        self.replay = rebuild_messages(self.id, request.epoch, self.journal.past_after(request.step), request.hops)
        return self.replay

    def end_replay(self) -> None:
        """Keep nothing more for it; it has begun in this epoch all the same."""
        if self.replay is not None:
            self.replay, self._replay_bytes = iter(()), 0
            self.leases.journal.resize(0 if self.journal is None else self.journal.n_bytes)

    def outcome(self, step: Step, output: Activations, took_s: float) -> Sent:
        """What goes on: the same step with new activations, or at the route's end what the client wants of them."""
        if not self.has_next:
            hidden = output.hidden
            last = Output(
                session=self.id, epoch=step.epoch, step=step.step, hidden=meta_of(hidden) if step.want else None
            )
            return Sent(step.step, last, Activations(hidden) if step.want else None)
        left_ms = max(0, step.budget_ms - int(took_s * 1000))
        message = step.model_copy(update={"budget_ms": left_ms, "hidden": meta_of(output.hidden)})
        return Sent(step.step, message, output)

    def keep_sent(self, sent: Sent) -> None:
        """Note what was sent, and forget the oldest where there is no room for all."""
        self._sent.append(sent if self.journal is None else replace(sent, activations=None, in_journal=True))
        while True:
            try:
                self.leases.outputs.resize(sum(each.n_bytes for each in self._sent))
            except NoRoom:
                self._sent.popleft()
            else:
                return

    def repeated(self, number: int) -> Sent | None:
        """Return what was sent for a step that was applied before, None for a new step.

        Raises Declined for one that is being computed or long past, and Forgotten.
        """
        if number > self._step:
            return None
        for sent in self._sent:
            if sent.step == number and not sent.in_journal:
                return sent
            if sent.step == number and self.journal is not None:
                return replace(sent, activations=self.journal.output_of(number), in_journal=False)
        if number > self.applied:
            raise Declined("out_of_order", f"step {number} is still being computed")
        if number > self._step - WINDOW_STEPS:
            raise Forgotten(f"the output of step {number} was too much to keep")
        raise Declined("out_of_order", f"step {number} is long past; the next is {self._step + 1}")

    def accept(self, step: Step, activations: Activations) -> None:
        """Check a new step against the session and charge its memory. Raises Declined, and then nothing has changed."""
        if self._rebuild_from is not None:
            raise Declined("out_of_order", "the past is being rebuilt")
        if step.step != self._step + 1:
            raise Declined("out_of_order", f"step {step.step} came, {self._step + 1} is the next")
        if self._steps_under_way >= WINDOW_STEPS:
            raise Declined("bad_request", f"more than {WINDOW_STEPS} steps under way")
        rows, tokens = self._check_tensors(activations)
        self._check_rows(step, rows)
        taken_back = self._length - step.keep
        if taken_back < 0 or (step.keep and taken_back > (self._rollback_max or self._length)):
            raise Declined("bad_request", f"keep {step.keep} of {self._length} positions")
        length = step.keep + tokens
        if length > self._positions_max:
            raise Declined("bad_request", f"{length} positions, the session was opened for {self._positions_max}")
        if step.want > tokens:
            raise Declined("bad_request", f"{step.want} positions wanted of {tokens}")
        self._hold(rows, tokens, length, activations.n_bytes)
        self._step, self._rows, self._length = step.step, rows, length
        self._steps_under_way += 1

    def has_rebuilt(self, piece: Rebuild) -> bool:
        """Whether a piece of the past has been accepted before: it came twice."""
        return piece.start < (self._length if self._rebuild_from is None else self._rebuild_from)

    def accept_rebuild(self, piece: Rebuild, activations: Activations, windows: Pool) -> None:
        """Check a piece of the past and charge its memory. windows: what all pasts share. Raises Declined."""
        rows, tokens = self._check_tensors(activations)
        if piece.start != self._rebuild_from or not piece.start + tokens <= piece.total <= self._positions_max:
            raise Declined("bad_request", f"positions from {piece.start}, {self._rebuild_from} is the next to rebuild")
        if piece.start and rows != self._rows:
            raise Declined("bad_request", f"{rows} rows, the session has {self._rows}")
        if piece.start == 0:
            self._take_window(windows, min(REPLAY_BYTES_MAX, activations.hidden.nbytes * piece.total // tokens))
        self._rebuilt_bytes += activations.hidden.nbytes
        self._hold(rows, tokens, piece.start + tokens, activations.n_bytes)
        self._rows, self._length = rows, piece.start + tokens
        self._rebuild_from = piece.start + tokens if piece.start + tokens < piece.total else None
        self._pieces_under_way += 1

    def leave_window(self) -> None:
        """Give back the room for a past: nothing more comes of it."""
        if self.window is not None:
            self.window.release()

    def keep_window_if_used(self) -> None:
        """Give back the room for a past of which hardly anything has come since this was last called."""
        if self._rebuilt_bytes < CHUNK_BYTES // 2:
            self.leave_window()
        self._rebuilt_bytes = 0

    def _take_window(self, windows: Pool, n_bytes: int) -> None:
        """Take room for what comes at once of a past, until it is whole. Raises Declined.

        Else of many pasts each would come in part, and be refused in the end for want of room.
        """
        self.window = self.window or windows.lease(self.owner.peer)
        try:
            self.window.resize(n_bytes)
        except NoRoom:
            raise Declined("busy", "too many pasts are being rebuilt", RETRY_AFTER_S) from None

    def _hold(self, rows: int, tokens: int, positions: int, n_bytes: int) -> None:
        """Use up some of the grant, and memory: for `positions` in all, and for a new input. Raises Declined."""
        left, inputs = self.grant.left(rows * tokens), self.leases.inputs
        if n_bytes > inputs.room:
            raise Declined("busy", "too much waits to be computed", RETRY_AFTER_S)
        cache = self.leases.cache
        try:  # what a rollback frees is free when that has been computed
            cache.resize(max(cache.amount, self.leases.prices.tokens(rows, positions, self._rollback_max)))
        except NoRoom as full:
            why = f"{full.needed} more tokens do not fit, {full.free} are there for you"
            fits_ever = cache.amount + full.needed <= cache.pool.most
            raise Declined("no_room", why, RETRY_AFTER_S if fits_ever else None) from None
        inputs.resize(inputs.amount + n_bytes)
        self.grant.tokens = left

    def _check_tensors(self, activations: Activations) -> tuple[int, int]:
        """Return rows and tokens of activations and what comes with them. Raises Declined."""
        hidden, positions, mask = activations.hidden, activations.positions, activations.mask
        # Some families add up residuals in fp32 between bf16 blocks, so any floating dtype may come.
        if hidden.dim() != 3 or hidden.shape[2] != self.span.hidden_size or not hidden.dtype.is_floating_point:
            raise Declined("bad_activations", f"activations of shape {list(hidden.shape)} and {hidden.dtype}")
        rows, tokens, _ = hidden.shape
        if rows > ROWS_MAX:
            raise Declined("bad_request", f"{rows} rows, a session has {ROWS_MAX} at most")
        if hidden.nbytes > STEP_BYTES_MAX and tokens > 1:
            raise Declined("bad_request", f"a step of {hidden.nbytes} bytes; cut it into parts of {CHUNK_BYTES}")
        if 4 * hidden.numel() > TENSOR_BYTES_MAX:  # what comes out may be fp32, and must fit into a frame
            raise Declined("bad_request", f"{rows} rows are too many for this model")
        if positions is not None and (
            positions.dtype != torch.int64 or positions.shape not in {(1, tokens), (rows, tokens)}
        ):
            raise Declined("bad_request", f"position ids of shape {list(positions.shape)}")
        if positions is not None:
            self._check_positions(positions)
        if mask is not None and (mask.dtype != torch.uint8 or mask.shape != (rows, tokens)):
            raise Declined("bad_request", f"attention mask of shape {list(mask.shape)}")
        if not is_finite(hidden):
            raise Declined("bad_activations", "activations that are infinite or no numbers")
        return rows, tokens

    def _check_positions(self, positions: Tensor) -> None:
        """Out of range they could index beyond a table, or rescale a rotary embedding that all sessions share."""
        limit = self.span.traits.positions_max or POSITIONS_MAX
        first, last = (int(bound) for bound in positions.aminmax())
        if first < 0 or last >= limit:
            raise Declined("bad_request", f"position ids from {first} to {last}, the model has 0 to {limit - 1}")

    def _check_rows(self, step: Step, rows: int) -> None:
        if step.rows is not None:
            if len(step.rows) != rows or max(step.rows, default=0) >= max(self._rows, 1):
                raise Declined("bad_request", f"{len(step.rows)} rows gathered from {self._rows}, {rows} sent")
        elif self._rows and step.keep and rows != self._rows:
            raise Declined("bad_request", f"{rows} rows, the session has {self._rows}")

    def hand_over(self, message: Step | Rebuild, activations: Activations) -> Forward:
        """Return what an accepted message is for the compute thread, which gets it now."""
        self._works += 1
        if isinstance(message, Rebuild):
            return Forward(self.tenure, activations, keep=message.start)
        want = None if self.has_next else message.want
        return Forward(self.tenure, activations, keep=message.keep, rows=message.rows, want=want)

    def let_go(self, input_bytes: int) -> None:
        """Note that work with so much input has come back from there, whatever became of it."""
        self._works -= 1
        self.leases.inputs.resize(self.leases.inputs.amount - input_bytes)
        self._settle()

    def computed_step(self) -> None:
        """Note that a step which still counts has come back from the compute thread."""
        self._steps_under_way -= 1

    def computed_piece(self) -> None:
        """The same of a piece of the past."""
        self._pieces_under_way -= 1

    def _settle(self) -> None:
        """Hold no more cache than the past takes, once nothing under way may change that."""
        if self._works:
            return
        if self.closed:
            self.leases.cache.release()
        elif self._rebuild_from is None:
            self.leases.cache.resize(self.leases.prices.tokens(self._rows, self._length, self._rollback_max))
