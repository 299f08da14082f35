"""A live route: the hops of one session with their connections, opened together, repaired when one of them fails.

Every repair raises the epoch. Hops that go on get a Reroute with their new neighbours; new ones get an Open. Then the
past is replayed: the nearest hop upstream that has a journal of its outputs, or the client with its embeddings, sends
it to the hops that lack it. They compute it and tell nobody; when the last of them has it all, the route is as it was.
"""

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from swarm.blocks import Blocks
from swarm.client.route import Hop
from swarm.errors import ChannelClosed, HopFailed, NetworkError
from swarm.net.channel import Channel, Remote
from swarm.net.dialer import Dialer
from swarm.wire import messages as wire
from swarm.wire.journal import Journal, rebuild_messages

PING_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0  # for what a hop answers at once, its connection to the next hop included
REBUILD_TIMEOUT_S = 120.0

Result = TypeVar("Result")
Reply = wire.Opened | wire.Rerouted | wire.Rebuilt
Plan = Callable[[Blocks, Collection[str]], Awaitable[tuple[Hop, ...]]]
"""`await plan(blocks, avoid)`: hops for some blocks, without these peers or processes. Raises NoRoute."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session is opened for."""

    root: str
    positions_max: int
    rollback_max: int
    step_timeout_s: float
    wait_for_blocks_s: float


@dataclass(slots=True)
class Leg:
    """One hop with its connection, and what it is expected to say."""

    hop: Hop
    channel: Channel | None = None
    opened: bool = False
    window: int = 1
    waiting: dict[type[Reply], "asyncio.Future[Reply]"] = field(default_factory=dict)

    def expect(self, kind: type[Reply]) -> "asyncio.Future[Reply]":
        """Return what will be done when the hop says so."""
        self.waiting[kind] = asyncio.get_running_loop().create_future()
        return self.waiting[kind]

    def hear(self, reply: Reply) -> None:
        """The hop has said something."""
        waiting = self.waiting.pop(type(reply), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail(self, error: Exception) -> None:
        """The hop will say nothing more, or declines."""
        for waiting in self.waiting.values():
            fail(waiting, error)
        self.waiting.clear()

    def broken(self, why: str) -> HopFailed:
        """Name this hop as the one that failed."""
        return HopFailed(self.hop.peer_id, str(self.hop.blocks), why)


class LiveRoute:
    """Made for one session. Its owner hands it what hops say about the route, and sends steps through `first`."""

    def __init__(self, session: str, plan: SessionPlan, hops: Sequence[Hop], dialer: Dialer) -> None:
        self.epoch = 0
        self.legs = [Leg(hop) for hop in hops]
        self._session = session
        self._plan = plan
        self._dialer = dialer

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops, in order."""
        return tuple(leg.hop for leg in self.legs)

    @property
    def window(self) -> int:
        """How many steps may be under way."""
        return min(leg.window for leg in self.legs)

    def leg_of(self, channel: Channel) -> int | None:
        """Return the index of the leg that this channel belongs to."""
        return next((i for i, leg in enumerate(self.legs) if leg.channel is channel), None)

    async def open(self, watch: Callable[[Channel], None]) -> None:
        """Connect to all hops and open the session on each. Raises HopFailed or Refused."""
        await self._establish(set(range(len(self.legs))), (), 0, False, watch)

    async def repair(
        self,
        failed: Collection[str],  # processes, as in `Hop.process`: a server that was started again is another one
        plan: Plan,
        journal: Journal,
        after_step: int,
        watch: Callable[[Channel], None],
    ) -> None:
        """Replace the legs whose processes failed and bring the new hops to where the session was after `after_step`.

        Raises HopFailed or Refused when another hop gives up meanwhile, and NoRoute when nobody can take over.
        """
        self.epoch += 1
        new = await self._splice(failed, plan)
        past = journal.past_after(after_step)
        journals = await self._establish(new, (), after_step, bool(past), watch)
        if not past:
            return
        lacking = self._lacking(new, journals)
        if lacking != new:  # a journal was dropped: hops in between forget their past and get it anew
            self.epoch += 1
            await self._establish(set(), lacking, after_step, True, watch)
        rebuilt = [self.legs[index].expect(wire.Rebuilt) for index in lacking]
        for first, count in _runs(lacking):
            self._replay(first, count, journal, after_step)
        await self._answered(rebuilt, sorted(lacking), REBUILD_TIMEOUT_S, "did not rebuild the past")

    def process_of(self, peer: str) -> str:
        """Return the process of the hop that this peer is; the peer id where it is none any more."""
        return next((leg.hop.process for leg in self.legs if leg.hop.peer_id == peer), peer)

    def late(self) -> HopFailed:
        """Name the hop that opening waits for."""
        leg = next((leg for leg in self.legs if leg.channel is None or leg.waiting), self.legs[0])
        return leg.broken("it does not answer in time")

    def send(self, index: int, message: wire.Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send to one hop. Raises HopFailed."""
        leg = self.legs[index]
        try:
            if leg.channel is None:
                raise leg.broken("not connected")
            leg.channel.send(message, tensors)
        except ChannelClosed as closed:
            raise leg.broken(closed.why) from None

    def close(self) -> None:
        """End the session on every hop that can still be told."""
        for leg in self.legs:
            self._drop(leg)

    # Steps of a repair

    async def _splice(self, failed: Collection[str], plan: Plan) -> set[int]:
        """Put new legs where failed ones are. Returns the indices of all legs that the session is not open on."""
        legs: list[Leg] = []
        index = 0
        while index < len(self.legs):
            if self._usable(self.legs[index], failed):
                legs.append(self.legs[index])
                index += 1
                continue
            first = index
            while index < len(self.legs) and not self._usable(self.legs[index], failed):
                index += 1
            gap = Blocks(self.legs[first].hop.blocks.start, self.legs[index - 1].hop.blocks.stop)
            kept = {leg.hop.peer_id for leg in self.legs if self._usable(leg, failed)}
            chosen = {leg.hop.peer_id for leg in legs}  # a peer holds one part of a session
            legs += [Leg(hop) for hop in await plan(gap, {*failed, *kept, *chosen})]
        for leg in self.legs:
            if not any(leg is kept for kept in legs):
                self._drop(leg)
        self.legs = legs
        return {index for index, leg in enumerate(legs) if not leg.opened}

    @staticmethod
    def _usable(leg: Leg, failed: Collection[str]) -> bool:
        connected = leg.opened and leg.channel is not None and not leg.channel.closed
        return connected and leg.hop.process not in failed

    async def _establish(
        self,
        new: Collection[int],
        reset: Collection[int],
        after_step: int,
        rebuild: bool,
        watch: Callable[[Channel], None],
    ) -> set[int]:
        """Open the session on the new legs and reroute the others. Returns the legs that have a journal."""
        await all_or_first_error(self._dial(index, watch) for index in new)
        replies = []
        for index, leg in enumerate(self.legs):
            replies.append(leg.expect(wire.Opened if index in new else wire.Rerouted))
            if index in new:
                self.send(index, self._open_message(index, after_step, rebuild))
            else:
                self.send(index, self._reroute_message(index, after_step, reset=index in reset))
        pings = asyncio.ensure_future(all_or_first_error(self._ping(index) for index in new))
        try:
            answers = await self._answered(replies, range(len(self.legs)), REPLY_TIMEOUT_S, "did not answer")
            latencies_s = await pings
        finally:
            pings.cancel()
        for index, latency_s in zip(new, latencies_s, strict=True):
            self.legs[index].hop = replace(self.legs[index].hop, latency_ms=1000 * latency_s)
        for leg, answer in zip(self.legs, answers, strict=True):
            leg.opened = True
            leg.window = answer.window if isinstance(answer, wire.Opened) else leg.window
        return {i for i, answer in enumerate(answers) if isinstance(answer, wire.Rerouted) and answer.journal}

    async def _dial(self, index: int, watch: Callable[[Channel], None]) -> None:
        leg = self.legs[index]
        record = leg.hop.announcement
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            leg.channel = await self._dialer.connect(remote, record.addresses)
        except NetworkError as error:
            raise leg.broken(str(error)) from None
        watch(leg.channel)

    async def _ping(self, index: int) -> float:
        leg = self.legs[index]
        assert leg.channel is not None
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                return await leg.channel.ping()
        except (TimeoutError, ChannelClosed) as error:
            raise leg.broken(str(error) or "no answer to a ping") from None

    def _neighbours(self, index: int) -> tuple[str | None, str | None]:
        """Return the previous hop's peer id and the next hop's record, each None where it is the client."""
        previous = self.legs[index - 1].hop.peer_id if index else None
        if index + 1 == len(self.legs):
            return previous, None
        return previous, b64encode(self.legs[index + 1].hop.signed.data).decode()

    def _open_message(self, index: int, after_step: int, rebuild: bool) -> wire.Open:
        hop = self.legs[index].hop
        previous, next_record = self._neighbours(index)
        return wire.Open(
            session=self._session,
            epoch=self.epoch,
            root=self._plan.root,
            numeric_class=hop.announcement.numeric_class,
            start=hop.blocks.start,
            stop=hop.blocks.stop,
            positions_max=self._plan.positions_max,
            rollback_max=self._plan.rollback_max,
            previous=previous,
            next_record=next_record,
            after_step=after_step,
            rebuild=rebuild,
        )

    def _reroute_message(self, index: int, after_step: int, *, reset: bool) -> wire.Reroute:
        previous, next_record = self._neighbours(index)
        return wire.Reroute(
            session=self._session,
            epoch=self.epoch,
            previous=previous,
            next_record=next_record,
            reset=reset,
            after_step=after_step,
        )

    def _lacking(self, new: Collection[int], journals: Collection[int]) -> set[int]:
        """Return the legs that must get the past anew: the new ones, and those between them and the next journal up."""
        lacking = set(new)
        for index in sorted(new, reverse=True):
            source = index - 1
            while source >= 0 and source not in journals:
                lacking.add(source)
                source -= 1
        return lacking

    def _replay(self, first: int, count: int, journal: Journal, after_step: int) -> None:
        """Have the past sent to `count` legs from `first` on, by the hop before them or by the client."""
        if first > 0:
            request = wire.Replay(session=self._session, epoch=self.epoch, step=after_step, hops=count)
            self.send(first - 1, request)
            return
        for message, tensors in rebuild_messages(self._session, self.epoch, journal.past_after(after_step), count):
            self.send(0, message, tensors)

    async def _answered(
        self, replies: Sequence["asyncio.Future[Reply]"], indices: Iterable[int], timeout_s: float, what: str
    ) -> list[Reply]:
        """Wait for replies. Raises HopFailed for the first hop that is late."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.gather(*replies)
        except TimeoutError:
            late = next(index for index, reply in zip(indices, replies, strict=True) if reply.cancelled())
            raise self.legs[late].broken(f"{what} within {timeout_s:.0f} s") from None

    def _drop(self, leg: Leg) -> None:
        leg.fail(leg.broken("it was left out"))
        if leg.channel is not None:
            with contextlib.suppress(ChannelClosed):
                leg.channel.send(wire.Close(session=self._session))
            self._dialer.release(leg.channel)
            leg.channel = None


def _runs(indices: Collection[int]) -> list[tuple[int, int]]:
    """Group indices into runs of neighbours: {1, 2, 5} -> [(1, 2), (5, 1)] as (first, count)."""
    runs: list[tuple[int, int]] = []
    for index in sorted(indices):
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


async def all_or_first_error(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all at once; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def fail(future: "asyncio.Future[Result]", error: Exception) -> None:
    """Fail a future that perhaps nobody waits for."""
    if not future.done():
        future.set_exception(error)
        future.exception()
