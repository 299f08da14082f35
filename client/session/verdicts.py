"""The conclusions of a session from a message, or from a connection's end. Pure: `judge(fact, view) -> Verdict | None`.

    a hop cannot reach the next one                            -> EdgeDown, the fault of neither; if the client relays
                                                                  that edge, the hop itself has failed
    a hop has ended a session without steps for long           -> LetGo
    a hop has failed, or its connection has ended              -> HopFailed
    a hop calls activations bad that the client has relayed    -> HopFailed: the client has looked at them
    ... that another hop has sent                              -> EdgeDown: one of the two is at fault
    a hop calls a step or a piece of the past malformed        -> the same
    a hop skips a step that is wanted                          -> the same: it may have come so from the one before
    a hop refuses an Open, a Reroute or a Replay               -> RefuseReplies, if the attempt awaits its replies
    a hop refuses the session as a whole while it stands       -> HopFailed: it has lost the session
    ... while an attempt runs                                  -> Refused, that came behind another hop's fault
    a hop refuses a step that is in flight                     -> RefuseStep
    the last hop answers with a wrong shape, coding or number  -> HopFailed
    a hop hands the client wrong activations to relay          -> HopFailed

All other refusals are consequences of earlier events: they are dropped.
"""

from dataclasses import dataclass
from typing import TypeAlias

from swarm.activations import Activations
from swarm.client.session.leg import Leg
from swarm.client.session.recovery import Fault
from swarm.client.session.standing import Layout
from swarm.errors import EdgeDown, Refused
from swarm.protocol import messages as wire
from swarm.protocol.outbox import Ticket
from swarm.protocol.tensors import Coding, TensorMeta


@dataclass(frozen=True, slots=True)
class Ended:
    """A hop's connection has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class View:
    """The knowledge of a session when a fact about hop `index` comes.

    stands: steps can travel. is_idle: it has had no step for long. step_waits: the fact is about a step in flight that
    has no outcome.
    """

    layout: Layout
    index: int
    stands: bool = True
    is_idle: bool = False
    step_waits: bool = False

    @property
    def leg(self) -> Leg:
        """The hop that the fact is about."""
        return self.layout.legs[self.index]


@dataclass(frozen=True, slots=True)
class LetGo:
    """The hop has ended the session in good order."""


@dataclass(frozen=True, slots=True)
class RefuseReplies:
    """The hop declines the request of an attempt."""

    error: Refused


@dataclass(frozen=True, slots=True)
class RefuseStep:
    """The hop declines a step."""

    step: int
    error: Refused


@dataclass(frozen=True, slots=True)
class DuePiece:
    """The piece of the past that is due to be relayed. start: of total positions, at most. hops: that lack them.

    width: the hidden size; 0 before a session's first step.
    """

    start: int
    total: int
    hops: int
    rows: int
    width: int


Fact: TypeAlias = wire.Failed | wire.Refused | Ended
Verdict: TypeAlias = Fault | LetGo | RefuseReplies | RefuseStep


def judge(fact: Fact, view: View) -> Verdict | None:
    """Return the consequence of a fact; None if there is none."""
    leg = view.leg
    match fact:
        case Ended(why):
            return leg.broken(f"the connection ended: {why}")
        case wire.Failed(blame="next") if not view.layout.is_last(view.index) and view.index not in view.layout.relayed:
            why = f"{fact.why} (says {leg.hop.peer_id})"
            return EdgeDown(view.layout.edge(view.index), why, blocked=leg.awaits_reply)
        case wire.Failed():
            return LetGo() if view.is_idle else leg.broken(fact.why)
        case wire.Refused(code="bad_activations") if view.index > 0:
            return before(view.layout, view.index, fact.why) or leg.broken(f"it refuses sound activations: {fact.why}")
        case wire.Refused(code="bad_request") if _is_of_activations(view) and before(view.layout, view.index, ""):
            return before(view.layout, view.index, fact.why)
        case wire.Refused(step=None):
            return _judge_refused_session(fact, view)
        case wire.Refused(step=int() as step) if view.step_waits and fact.code not in {"out_of_order", "not_yours"}:
            return RefuseStep(step, _refusal(fact, leg))
    return None


def _is_of_activations(view: View) -> bool:
    """Whether a malformed message is one that another hop may have sent: the client asks a hop for nothing now."""
    return not view.leg.awaits_reply and (view.stands or view.step_waits)


def _judge_refused_session(fact: wire.Refused, view: View) -> Verdict | None:
    if view.leg.awaits_reply:
        return RefuseReplies(_refusal(fact, view.leg))
    if view.stands or fact.code == "not_yours":
        return view.leg.broken(f"it has lost the session: {fact.why}")
    # `bad_request` follows where a part of the past was refused before.
    return _refusal(fact, view.leg) if fact.code != "bad_request" else None


def before(layout: Layout, index: int, why: str) -> EdgeDown | None:
    """Return the fault of the edge by which a hop gets its activations; None where they come from the client.

    The client relays that edge then, and looks at what comes: so the one of the two that is at fault shows.
    """
    if index == 0 or index - 1 in layout.relayed:
        return None
    return EdgeDown(layout.edge(index - 1), why, blocked=False)


def wrong_coding(hidden: TensorMeta | None, coding: Coding | None) -> str | None:
    """Return the fault of activations that are coded otherwise than the session's are; None if they are not."""
    if hidden is None or hidden.coding == coding:
        return None
    return f"its activations are sent as {hidden.coding}, the session's are {coding}"


def wrong_output(ticket: Ticket, activations: Activations | None, hidden: TensorMeta | None = None) -> str | None:
    """Return the fault of an answer to a step; None if it is sound. hidden: how its activations were sent."""
    sent = ticket.message.hidden
    if hidden is not None and sent is not None and hidden.coding != sent.coding:
        return wrong_coding(hidden, sent.coding)
    due = ticket.answer_shape
    got = None if activations is None else tuple(activations.hidden.shape)
    if got != due:
        if got is None and ticket.may_be_skipped:
            return None
        return f"it answered {got} where {due} is due"
    if activations is not None and not is_sound(activations):
        return "its answer is of the wrong type, infinite or no numbers"
    return None


def wrong_relay(activations: Activations | None, ticket: Ticket) -> str | None:
    """Return the fault of a step that a hop hands to the client to relay; None if it is sound.

    activations: None for a step that it has skipped. ticket: of the step.
    """
    if activations is None:
        return None if not ticket.wanted else "it has skipped a step that nothing takes back"
    return _wrong_form(activations, tuple(ticket.activations.hidden.shape))


def wrong_piece(piece: wire.Rebuild, activations: Activations | None, due: DuePiece) -> str | None:
    """Return the fault of a piece of the past that a hop hands to the client to relay; None if it is sound."""
    if activations is None or activations.hidden.dim() != 3:
        return _wrong_form(activations, ())
    tokens = activations.tokens
    stop = piece.start + tokens
    if piece.start > due.start or stop > due.total or piece.total != due.total or piece.hops != due.hops:
        told = f"{piece.start} to {stop} of {piece.total}, for {piece.hops} hops"
        return f"it has sent positions {told}, where {due.start} of {due.total} are due for {due.hops}"
    return _wrong_form(activations, (due.rows, tokens, due.width or activations.hidden.shape[2]))


def _wrong_form(activations: Activations | None, due: tuple[int, ...]) -> str | None:
    is_formed = activations is not None and tuple(activations.hidden.shape) == due and is_sound(activations)
    return None if is_formed else "its activations are of the wrong shape or type, infinite or no numbers"


def is_sound(activations: Activations) -> bool:
    """Whether activations are numbers to go on with, of any shape."""
    return activations.hidden.dtype.is_floating_point and activations.is_finite()


def _refusal(fact: wire.Refused, leg: Leg) -> Refused:
    retry_after_s = None if fact.retry_after_ms is None else fact.retry_after_ms / 1000
    return Refused(leg.hop.peer_id, str(leg.hop.blocks), fact.code, fact.why, retry_after_s)
