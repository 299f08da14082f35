"""A live route: the hops of one session with their connections, opened together, repaired when one of them fails.

Opening a route is its first repair: all of it is missing. Every repair raises the epoch. Hops that go on get a Reroute
with their new neighbours; new ones get an Open. Then the past is replayed: the nearest hop upstream that has a journal
of its outputs, or the client with its embeddings, sends it to the hops that lack it, a window at a time. When they all
have all of it, the route is as it was.
"""

import asyncio
import contextlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import TypeVar

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.planning.route import Hop
from swarm.client.session.avoidance import Avoidance, Edge
from swarm.client.session.leg import Leg, Reply
from swarm.client.session.usual import Usual
from swarm.errors import ChannelClosed, HopFailed, NetworkError, NoRoute, SessionClosed
from swarm.net.address import dialable
from swarm.net.channel import Channel
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from swarm.protocol import messages as wire
from swarm.protocol.journal import REPLAY_BYTES_MAX, Journal, Unconfirmed, rebuild_messages

CONNECT_S = (0.5, 1.0, 2.5)  # at first, since somebody else may be quicker; the most for who is asked again
PING_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0  # for what a hop answers at once, its connection to the next hop included
REBUILD_TIMEOUT_S = 120.0  # for each window of the past
REGAINED_MAX = 3  # times, with no answer in between: hops that all fall silent again then are themselves to blame

Result = TypeVar("Result")
Plan = Callable[[Blocks, Collection[str], str | None, bool], Awaitable[tuple[Hop, ...]]]
"""`await plan(blocks, avoid, numeric_class)`: hops for blocks, without these peers or processes. Raises NoRoute."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session is opened for."""

    root: str
    positions_max: int
    rollback_max: int
    step_timeout_s: float
    wait_for_blocks_s: float
    batch: int = 1  # rows, at first
    positions_soon: int = 0  # of each row, which every hop is to have room for


class LiveRoute:
    """Made for one session. Its owner hands it what hops say about the route, and sends steps through `send`."""

    def __init__(
        self,
        session: str,
        plan: SessionPlan,
        blocks: Blocks,
        dialer: Dialer,
        avoidance: Avoidance,
        connects: Usual,
        watch: Callable[[Channel], None],
    ) -> None:
        """blocks: what the route is to cover. connects: how long connecting takes, with CONNECT_S as its bounds.
        watch: told of every channel whose end the session must learn of.

        Nothing is connected before the first `repair`.
        """
        self.epoch = 0
        self.legs: list[Leg] = []
        self.stands = False  # all hops are connected and have the session's past
        self.rebuilding: tuple[frozenset[int], int] | None = None  # hops that lack the past, and its length
        self.batch, self.positions_soon = plan.batch, plan.positions_soon
        self.regained = 0  # how often the client was cut off since anything was answered
        self._plan = plan
        self._blocks = blocks
        self._dialer = dialer
        self._avoidance = avoidance
        self._connects = connects
        self._watch = watch
        self.session = session
        self._numeric_class: str | None = None  # of the whole session, once it stands
        self._relayed: frozenset[int] = frozenset()
        self._past: Iterator[tuple[wire.Rebuild, Activations]] = iter(())  # what is still to be sent to the first hop
        self._late: set[str] = set()  # processes that did not connect in time
        self._closed = False
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds of repairs, by phase

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops, in order."""
        return tuple(leg.hop for leg in self.legs)

    @property
    def prefill_tps(self) -> float | None:
        """How many tokens of a prompt the slowest hop computes in a second, by what they announce; None: none does."""
        rates = [
            hop.announcement.prefill_tps * len(hop.announcement.span) / len(hop.blocks)
            for hop in self.hops
            if hop.announcement.prefill_tps is not None
        ]
        return min(rates, default=None)

    @property
    def window(self) -> int:
        """How many steps may be under way."""
        return min(leg.window for leg in self.legs)

    def leg_of(self, channel: Channel) -> int | None:
        """Return the index of the leg that this channel belongs to."""
        return next((i for i, leg in enumerate(self.legs) if leg.channel is channel), None)

    def give_up(self, peer: str) -> bool:
        """This hop has failed and will be replaced. Returns whether that is news."""
        news = [leg for leg in self.legs if leg.hop.peer_id == peer and not leg.failed]
        for leg in news:
            leg.failed = True
            if leg.channel is not None and leg.channel.unreachable:
                self.lose(leg, asyncio.get_running_loop().time())
        return bool(news)

    def lose(self, leg: Leg, since: float) -> None:
        """This hop has given no sign of life since then, although it was asked."""
        if self.regained < REGAINED_MAX:
            self._avoidance.lost(leg.hop.process, since)

    def let_go(self, leg: Leg) -> None:
        """This hop has ended the session in good order: the next repair opens it anew, perhaps on the same hop."""
        self._drop(leg)
        self.stands = False

    def leave(self) -> None:
        """Give back what the session has on all hops: the next repair opens it anew and has its past computed again."""
        for leg in self.legs:
            self._drop(leg)
        self.legs = []
        self.stands = False

    def has(self, leg: Leg) -> bool:
        """Whether this leg is still a part of the route."""
        return any(leg is ours for ours in self.legs)

    def edge(self, index: int) -> Edge:
        """The connection from this hop to the next."""
        return self.legs[index].hop.process, self.legs[index + 1].hop.process

    def is_relayed(self, index: int) -> bool:
        """Whether this hop's outputs come to the client, to be handed on to the next hop."""
        return index in self._relayed

    async def repair(
        self,
        without: Collection[str],  # processes, as in `Hop.process`: a server that was started again is another one
        plan: Plan,
        journal: Journal,
        after_step: int,
    ) -> None:
        """Replace the legs of some processes and bring the new hops to where the session was after `after_step`.

        Raises NoRoute when nobody can take over, and then nothing has changed; HopFailed, Refused or EdgeDown when
        something else gives way meanwhile; SessionClosed when it is closed meanwhile. Where the client was cut off
        until now, the route does not stand yet: who happens to answer first is hardly the best one for long.
        """
        cut_off = self._avoidance.cut_off
        with self._spending("planning"):
            legs = await self._splice(without, plan)
        if self._closed:
            raise SessionClosed("it was closed")
        self.stands = False
        for leg in self.legs:
            if not any(leg is kept for kept in legs):
                self._drop(leg)
        self.legs = legs
        try:
            self.stands = await self._bring_up(journal, after_step, only_ask=cut_off)
        finally:
            self.rebuilding, self._past = None, iter(())
        if self.stands:
            self._numeric_class = self.legs[0].hop.announcement.numeric_class

    @contextlib.contextmanager
    def _spending(self, phase: str) -> Iterator[None]:
        """Add to `spent` what this takes."""
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.spent[phase] += asyncio.get_running_loop().time() - began

    async def _bring_up(self, journal: Journal, after_step: int, *, only_ask: bool) -> bool:
        """Open new legs and replay the past. only_ask: open them, and leave them again. Returns whether they serve."""
        self.epoch += 1
        new = {index for index, leg in enumerate(self.legs) if not leg.opened}
        partly = {index for index, leg in enumerate(self.legs) if leg.opened and not leg.whole}
        past = journal.past_after(after_step)
        with self._spending("connecting"):
            journals = await self._establish(new, partly, after_step, bool(past))
        if only_ask:
            for index in new:
                self.legs[index].opened = False
            return False
        if past:
            with self._spending("rebuilding"):
                await self._rebuild(new | partly, journals, journal, after_step)
        for leg in self.legs:
            leg.whole = True
        return True

    async def _rebuild(
        self,
        empty: set[int],
        journals: Collection[int],
        journal: Journal,
        after_step: int,
    ) -> None:
        lacking = self._lacking(empty, journals)
        for index in lacking:
            self.legs[index].whole = False
        if lacking != empty:  # a journal was dropped: hops in between forget their past and get it anew
            self.epoch += 1
            await self._establish(set(), lacking, after_step, True)
        past = journal.past_after(after_step)
        self.rebuilding = frozenset(lacking), past[-1].stop
        rebuilt = [self.legs[index].expect(wire.Rebuilt) for index in sorted(lacking)]
        for first, count in runs(lacking):
            if first > 0:
                self.send(first - 1, wire.Replay(session=self.session, epoch=self.epoch, step=after_step, hops=count))
            else:
                self._past = rebuild_messages(self.session, self.epoch, past, count)
                self._send_past()
        windows = 1 + journal.n_bytes // REPLAY_BYTES_MAX
        await self._answered(rebuilt, sorted(lacking), REBUILD_TIMEOUT_S * windows, "did not rebuild the past")

    def process_of(self, peer: str) -> str:
        """Return the process of the hop that this peer is; the peer id where it is none any more."""
        return next((leg.hop.process for leg in self.legs if leg.hop.peer_id == peer), peer)

    def is_whole(self, peer: str) -> bool:
        """Whether this peer has all of the session's past."""
        return any(leg.whole and leg.opened for leg in self.legs if leg.hop.peer_id == peer)

    def late(self) -> HopFailed | NoRoute:
        """Say what opening waits for."""
        if not self.legs:
            return NoRoute(self._plan.root, tuple(self._blocks), "none was found in time")
        return self._front(1).broken("it does not answer in time")

    def awaited(self, step: int) -> tuple[str, str]:
        """Return the peer id and the blocks that this step waits for."""
        if not self.legs:
            return "any server", str(self._blocks)
        front = self._front(step).hop
        return front.peer_id, str(front.blocks)

    def _front(self, step: int) -> Leg:
        """Return the hop that this step waits for, by what the hops have said when they were asked."""
        broken = (leg for leg in self.legs if leg.failed or leg.channel is None or leg.waiting)
        behind = (leg for leg in self.legs if leg.applied < step)
        return next(chain(broken, behind), self.legs[-1])

    def send(self, index: int, message: wire.Message, activations: Activations | None = None) -> None:
        """Send to one hop. Raises HopFailed."""
        leg = self.legs[index]
        try:
            if leg.channel is None:
                raise leg.broken("not connected")
            leg.channel.send(message, activations)
        except ChannelClosed as closed:
            raise leg.broken(closed.why) from None

    def hand_past(self, index: int, piece: wire.Rebuild, activations: Activations) -> None:
        """Send a piece of the past to one hop, or hand it on. Raises HopFailed."""
        self.legs[index].unconfirmed.add(piece)
        self.send(index, piece, activations)

    def hear(self, index: int, reply: Reply) -> None:
        """A hop has said something. Where it has more of the past, whoever sends it may go on. Raises HopFailed."""
        leg = self.legs[index]
        if not isinstance(reply, wire.Rebuilt):
            leg.hear(reply)
            return
        if self.rebuilding is not None and reply.stop >= self.rebuilding[1]:
            leg.hear(reply)
        if leg.unconfirmed.confirm(reply.stop) is None:
            return
        if index == 0:
            self._send_past()
        else:
            self.send(index - 1, reply)  # it comes to the client to be handed on

    def close(self) -> None:
        """End the session on every hop that can still be told."""
        self._closed = True
        for leg in self.legs:
            self._drop(leg)

    # Steps of a repair

    async def _splice(self, without: Collection[str], plan: Plan) -> list[Leg]:
        """Return the legs with new ones in place of those that cannot be used; where that fails, all new ones.

        For perhaps a hop that is kept has the missing blocks too: then it must take a larger part. Only if the servers
        that are known do not suffice either way, the directory is read. Raises NoRoute.
        """
        kept = [leg for leg in self.legs if self._usable(leg, without)]
        *attempts, last = product((False, True), (kept, []) if kept else ([],))
        for fresh, keeping in attempts:
            with contextlib.suppress(NoRoute):
                return await self._filled(keeping, without, plan, fresh)
        fresh, keeping = last
        return await self._filled(keeping, without, plan, fresh)

    async def _filled(self, kept: Sequence[Leg], without: Collection[str], plan: Plan, fresh: bool) -> list[Leg]:
        """Return these legs with planned ones in the gaps. Raises NoRoute."""
        taken = {leg.hop.peer_id for leg in kept}  # a peer holds one part of a session
        bounds = [self._blocks.start, *(at for leg in kept for at in (leg.hop.blocks.start, leg.hop.blocks.stop))]
        legs: list[Leg] = []
        for start, stop, leg in zip(bounds[::2], [*bounds[1::2], self._blocks.stop], [*kept, None], strict=True):
            if start < stop:
                hops = await plan(Blocks(start, stop), {*without, *taken}, self._numeric_class, fresh)
                taken |= {hop.peer_id for hop in hops}
                legs += [Leg(hop) for hop in hops]
            legs += [leg] if leg is not None else []
        return legs

    @staticmethod
    def _usable(leg: Leg, failed: Collection[str]) -> bool:
        connected = leg.opened and leg.channel is not None and not leg.channel.closed
        return connected and not leg.failed and leg.hop.process not in failed

    async def _establish(
        self,
        new: Collection[int],
        reset: Collection[int],
        after_step: int,
        rebuild: bool,
    ) -> set[int]:
        """Open the session on the new legs and reroute the others. Returns the legs that have a journal."""
        await _all_or_errors(self._dial(index) for index in sorted(new))
        if gone := next((leg for leg in self.legs if leg.failed), None):
            raise gone.broken("it failed before it was asked")  # and nobody would tell those who wait for its answer
        edges = range(len(self.legs) - 1)
        self._relayed = frozenset(index for index in edges if self._avoidance.blocked(self.edge(index)))
        replies = []
        for index, leg in enumerate(self.legs):
            leg.carried, leg.unconfirmed = 0, Unconfirmed()
            replies.append(leg.expect(wire.Opened if index in new else wire.Rerouted))
            if index in new:
                self.send(index, self._open_message(index, after_step, rebuild))
            else:
                self.send(index, self._reroute_message(index, after_step, reset=index in reset))
        replies += [self.legs[index].expect(wire.Pong) for index in sorted(new)]
        pings = [asyncio.ensure_future(self._ping(self.legs[index])) for index in new]
        try:
            asked = [*range(len(self.legs)), *sorted(new)]
            answers = await self._answered(replies, asked, REPLY_TIMEOUT_S, "did not answer")
        finally:
            for ping in pings:
                ping.cancel()
        for leg, answer in zip(self.legs, answers, strict=False):
            leg.opened = True
            leg.window = answer.window if isinstance(answer, wire.Opened) else leg.window
        return {i for i, answer in enumerate(answers) if isinstance(answer, wire.Rerouted) and answer.journal}

    async def _dial(self, index: int) -> None:
        leg = self.legs[index]
        record = leg.hop.announcement
        timeout_s = CONNECT_S[2] if leg.hop.process in self._late else self._connects.wait_s
        began = asyncio.get_running_loop().time()
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            shared = self._dialer.has(remote)
            async with asyncio.timeout(timeout_s):
                leg.channel = await self._dialer.connect(remote, dialable(record.addresses))
        except TimeoutError:
            self._late.add(leg.hop.process)
            raise leg.broken(f"not connected within {timeout_s:.1f} s") from None
        except NetworkError as error:
            raise leg.broken(str(error)) from None
        if self._closed:
            self._drop(leg)
            raise leg.broken("the session was closed")
        if not shared:
            self._connects.observe(asyncio.get_running_loop().time() - began)
        self._watch(leg.channel)

    @staticmethod
    async def _ping(leg: Leg) -> None:
        """Measure how far away a hop is."""
        if leg.channel is None:
            return  # it was left out before this began
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                leg.hop = replace(leg.hop, latency_ms=1000 * await leg.channel.ping())
            leg.hear(wire.Pong(nonce=0))
        except (TimeoutError, ChannelClosed) as error:
            leg.fail(leg.broken(str(error) or "no answer to a ping"))

    def _neighbours(self, index: int) -> tuple[str | None, str | None]:
        """Return the previous hop's peer id and the next hop's record, each None where it is the client."""
        from_hop = index > 0 and index - 1 not in self._relayed
        to_hop = index + 1 < len(self.legs) and index not in self._relayed
        return (
            self.legs[index - 1].hop.peer_id if from_hop else None,
            b64encode(self.legs[index + 1].hop.signed.data).decode() if to_hop else None,
        )

    def _open_message(self, index: int, after_step: int, rebuild: bool) -> wire.Open:
        hop = self.legs[index].hop
        previous, next_record = self._neighbours(index)
        return wire.Open(
            session=self.session,
            epoch=self.epoch,
            root=self._plan.root,
            numeric_class=hop.announcement.numeric_class,
            start=hop.blocks.start,
            stop=hop.blocks.stop,
            positions_max=self._plan.positions_max,
            rollback_max=self._plan.rollback_max,
            batch=self.batch,
            positions_soon=self.positions_soon,
            after_step=after_step,
            rebuild=rebuild,
            previous=previous,
            next_record=next_record,
            relay=index in self._relayed,
        )

    def _reroute_message(self, index: int, after_step: int, *, reset: bool) -> wire.Reroute:
        previous, next_record = self._neighbours(index)
        return wire.Reroute(
            session=self.session,
            epoch=self.epoch,
            reset=reset,
            after_step=after_step,
            previous=previous,
            next_record=next_record,
            relay=index in self._relayed,
        )

    def _lacking(self, empty: Collection[int], journals: Collection[int]) -> set[int]:
        """Return the legs that must get the past: those without, and those between them and the next journal up."""
        lacking = set(empty)
        for index in sorted(empty, reverse=True):
            source = index - 1
            while source >= 0 and source not in journals:
                lacking.add(source)
                source -= 1
        return lacking

    def _send_past(self) -> None:
        """Send to the first hop as much of the past as its window has room for. Raises HopFailed."""
        while not self.legs[0].unconfirmed.is_full and (piece := next(self._past, None)) is not None:
            self.hand_past(0, *piece)

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
                leg.channel.send(wire.Close(session=self.session))
            if leg.failed:
                self._dialer.doubt(leg.channel)
            self._dialer.release(leg.channel)
            leg.channel = None


def runs(indices: Collection[int]) -> list[tuple[int, int]]:
    """Group indices into runs of neighbours: {1, 2, 5} -> [(1, 2), (5, 1)] as (first, count)."""
    runs: list[tuple[int, int]] = []
    for index in sorted(indices):
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


async def _all_or_errors(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all at once, to the end. Raises what failed together, so that two that are down cost no more than one."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    if failed := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise ExceptionGroup("hops that are not there", failed)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
