"""The checks that a step or a piece of a past passes on a server: one list for each, in the order in which they run.

A gate looks at a session and at the facts of one message. It returns None, or the reason why the message goes no
further. The first reason wins, so the order is behaviour: a step that was computed before is answered again even if its
grant has ended, and no bytes are charged to an account for a step that came too late. Gates change nothing of the
session. `account` and `debt` charge the owner's account; `window` and `memory` take memory for a message that passes.

A channel has checked before: whether it may read, the frame's size, the message's fields, that the tensors fill it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.activations import Activations
from swarm.net.channel import Channel
from swarm.protocol.inbox import Again, Early, Forgotten, Full, New, Verdict
from swarm.protocol.messages import Rebuild, Step
from swarm.protocol.replay import Compute, Refuse, Twice
from swarm.server import inputs
from swarm.server.accounts import Accounts
from swarm.server.limits import HostedLimits
from swarm.server.refusals import Declined
from swarm.server.session import Answer, HostedSession


@dataclass(slots=True)
class Facts:
    """One message of a session's stream, and the measures of the gates. now: the loop's time, seconds.

    activations: None for a step that is not to be computed; else `given` are the same. n_bytes, hidden_bytes: of all
    its tensors that are to be computed, and of its hidden states alone. n_tokens: of all its rows that are to be
    computed; the shape need not be right yet. width: of the model's hidden states. verdict: of the session's inbox or
    receiver, noted by the first gate that asks.
    """

    channel: Channel
    message: Step | Rebuild
    activations: Activations | None
    now: float
    accounts: Accounts
    limits: HostedLimits
    width: int = 1
    verdict: "Verdict[Answer] | Compute | Twice | Refuse | None" = None
    given: Activations = field(init=False)
    n_bytes: int = field(init=False, default=0)
    hidden_bytes: int = field(init=False, default=0)
    n_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.activations is not None:
            self.given = self.activations
            hidden = self.activations.hidden
            self.n_bytes, self.hidden_bytes = self.activations.n_bytes, hidden.nbytes
            self.n_tokens = hidden.numel() // max(hidden.shape[-1], self.width)


@dataclass(frozen=True, slots=True)
class Stray:
    """The message is from another peer or another route. Its sender is told, the session's owner is not."""

    why: str


Stop = Declined | Stray | Again[Answer] | Forgotten | Twice
"""Why a message goes no further. Declined: the owner is told. Again: its answer is sent again. Forgotten: the session
cannot go on. Twice: nothing is to be done."""

Check = Callable[[HostedSession, Facts], Stop | None]


@dataclass(frozen=True, slots=True)
class Gate:
    """One entry of the list."""

    name: str
    check: Check


# Of both kinds


def _seat(session: HostedSession, facts: Facts) -> Stop | None:
    """The session's seat expects this sender and epoch."""
    seat, sender, epoch = session.seat, facts.channel.peer, facts.message.epoch
    if sender == seat.previous and epoch == seat.epoch:
        return None
    return Stray(seat.objection(sender, epoch) or "")


def _time(session: HostedSession, facts: Facts) -> Stop | None:
    """The owner's grant lasts, and so does the client's patience with a step."""
    if facts.now > session.seat.grant.ends_at:
        return Declined("grant_over", "the owner's grant has ended")
    if isinstance(facts.message, Step) and facts.message.budget_ms == 0:
        return Declined("too_late", "the step's time is over")
    return None


def _tensors(session: HostedSession, facts: Facts) -> Stop | None:
    """The tensors are coded as the session's are, and have shapes and numbers that the span can compute.

    Gates behind this may read rows and tokens.
    """
    hidden, coding = facts.message.hidden, session.history.coding
    if hidden is not None and hidden.coding != coding:
        return Declined("bad_activations", f"activations sent as {hidden.coding}, the session's are {coding}")
    return inputs.objection(facts.given, session.tenure.span, facts.limits.step_bytes_max)


def _tokens(session: HostedSession, facts: Facts) -> Stop | None:
    """The owner's grant has so many tokens left."""
    left = session.seat.grant.tokens
    if left is None:
        return None
    tokens = facts.given.rows * facts.given.tokens
    if tokens > left:
        return Declined("grant_over", f"{tokens} tokens, the owner's grant has {left} left")
    return None


def _memory(session: HostedSession, facts: Facts) -> Stop | None:
    """The pools of inputs and of cache have room. This gate is the last: the message is accepted if it passes."""
    rows, tokens, _ = facts.given.hidden.shape
    start = facts.message.keep if isinstance(facts.message, Step) else facts.message.start
    return session.holdings.step(rows, start + tokens, facts.n_bytes)


# Of steps


def _repeated(session: HostedSession, facts: Facts) -> Stop | None:
    """A step that was accepted before has an answer that is kept."""
    assert isinstance(facts.message, Step)
    verdict = facts.verdict = session.inbox.offer(facts.message.step)
    match verdict:
        case New() | Again() | Early() | Full():
            return None
        case Forgotten():
            return verdict
        case _:
            return Declined("out_of_order", verdict.why)


def _unread(session: HostedSession, facts: Facts) -> Stop | None:
    """The owner and the next hop read their messages. Then a repeated step is answered again, and stops here."""
    peers, limits = session.peers, facts.limits
    if peers.owner.unsent_bytes > limits.unread_bytes_max or (
        peers.next is not None and peers.next.unsent_bytes > limits.next_unread_bytes_max
    ):
        return Declined("busy", "what was sent before is not read", limits.retry_after_s)
    return facts.verdict if isinstance(facts.verdict, Again) else None


def _account(session: HostedSession, facts: Facts) -> Stop | None:
    """The owner may take a step more, its tokens and its bytes in this second."""
    return facts.accounts.charge_step(session.peers.owner.peer, facts.n_tokens, facts.hidden_bytes, facts.now)


def _order(session: HostedSession, facts: Facts) -> Stop | None:
    """The past is whole, the step is the next one, and the session's in-flight window has room for it."""
    if session.receiver.next is not None:
        return Declined("out_of_order", "the past is being rebuilt")
    match facts.verdict:
        case Early(why):
            return Declined("out_of_order", why)
        case Full(why):
            return Declined("bad_request", why)
    return None


def _rows(session: HostedSession, facts: Facts) -> Stop | None:
    """The step has the rows that its gather makes, or those that the session has."""
    step, rows, has = facts.message, facts.given.hidden.shape[0], session.rows
    assert isinstance(step, Step)
    if step.rows is not None:
        if len(step.rows) != rows or max(step.rows, default=0) >= max(has, 1):
            return Declined("bad_request", f"{len(step.rows)} rows gathered from {has}, {rows} sent")
    elif has and step.keep and rows != has:
        return Declined("bad_request", f"{rows} rows, the session has {has}")
    return None


def _positions(session: HostedSession, facts: Facts) -> Stop | None:
    """It takes back no more than was agreed, ends before the session's last position, and wants none but its own."""
    step, tokens, has = facts.message, facts.given.hidden.shape[1], session.length
    assert isinstance(step, Step)
    taken_back = has - step.keep
    too_many = step.keep and taken_back > (session.tenure.rollback_max or has) and session.has_begun
    if taken_back < 0 or too_many:
        return Declined("bad_request", f"keep {step.keep} of {has} positions")
    if (length := step.keep + tokens) > session.positions_max:
        return Declined("bad_request", f"{length} positions, the session was opened for {session.positions_max}")
    if step.want > tokens:
        return Declined("bad_request", f"{step.want} positions wanted of {tokens}")
    return None


# Of pieces of a past


def _twice(session: HostedSession, facts: Facts) -> Stop | None:
    """The piece was not accepted before."""
    assert isinstance(facts.message, Rebuild)
    facts.verdict = session.receiver.offer(facts.message, session.length)
    return facts.verdict if isinstance(facts.verdict, Twice) else None


def _debt(session: HostedSession, facts: Facts) -> Stop | None:
    """The owner's account lends the piece's bytes."""
    return facts.accounts.lend(session.peers.owner.peer, facts.n_tokens, facts.hidden_bytes, facts.now)


def _place(_: HostedSession, facts: Facts) -> Stop | None:
    """The piece is the next one, of a past that fits the session, with its rows."""
    if isinstance(facts.verdict, Refuse):
        return Declined(facts.verdict.code, facts.verdict.why)
    return None


def _window(session: HostedSession, facts: Facts) -> Stop | None:
    """The server has room for the part of this past that may come at once."""
    assert isinstance(facts.verdict, Compute)
    return session.holdings.past(facts.hidden_bytes, facts.verdict.reserve_bytes)


STEP_GATES: tuple[Gate, ...] = (
    Gate("seat", _seat),
    Gate("repeated", _repeated),
    Gate("unread", _unread),
    Gate("time", _time),
    Gate("account", _account),
    Gate("order", _order),
    Gate("tensors", _tensors),
    Gate("rows", _rows),
    Gate("positions", _positions),
    Gate("tokens", _tokens),
    Gate("memory", _memory),
)

REBUILD_GATES: tuple[Gate, ...] = (
    Gate("seat", _seat),
    Gate("twice", _twice),
    Gate("time", _time),
    Gate("debt", _debt),
    Gate("tensors", _tensors),
    Gate("place", _place),
    Gate("window", _window),
    Gate("tokens", _tokens),
    Gate("memory", _memory),
)


@dataclass(frozen=True, slots=True)
class Gates:
    """The lists of one server. void: of steps that are not to be computed, so that nothing behind the order matters."""

    step: tuple[Gate, ...] = STEP_GATES
    rebuild: tuple[Gate, ...] = REBUILD_GATES
    void: tuple[Gate, ...] = STEP_GATES[: 1 + [gate.name for gate in STEP_GATES].index("order")]

    def replaced(self, name: str, check: Check) -> "Gates":
        """Return the lists with another check under this name, in all: how tests change or watch one."""
        step, rebuild, void = (
            tuple(Gate(name, check) if gate.name == name else gate for gate in gates)
            for gates in (self.step, self.rebuild, self.void)
        )
        return Gates(step, rebuild, void)
