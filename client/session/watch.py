"""Is a hop slow, or stuck, or gone? From what the hops say when a step takes longer than steps usually do.

Hops are asked as soon as a step is late, since asking costs next to nothing. Who does not answer has failed. When all
answer, the *front* is the first hop that is not done: if it computes, it may take its time as long as it computes
anything, but after a minute another hop is asked, if there is one; if it has nothing to compute and no byte comes to
it, what it waits for is lost.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from swarm.client.session.leg import EdgeDown, Leg
from swarm.client.session.live import LiveRoute, runs
from swarm.client.session.usual import Usual
from swarm.errors import ChannelClosed, HopFailed, Refused
from swarm.protocol.messages import Inquiry, Progress

PATIENCE_S = (0.15, 0.5, 1.0)  # least, before anything is known, and most
ANSWER_S = (0.5, 1.0, 2.0)
PAUSE_S = 0.25  # between two rounds of questions, at least: what a network loses it sends again within that
QUIET_S = 0.2  # without a byte: shorter than this, something is on its way
WEDGED_S = 30.0  # a hop that computes but finishes nothing, for anybody
OVERDUE_S = 60.0  # a hop that finishes something now and then, but nothing of this session
RESEND_ROUNDS = 2  # of questions in which nothing moves
GIVE_UP_ROUNDS = 4

_log = structlog.get_logger("swarm.session")


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nothing comes to hop `front`, or to the client where it is the number of hops. again: first send it again."""

    front: int
    again: bool


@dataclass(frozen=True, slots=True)
class Wedged:
    """Hop `front` has something to compute, and does not compute it."""

    front: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Hop `front` has been busy with others for so long that another one may be quicker."""

    front: int


class Watch:
    """The rounds of questions in one step, or one repair."""

    def __init__(self) -> None:
        self._before: object = None
        self._quiet_rounds = 0
        self._moved_at: float | None = None
        self._place: object = None
        self._there_since = 0.0

    def judge(
        self, hops: Sequence[Progress], done: Sequence[bool], due: int, now: float, refusals: int = 0
    ) -> Stuck | Wedged | Overdue | None:
        """Look at one round of answers. done: for each hop, whether it has sent on what is waited for: `due`.

        refusals: how many there have been. Whoever has no room now is asked again: what it refuses has arrived.
        """
        front = next((index for index, is_done in enumerate(done) if not is_done), len(hops))
        computing = front < len(hops) and hops[front].under_way > 0
        place = (front, due, *((hops[front].length, hops[front].under_way) if computing else ()))
        if self._place != place:
            self._place, self._there_since = place, now
        elif computing and now - self._there_since > OVERDUE_S:
            self._there_since = now
            return Overdue(front)
        progress = hops[front].jobs_done if computing else [(hop.applied, hop.length) for hop in hops]
        state = (front, computing, refusals, progress)
        moves = state != self._before
        if not computing and front < len(hops):
            moves = moves or hops[front].quiet_ms < 1000 * QUIET_S
        self._before = state
        if moves or self._moved_at is None:
            self._moved_at = now
            self._quiet_rounds = 0
            return None
        if computing:
            return Wedged(front) if now - self._moved_at > WEDGED_S else None
        self._quiet_rounds += 1
        if self._quiet_rounds == RESEND_ROUNDS:
            return Stuck(front, again=True)
        return Stuck(front, again=False) if self._quiet_rounds >= GIVE_UP_ROUNDS else None


class Watcher:
    """Asks a session's hops how they are when something takes long."""

    def __init__(
        self,
        live: LiveRoute,
        unanswered: Callable[[], Sequence[int]],
        report: Callable[[HopFailed | Refused | EdgeDown], None],
        resend: Callable[[], None],
    ) -> None:
        """unanswered: steps under way. report: takes what is at fault. resend: sends the steps again."""
        self.steps = Usual(PATIENCE_S)  # of one token: a prefill is long enough to be asked about anyway
        self._answers = Usual(ANSWER_S)
        self._live = live
        self._unanswered = unanswered
        self._report = report
        self._resend = resend
        self._loop = asyncio.get_running_loop()
        self._held_s: defaultdict[str, float] = defaultdict(float)  # by process: for how long others waited for it

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts too long, ask the hops how they are."""
        watcher: asyncio.Task[None] | None = None
        self._held_s.clear()

        def lose_patience() -> None:
            nonlocal watcher
            watcher = self._loop.create_task(self._ask_hops())
            watcher.add_done_callback(_complain)

        patience = self._loop.call_later(self.steps.wait_s, lose_patience)
        try:
            yield
        finally:
            patience.cancel()
            if watcher is not None:
                watcher.cancel()

    def holder(self, at_least_s: float) -> str | None:
        """Return the process that has held for so long what was watched last: all waited for it, and it had the work.

        Whoever lacks room, or what it is to compute, has none; and nothing counts while a hop does not answer.
        """
        held = [process for process, held_s in self._held_s.items() if held_s >= at_least_s]
        return max(held, key=self._held_s.__getitem__, default=None)

    async def _ask_hops(self) -> None:
        """Ask every hop again and again; one that does not answer has failed, however open its connection is."""
        watch, judged_at = Watch(), self._loop.time()
        while True:
            epoch = self._live.epoch
            answers = await asyncio.gather(*(self._ask(leg) for leg in self._live.legs))
            said = [answer for answer in answers if answer is not None]
            before, judged_at = judged_at, self._loop.time()
            if len(said) == len(self._live.legs) and epoch == self._live.epoch:
                self._judge(watch, said, judged_at - before)
            await asyncio.sleep(max(PAUSE_S, self.steps.wait_s))

    @property
    def answer_s(self) -> float:
        """How long to wait for an answer: one takes less than a step, which passes through every hop."""
        if self._answers.known or not self.steps.known:
            return self._answers.wait_s
        return min(self._answers.wait_s, max(ANSWER_S[0], self.steps.wait_s))

    async def _ask(self, leg: Leg) -> Progress | None:
        channel = leg.channel
        if channel is None or leg.failed:
            return None
        asked_at, patience_s = self._loop.time(), self.answer_s
        unsent, sent = channel.unsent_bytes, channel.sent_bytes
        try:
            async with asyncio.timeout(patience_s):
                if not leg.opened:
                    await channel.ping()
                    return None
                leg.asked = self._loop.create_future()
                channel.send(Inquiry(session=self._live.session, epoch=self._live.epoch))
                progress = await leg.asked
                self._answers.observe(self._loop.time() - asked_at)
                return progress
        except TimeoutError:
            takes_what_we_send = unsent > 0 and channel.sent_bytes > sent  # else that is but the question
            if channel.heard_at <= asked_at and not takes_what_we_send and self._live.has(leg):
                self._live.lose(leg, asked_at)
                self._report(leg.broken(f"no sign of life for {patience_s:.1f} s"))
        except ChannelClosed:
            pass  # its end is told by `on_ended`
        return None

    def _judge(self, watch: Watch, hops: list[Progress], round_s: float) -> None:
        """Find out what a step, or the past on its way to new hops, waits for. round_s: since they were last asked."""
        waiting = self._unanswered()
        if self._live.rebuilding is not None:
            lacking, due = self._live.rebuilding
            front = rebuilding_front(hops, lacking, due)
            done = [index != front for index in range(len(hops))]
        elif self._live.stands and waiting:
            due = min(waiting)
            done = [hop.applied >= due for hop in hops]
        else:
            return
        first = done.index(False) if False in done else None
        if first is not None and hops[first].under_way:
            self._held_s[self._live.legs[first].hop.process] += round_s
        match watch.judge(hops, done, due, self._loop.time(), sum(leg.refusals for leg in self._live.legs)):
            case Stuck(_, again=True):
                if self._live.rebuilding is None:
                    self._resend()
            case Stuck(front):
                self._report(self._not_arrived(front, due))
            case Wedged(front):
                self._report(self._live.legs[front].broken(f"it has computed nothing for {WEDGED_S:.0f} s"))
            case Overdue(front):
                hop, why = self._live.legs[front].hop, f"it has computed nothing of ours for {OVERDUE_S:.0f} s"
                self._report(Refused(hop.peer_id, str(hop.blocks), "busy", why, OVERDUE_S))

    def _not_arrived(self, front: int, due: int) -> HopFailed | EdgeDown:
        """Say what is at fault when nothing comes to hop `front`, or to the client. due: what it waits for."""
        legs = self._live.legs
        if not 0 < front < len(legs):
            return legs[min(front, len(legs) - 1)].broken("what is sent to or from it does not arrive")
        if not self._live.is_relayed(front - 1):
            return EdgeDown(self._live.edge(front - 1), "nothing comes through", blocked=True)
        rebuilding = self._live.rebuilding is not None
        if legs[front].unconfirmed if rebuilding else legs[front].carried >= due:
            return legs[front].broken("what is sent to it does not arrive")
        return legs[front - 1].broken("nothing comes from it")


def rebuilding_front(hops: Sequence[Progress], lacking: Collection[int], due: int) -> int:
    """Return the hop that a past of `due` positions waits for, on its way to some hops; else the number of hops.

    Hops that get it one from the other wait for the last one: no more is sent than that has room for. So it is the last
    one that computes; or else to which something does not come that the one before it has; or else the first one.
    """
    for first, count in runs(lacking):
        run = range(first, first + count)
        if all(hops[index].length >= due and not hops[index].under_way for index in run):
            continue
        computing = [index for index in run if hops[index].under_way]
        behind = [index for index in run[1:] if hops[index].length < hops[index - 1].length]
        return (computing or behind or [first])[-1]
    return len(hops)


def _complain(done: asyncio.Task[None]) -> None:
    """Tell of a bug: a watcher only ends when it is cancelled."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("watching has ended", exc_info=error)
