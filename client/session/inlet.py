"""Where a session's messages come in: answers settle steps, replies feed attempts, all else is judged."""

import asyncio
import contextlib
from collections.abc import Callable

from swarm.activations import Activations
from swarm.client.session.circuit import Circuit
from swarm.client.session.leg import Reply
from swarm.client.session.limits import RecoveryLimits
from swarm.client.session.steps import Steps
from swarm.client.session.verdicts import (
    DuePiece,
    Ended,
    Fact,
    LetGo,
    RefuseReplies,
    RefuseStep,
    View,
    before,
    judge,
    wrong_coding,
    wrong_output,
    wrong_piece,
    wrong_relay,
)
from swarm.errors import EdgeDown, HopFailed, Refused
from swarm.net.channel import Channel
from swarm.protocol import messages as wire
from swarm.protocol.attest import Attest, Attested
from swarm.protocol.outbox import Ticket

FromHop = (
    wire.Opened
    | wire.Rerouted
    | wire.Rebuilt
    | wire.Progress
    | wire.Leaving
    | Attested
    | wire.Step
    | wire.Rebuild
    | wire.Output
    | wire.Refused
    | wire.Failed
)
AnyEpoch = wire.Progress | wire.Leaving  # true of the hop, whatever the route


class Inlet:
    """Takes one session's messages. Only the hops of its route are listened to, each for its own part."""

    def __init__(
        self,
        circuit: Circuit,
        steps: Steps,
        on_leaving: Callable[[str], None],
        idle_s: Callable[[], float],
        limits: RecoveryLimits,
    ) -> None:
        """on_leaving: told of a process that is about to leave. idle_s: since the last step; 0 while there is one."""
        self._circuit = circuit
        self._steps = steps
        self._on_leaving = on_leaving
        self._idle_s = idle_s
        self._limits = limits

    def on_message(self, channel: Channel, message: FromHop, activations: Activations | None) -> None:
        """Take one message."""
        layout = self._circuit.layout
        if message.epoch != layout.epoch and not isinstance(message, AnyEpoch):
            return
        index = layout.index_of(channel)
        if index is None:
            return
        match message:
            case wire.Output():
                if layout.is_last(index):
                    self._on_output(index, message, activations)
            case wire.Step() | wire.Rebuild():
                if index in layout.relayed:
                    self._relay(index, message, activations)
            case wire.Progress():
                layout.legs[index].report(message)
            case wire.Leaving():
                self._on_leaving(layout.legs[index].hop.process)
            case wire.Refused() | wire.Failed():
                self._judge(index, message)
            case _:
                self._on_reply(index, message)

    async def receipts(self, within_s: float) -> tuple[Attested | None, ...]:
        """Ask every hop for its receipt. Returns the answers in the order of the hops; None where there is none.

        For the end of a session, when no step is in flight. Nothing of the answers is checked.
        """
        legs, layout = self._circuit.layout.legs, self._circuit.layout
        asked: dict[int, asyncio.Future[Reply]] = {}
        for index, leg in enumerate(legs):
            if leg.signs:
                with contextlib.suppress(HopFailed):
                    leg.send(Attest(session=self._circuit.session, epoch=layout.epoch))
                    asked[index] = leg.expect(Attested)
        if asked:
            await asyncio.wait(asked.values(), timeout=within_s)
        answers = {
            index: reply.result()
            for index, reply in asked.items()
            if reply.done() and not reply.cancelled() and reply.exception() is None
        }
        return tuple(
            answer if isinstance(answer := answers.get(index), Attested) else None for index in range(len(legs))
        )

    def on_ended(self, channel: Channel, why: str) -> None:
        """A channel has ended, perhaps that of one of the hops."""
        index = self._circuit.layout.index_of(channel)
        if index is not None:
            self._judge(index, Ended(why))

    def _on_output(self, index: int, message: wire.Output, activations: Activations | None) -> None:
        ticket = self._steps.awaited(message.step)
        if ticket is None:
            return  # an answer out of order is sent again
        if wrong := wrong_output(ticket, activations, message.hidden):
            self._report_wrong(index, wrong, skipped=activations is None)
            return
        self._circuit.answered()
        self._steps.answer(ticket, activations)

    def _relay(self, index: int, message: wire.Step | wire.Rebuild, activations: Activations | None) -> None:
        """Pass on activations that a hop cannot send to the next one itself."""
        target, ticket = self._circuit.layout.legs[index + 1], None
        if isinstance(message, wire.Step):
            ticket = self._steps.in_flight(message.step)
            if ticket is None:
                return  # it was answered
            wrong = wrong_relay(activations, ticket)
        else:
            due = self._due(index + 1)
            if due is None:
                return
            wrong = wrong_piece(message, activations, due)
        if wrong := wrong_coding(message.hidden, self._steps.coding) or wrong:
            self._report_wrong(index, wrong, skipped=activations is None)
            return
        if isinstance(message, wire.Step) and ticket is not None:
            message, activations = _handed_on(message, activations, ticket)
        try:
            if isinstance(message, wire.Rebuild):
                target.past.add(message)
                target.send(message, activations)
            else:
                target.send(message, activations)
                target.relayed = message.step
        except HopFailed as failed:
            self._circuit.report(failed)

    def _due(self, index: int) -> DuePiece | None:
        """Return the piece of the past that a hop waits for; None if it waits for none."""
        rebuilding, leg = self._circuit.rebuilding, self._circuit.layout.legs[index]
        if rebuilding is None or index not in rebuilding.lacking or leg.is_whole:
            return None
        return DuePiece(leg.past.stop, rebuilding.due, rebuilding.hops_from(index), *self._steps.form)

    def _report_wrong(self, index: int, wrong: str, *, skipped: bool) -> None:
        """A hop has sent wrong activations. skipped: none; so it may be that the hop before has sent it none."""
        layout = self._circuit.layout
        edge = before(layout, index, wrong) if skipped else None
        self._circuit.report(edge or layout.legs[index].broken(wrong))

    def _on_reply(self, index: int, reply: Reply) -> None:
        try:
            if isinstance(reply, wire.Rebuilt):
                self._circuit.confirm_past(index, reply)
            else:
                self._circuit.layout.legs[index].reply(reply)
        except HopFailed as failed:
            self._circuit.report(failed)

    def _judge(self, index: int, fact: Fact) -> None:
        ticket = self._steps.in_flight(fact.step) if isinstance(fact, wire.Refused) and fact.step else None
        view = View(
            self._circuit.layout,
            index,
            stands=self._circuit.is_standing,
            is_idle=self._idle_s() > self._limits.idle_s,
            step_waits=ticket is not None and ticket.outcome is None,
        )
        match judge(fact, view):
            case HopFailed() | EdgeDown() | Refused() as fault:
                self._circuit.report(fault)
            case LetGo():
                self._circuit.let_go(view.leg)
            case RefuseReplies(error):
                view.leg.decline(error)
            case RefuseStep(step, error):
                view.leg.refusals += 1
                self._steps.refuse(step, error)


def _handed_on(
    message: wire.Step, activations: Activations | None, ticket: Ticket
) -> tuple[wire.Step, Activations | None]:
    """Return a step as the next hop gets it: the hidden states are the hop's, and all else is as the client has it."""
    own = ticket.message.model_copy(update={"hidden": message.hidden, "skips": message.skips and ticket.message.skips})
    if activations is None:
        return own.model_copy(update={"positions": None, "mask": None}), None
    return own, Activations(activations.hidden, ticket.activations.positions, ticket.activations.mask)
