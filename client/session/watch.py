"""Asks a session's hops how far they are when a step takes longer than steps did before.

Asking costs next to nothing. A hop that does not answer has failed, however open its connection is; what the answers
of all hops mean is decided in `rounds`.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass

import structlog

from swarm.client.session.circuit import Circuit
from swarm.client.session.leg import Leg
from swarm.client.session.limits import WatchLimits
from swarm.client.session.ring import Ring
from swarm.client.session.rounds import Overdue, Rounds, Stuck, Wedged, rebuilding_front
from swarm.client.session.steps import Steps
from swarm.client.session.timeout import Timeout
from swarm.errors import ChannelClosed, EdgeDown, HopFailed, Refused
from swarm.protocol.messages import Inquiry, Progress

_log = structlog.get_logger("swarm.session")


@dataclass(slots=True)
class Before:
    """The time at which a watch began, and the bytes that each connection had sent by then, or when it was new."""

    began: float
    sent: dict[object, int]

    def behind_s(self, connection: object, sent: int, now: float, limits: WatchLimits) -> float:
        """Return how long the bytes of this watch may yet be in the way of a question that is sent now.

        sent: bytes that the connection has sent until now. They may still be in the buffers of a slow line, although
        the operating system has taken them all.
        """
        carried_s = (sent - self.sent.setdefault(connection, sent)) / limits.line_bytes_s
        return min(limits.line_s_max, max(0.0, carried_s - (now - self.began)))


class Watcher:
    """Asks a session's hops how they are when something takes long.

    with watcher:
        ...  # wait for a step, or for a repair; one thing at a time
    """

    def __init__(self, circuit: Circuit, steps: Steps, limits: WatchLimits) -> None:
        self.patience = Timeout(limits.patience_s)  # of one token: a prefill is long enough to be asked about anyway
        self.ring = Ring()
        self._answers = Timeout(limits.answer_s)
        self._circuit = circuit
        self._steps = steps
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._held_s: defaultdict[str, float] = defaultdict(float)  # by process: for how long others waited for it
        self._before = Before(0.0, {})
        self._timer: asyncio.TimerHandle | None = None  # until patience is lost
        self._asking: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._held_s.clear()
        channels = [leg.channel for leg in self._circuit.layout.legs if leg.channel is not None]
        self._before = Before(self._loop.time(), {channel: channel.sent_bytes for channel in channels})
        self._timer = self._loop.call_later(self.patience.wait_s, self._lose_patience)

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def observe(self, took_s: float) -> None:
        """Learn from a step of one token that travelled alone around a route that stood all the time."""
        self.patience.observe(took_s)
        self.ring.note(self._circuit.layout, took_s)

    def holder(self, at_least_s: float) -> str | None:
        """Return the process that held the step or repair that was watched last for so long.

        All others waited for it, and it had the work: a hop that lacks room or input has none. The time in which a hop
        does not answer does not count.
        """
        held = [process for process, held_s in self._held_s.items() if held_s >= at_least_s]
        return max(held, key=self._held_s.__getitem__, default=None)

    def forget_holders(self) -> None:
        """Count anew which hop holds the work: some of it was finished."""
        self._held_s.clear()

    def _lose_patience(self) -> None:
        self._asking = self._loop.create_task(self._ask_hops())
        self._asking.add_done_callback(_complain)

    async def _ask_hops(self) -> None:
        """Ask every hop again and again; one that does not answer has failed, however open its connection is."""
        rounds, judged_at = Rounds(self._limits), self._loop.time()
        while True:
            epoch = self._circuit.layout.epoch
            answers = await asyncio.gather(*(self._ask(leg) for leg in self._circuit.layout.legs))
            said = [answer for answer in answers if answer is not None]
            before, judged_at = judged_at, self._loop.time()
            if len(said) == len(self._circuit.layout.legs) and epoch == self._circuit.layout.epoch:
                self._judge(rounds, said, judged_at - before)
            await asyncio.sleep(max(self._limits.pause_s, self.patience.wait_s))

    @property
    def answer_s(self) -> float:
        """How long to wait for an answer: one takes less than a step, which passes through every hop."""
        if self._answers.known or not self.patience.known:
            return self._answers.wait_s
        return min(self._answers.wait_s, max(self._limits.answer_s[0], self.patience.wait_s))

    async def _ask(self, leg: Leg) -> Progress | None:
        channel = leg.channel
        if channel is None or leg.has_failed:
            return None
        asked_at, answered = self._loop.time(), self._steps.answered
        unsent, sent = channel.unsent_bytes, channel.sent_bytes
        patience_s = self.answer_s + self._before.behind_s(channel, sent, asked_at, self._limits)
        try:
            async with asyncio.timeout(patience_s):
                if not leg.is_open:
                    await channel.ping()
                    return None
                inquiry = Inquiry(session=self._circuit.session, epoch=self._circuit.layout.epoch)
                progress = await leg.inquire(inquiry)
                self._answers.observe(self._loop.time() - asked_at)
                return progress
        except TimeoutError:
            takes_bytes = unsent > 0 and channel.sent_bytes > sent  # else they are only the question
            moves = self._steps.answered > answered  # all hops work, and activations may be in the question's way
            if channel.heard_at <= asked_at and not (takes_bytes or moves) and self._circuit.layout.has(leg):
                self._circuit.lose(leg, asked_at)
                self._circuit.report(leg.broken(f"no sign of life for {patience_s:.1f} s"))
        except ChannelClosed:
            pass  # the inlet hears of its end
        return None

    def _judge(self, rounds: Rounds, hops: list[Progress], round_s: float) -> None:
        """Find the hop that a step, or the past on its way to new hops, waits for. round_s: since the last round."""
        waiting, rebuilding = self._steps.unanswered, self._circuit.rebuilding
        legs = self._circuit.layout.legs
        if rebuilding is not None:
            due = rebuilding.due
            front = rebuilding_front(hops, rebuilding.lacking, due)
            done = [index != front for index in range(len(hops))]
        elif self._circuit.is_standing and waiting:
            due = min(waiting)
            done = [hop.applied >= due for hop in hops]
        else:
            return
        first = done.index(False) if False in done else None
        if first is not None and hops[first].under_way:
            self._held_s[legs[first].hop.process] += round_s
        match rounds.judge(hops, done, due, self._loop.time(), sum(leg.refusals for leg in legs)):
            case Stuck(_, again=True):
                if rebuilding is None:
                    self._steps.resend()
            case Stuck(front):
                self._circuit.report(self._not_arrived(front, due))
            case Wedged(front):
                why = f"it has computed nothing for {self._limits.wedged_s:.0f} s"
                self._circuit.report(legs[front].broken(why))
            case Overdue(front):
                hop, overdue_s = legs[front].hop, self._limits.overdue_s
                why = f"it has computed nothing of ours for {overdue_s:.0f} s"
                self._circuit.report(Refused(hop.peer_id, str(hop.blocks), "busy", why, overdue_s))

    def _not_arrived(self, front: int, due: int) -> HopFailed | EdgeDown:
        """Return the fault when nothing comes to hop `front`, or to the client. due: the step that it waits for."""
        layout, rebuilding = self._circuit.layout, self._circuit.rebuilding is not None
        legs = layout.legs
        if not 0 < front < len(legs):
            return legs[min(front, len(legs) - 1)].broken("messages to or from it do not arrive")
        if front - 1 not in layout.relayed:
            return EdgeDown(layout.edge(front - 1), "nothing comes through", blocked=True)
        if legs[front].past if rebuilding else legs[front].relayed >= due:
            return legs[front].broken("messages to it do not arrive")
        return legs[front - 1].broken("nothing comes from it")


def _complain(done: asyncio.Task[None]) -> None:
    """Tell of a bug: a watcher only ends when it is cancelled."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("watching has ended", exc_info=error)
