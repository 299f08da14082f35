"""Is a hop slow, or stuck, or gone? From what the hops say when a step takes longer than steps usually do.

Hops are asked as soon as a step is late, since asking costs next to nothing. Who does not answer has failed. When all
answer, the *front* is the first hop that is not done: if it computes, it may take its time as long as it computes
anything; if it has nothing to compute and no byte comes to it, what it waits for is lost.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.client.live import EdgeDown, Leg, LiveRoute
from swarm.errors import ChannelClosed, HopFailed, Refused
from swarm.wire.messages import Inquiry, Progress

PATIENCE_S_MIN = 0.25
PATIENCE_S_MAX = 2.0
ANSWER_S_MIN = 0.5
ANSWER_S_MAX = 3.0
QUIET_S = 0.2  # without a byte: shorter than this, something is on its way
WEDGED_S = 30.0  # a hop that computes but finishes nothing, for anybody
RESEND_ROUNDS = 2  # of questions in which nothing moves
GIVE_UP_ROUNDS = 4


class StepTimes:
    """What a step usually takes: mean and deviation, smoothed as in RFC 6298, section 2."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def observe(self, took_s: float, tokens: int) -> None:
        """Learn from a step of so many tokens in which nothing failed."""
        if tokens > 1:
            return  # a prefill says nothing about decode steps, and is long enough to be asked about anyway
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
            return
        self._deviation_s += (abs(took_s - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (took_s - self._mean_s) / 8

    @property
    def patience_s(self) -> float:
        """How long to wait before asking."""
        if self._mean_s is None:
            return PATIENCE_S_MAX / 2
        return min(PATIENCE_S_MAX, max(PATIENCE_S_MIN, self._mean_s + 4 * self._deviation_s))

    @property
    def answer_s(self) -> float:
        """How long a hop may take to answer a question, which its loop does at once."""
        return min(ANSWER_S_MAX, max(ANSWER_S_MIN, 2 * self.patience_s))


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nothing comes to hop `front`, or to the client where it is the number of hops. again: first send it again."""

    front: int
    again: bool


@dataclass(frozen=True, slots=True)
class Wedged:
    """Hop `front` has something to compute, and does not compute it."""

    front: int


class Watch:
    """The rounds of questions in one step, or one repair."""

    def __init__(self) -> None:
        self._before: object = None
        self._quiet_rounds = 0
        self._moved_at: float | None = None

    def judge(self, hops: Sequence[Progress], done: Sequence[bool], now: float) -> Stuck | Wedged | None:
        """Look at one round of answers. done: for each hop, whether it has sent on what is waited for."""
        front = next((index for index, is_done in enumerate(done) if not is_done), len(hops))
        computing = front < len(hops) and hops[front].under_way > 0
        state = (front, computing, hops[front].jobs_done if computing else [(hop.applied, hop.length) for hop in hops])
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
        report: Callable[[HopFailed | EdgeDown], None],
        resend: Callable[[], None],
    ) -> None:
        """unanswered: steps under way. report: takes what is at fault. resend: sends the steps again."""
        self.times = StepTimes()
        self._live = live
        self._unanswered = unanswered
        self._report = report
        self._resend = resend
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts too long, ask the hops how they are."""
        watcher: asyncio.Task[None] | None = None

        def lose_patience() -> None:
            nonlocal watcher
            watcher = self._loop.create_task(self._ask_hops())

        patience = self._loop.call_later(self.times.patience_s, lose_patience)
        try:
            yield
        finally:
            patience.cancel()
            if watcher is not None:
                watcher.cancel()

    async def _ask_hops(self) -> None:
        """Ask every hop again and again; one that does not answer has failed, however open its connection is."""
        watch = Watch()
        while True:
            epoch = self._live.epoch
            answers = await asyncio.gather(*(self._ask(leg) for leg in self._live.legs))
            said = [answer for answer in answers if answer is not None]
            if len(said) == len(self._live.legs) and epoch == self._live.epoch:
                self._judge(watch, said)
            await asyncio.sleep(self.times.patience_s)

    async def _ask(self, leg: Leg) -> Progress | None:
        if leg.channel is None:
            return None
        channel = leg.channel
        asked_at, unsent = self._loop.time(), channel.unsent_bytes
        try:
            async with asyncio.timeout(self.times.answer_s):
                if not leg.opened:
                    await channel.ping()
                    return None
                answer = leg.expect(Progress)
                channel.send(Inquiry(session=self._live.session, epoch=self._live.epoch))
                progress = await answer
                assert isinstance(progress, Progress)
                return progress
        except TimeoutError:
            takes_what_we_send = channel.unsent_bytes < unsent
            if channel.heard_at <= asked_at and not takes_what_we_send and self._live.has(leg):
                self._report(leg.broken(f"no sign of life for {self.times.answer_s:.1f} s"))
        except ChannelClosed:
            pass  # its end is told by `on_ended`
        except Refused as refused:
            self._report(leg.broken(f"it has lost the session: {refused.why}"))
        except (HopFailed, EdgeDown):
            pass  # known, by `_stop_for`
        return None

    def _judge(self, watch: Watch, hops: list[Progress]) -> None:
        """Find out what a step, or the past on its way to new hops, waits for."""
        waiting = self._unanswered()
        if self._live.rebuilding is not None:
            lacking, length = self._live.rebuilding
            done = [i not in lacking or (hop.length >= length and not hop.under_way) for i, hop in enumerate(hops)]
        elif self._live.stands and waiting:
            done = [hop.applied >= min(waiting) for hop in hops]
        else:
            return
        last = len(hops) - 1
        match watch.judge(hops, done, self._loop.time()):
            case Wedged(front):
                self._report(self._live.legs[front].broken(f"it has computed nothing for {WEDGED_S:.0f} s"))
            case Stuck(_, again=True):
                if self._live.rebuilding is None:
                    self._resend()
            case Stuck(front) if 0 < front <= last:
                self._report(EdgeDown(self._live.edge(front - 1), "nothing comes through", blocked=True))
            case Stuck(front):
                self._report(self._live.legs[min(front, last)].broken("what is sent to or from it does not arrive"))
