"""One attempt to make a session's route stand: find hops, connect, tell them their neighbours, replay the past.

Opening a session is an attempt in which all hops are missing. Each attempt raises the epoch. Hops that stay get a
Reroute with their new neighbours, new ones get an Open. Then the past is replayed: the nearest hop upstream with a
journal of its outputs, or the client with its embeddings, sends it to the hops that lack it. When they have all of it,
the route stands.

    find     splice planned hops into the gaps             -> NoRoute, and nothing has changed
    adopt    the circuit takes the layout, drops the rest
    establish   dial new hops; Open, Reroute; await Opened, Rerouted, Pong
    rebuild  Replay, or pieces from here; await Rebuilt    -> Standing

A fault that arrives meanwhile fails the replies that an attempt awaits, and so ends it.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TypeVar

from swarm.blocks import Blocks
from swarm.client.planning.promise import Crossing, Held, crossings
from swarm.client.planning.route import Hop, classes_of
from swarm.client.session.circuit import Circuit, Rebuilding, Shared
from swarm.client.session.leg import Leg, LegState, Reply
from swarm.client.session.limits import ConnectLimits
from swarm.client.session.plan import Planner, Renewed
from swarm.client.session.standing import Standing
from swarm.errors import ChannelClosed, NetworkError, NoRoute, SessionClosed
from swarm.net.endpoint import Remote
from swarm.protocol import messages as wire
from swarm.protocol.journal import Expansion, Past, past_bytes
from swarm.protocol.replay import PastSender, ReplayWindow, lacking, runs
from swarm.protocol.seat import Terms

Result = TypeVar("Result")


class Finder:
    """Finds the hops of one session: plans what is missing between those that stay."""

    def __init__(self, blocks: Blocks, planner: Planner, renewed: Renewed = lambda hop: hop) -> None:
        """blocks: what the route is to cover. renewed: is asked of hops that stay."""
        self.blocks = blocks
        self.held: Held = ()  # the numeric class of each block, once a route has stood
        self.crossings: tuple[Crossing, ...] = ()  # the repairs that changed them
        self.cuts: tuple[int, ...] = ()  # blocks at which hops are to meet, as far as others can take over there
        self._planner, self._renewed = planner, renewed

    async def splice(self, legs: Sequence[Leg], without: Collection[str]) -> list[Leg]:
        """Return the usable legs with new ones in the gaps; if that is impossible, all new ones. Raises NoRoute.

        All new ones, because a hop that stays may have the missing blocks too, and must then take a larger part. The
        directory is read only if the servers that are known do not suffice either way.
        """
        kept = [leg for leg in legs if leg.is_usable(without)]
        for leg in kept:
            leg.hop = self._renewed(leg.hop)
        every_cuts = (self.cuts, ()) if self.cuts else ((),)
        *attempts, last = product(every_cuts, (False, True), (kept, []) if kept else ([],))
        for cuts, fresh, keeping in attempts:
            with contextlib.suppress(NoRoute):
                return await self._filled(keeping, without, fresh, cuts)
        cuts, fresh, keeping = last
        return await self._filled(keeping, without, fresh, cuts)

    async def _filled(
        self, kept: Sequence[Leg], without: Collection[str], fresh: bool, cuts: tuple[int, ...]
    ) -> list[Leg]:
        """Return these legs with planned ones in the gaps, which are cut there. Raises NoRoute."""
        taken = {leg.hop.peer_id for leg in kept}  # a peer holds one part of a session
        bounds = [self.blocks.start, *(at for leg in kept for at in (leg.hop.blocks.start, leg.hop.blocks.stop))]
        legs: list[Leg] = []
        for start, stop, leg in zip(bounds[::2], [*bounds[1::2], self.blocks.stop], [*kept, None], strict=True):
            places = (start, *(cut for cut in cuts if start < cut < stop), stop)
            for part in (Blocks(a, b) for a, b in pairwise(places) if a < b):
                hops = await self._planner(part, {*without, *taken}, self.held, fresh)
                taken |= {hop.peer_id for hop in hops}
                legs += [Leg(hop) for hop in hops]
            legs += [leg] if leg is not None else []
        return legs

    def stands(self, hops: Sequence[Hop], position: int) -> None:
        """Note the numeric classes of a route that stands. position: the first one that is not computed yet."""
        now = classes_of(hops)
        if position:
            self.crossings += crossings(self.held, now, position)
        self.held = now


@dataclass(frozen=True, slots=True)
class ClientsPast:
    """The client's own past of all that was answered: after `step`. is_cut: hops may have positions behind it.

    They have those where the step was computed by some hops and skipped by others.
    """

    step: int
    pieces: Sequence[Past]
    is_cut: bool = False

    @property
    def stop(self) -> int:
        """The position behind the last one."""
        return self.pieces[-1].stop


class Attempt:
    """One attempt; `run` is called once. spent: seconds by phase, which it adds to."""

    def __init__(
        self,
        circuit: Circuit,
        shared: Shared,
        finder: Finder,
        late: set[str],
        spent: defaultdict[str, float],
        expansion: Expansion | None = None,
    ) -> None:
        """late: processes that did not connect in time, in any attempt of the session's. expansion: the plan's."""
        self._circuit = circuit
        self._shared = shared
        self._finder = finder
        self._late = late
        self._spent = spent
        self._expansion = expansion
        self._limits: ConnectLimits = shared.limits.connect
        self._loop = asyncio.get_running_loop()

    async def run(
        self, without: Collection[str], terms: Terms, past: ClientsPast, *, ask_only: bool
    ) -> Standing | None:
        """Replace the hops of some processes, and bring the new ones to where the session was after `past`.

        ask_only: open the new hops and leave them again; returns None.
        Raises NoRoute if no hop can take over, and then nothing has changed; a fault, or a group of faults, if hops
        give way meanwhile; SessionClosed if the session is closed meanwhile.
        """
        circuit = self._circuit
        with self._spending("planning"):
            legs = await self._finder.splice(circuit.layout.legs, without)
        if circuit.is_closed:
            raise SessionClosed("it was closed")
        circuit.adopt(circuit.layout.next(legs))
        try:
            new = {index for index, leg in enumerate(legs) if not leg.is_open}
            empty = new | {index for index, leg in enumerate(legs) if not leg.is_whole}
            with self._spending("connecting"):
                journals = await self._establish(new, empty - new, terms, past.step, rebuild=bool(past.pieces))
            if ask_only:
                for index in new:
                    legs[index].state = LegState.PLANNED
                return None
            if past.pieces:
                with self._spending("rebuilding"):
                    await self._rebuild(empty, journals, terms, past)
        finally:
            circuit.rebuilding = None
        return self._stand(legs, terms)

    def _stand(self, legs: Sequence[Leg], terms: Terms) -> Standing:
        for leg in legs:
            if not leg.has_failed:
                leg.state = LegState.WHOLE
        self._finder.held = self._finder.held or classes_of(leg.hop for leg in legs)
        if terms.coding is not None:  # which rounds where hops meet: at the same blocks, the numbers stay the same
            self._finder.cuts = self._finder.cuts or tuple(leg.hop.blocks.start for leg in legs[1:])
        held = min(leg.held if leg.asked else 0 for leg in legs)
        return Standing(self._circuit.layout, min(leg.window for leg in legs), held)

    async def _establish(
        self, new: Collection[int], reset: Collection[int], terms: Terms, after_step: int, *, rebuild: bool
    ) -> set[int]:
        """Open the session on the new legs and reroute the others. Returns the legs that have a journal."""
        legs = self._circuit.layout.legs
        await _all_or_errors(self._dial(legs[index]) for index in sorted(new))
        if gone := next((leg for leg in legs if leg.has_failed), None):
            raise gone.broken("it failed before it was asked")  # its reply would be awaited in vain
        edges = range(len(legs) - 1)
        layout = self._circuit.layout
        layout = layout.with_relays(frozenset(i for i in edges if self._shared.avoidance.blocked(layout.edge(i))))
        self._circuit.adopt(layout)
        itinerary = layout.itinerary(self._circuit.session, after_step)
        replies = []
        for index, leg in enumerate(legs):
            leg.relayed, leg.past = 0, ReplayWindow(self._shared.limits.replay)
            replies.append(leg.expect(wire.Opened if index in new else wire.Rerouted))
            if index in new:
                leg.asked = terms.prefix is not None
                leg.send(itinerary.open(index, terms, rebuild=rebuild))
            else:
                leg.send(itinerary.reroute(index, reset=index in reset))
        replies += [legs[index].expect(wire.Pong) for index in sorted(new)]
        is_first = layout.epoch == 1 and terms.prefix is None  # later, a hop may still know the session by an older one
        answers = await self._replies(replies, new, self._circuit.behind_opens if is_first else None)
        for leg, answer in zip(legs, answers, strict=False):
            leg.state = LegState.OPEN if leg.state is LegState.PLANNED else leg.state
            if isinstance(answer, wire.Opened):
                leg.window, leg.held = answer.window, answer.held or 0
        return {i for i, answer in enumerate(answers) if isinstance(answer, wire.Rerouted) and answer.journal}

    async def _replies(
        self, replies: Sequence["asyncio.Future[Reply]"], new: Collection[int], behind: Callable[[], None] | None
    ) -> list[Reply]:
        """Wait for the replies of all legs, and then for the pings of the new ones. Raises HopFailed.

        behind: sends activations, after the pings: those measure the way, and must not wait behind activations.
        """
        legs = self._circuit.layout.legs
        pings = [asyncio.ensure_future(self._ping(legs[index])) for index in new]
        try:
            if behind is not None:
                await asyncio.sleep(0)
                behind()
            asked = [*legs, *(legs[index] for index in sorted(new))]
            return await _answered(replies, asked, self._limits.reply_s, "did not answer")
        finally:
            for ping in pings:
                ping.cancel()

    async def _rebuild(self, empty: set[int], journals: Collection[int], terms: Terms, past: ClientsPast) -> None:
        """Have the past sent to the hops that lack it, and wait until they have all of it."""
        circuit = self._circuit
        needy = lacking(empty, journals)
        for index in needy:
            if circuit.layout.legs[index].is_whole:
                circuit.layout.legs[index].state = LegState.OPEN
        if needy != empty:  # a journal was dropped: hops in between forget their past and get it anew
            circuit.adopt(circuit.layout.next())
            await self._establish(set(), needy, terms, past.step, rebuild=True)
        legs, session, epoch = circuit.layout.legs, circuit.session, circuit.layout.epoch
        groups = runs(needy)
        sender = None
        if groups and groups[0][0] == 0:
            limits = self._shared.limits.replay
            hops, window = groups[0][1], legs[0].past
            sender = PastSender(session, epoch, past.pieces, hops, window, limits, self._expansion, coding=terms.coding)
        circuit.rebuilding = Rebuilding(frozenset(needy), past.stop, sender)
        replies = [legs[index].expect(wire.Rebuilt) for index in sorted(needy)]
        for first, count in groups:
            if first > 0:
                stop = past.stop if past.is_cut else None
                legs[first - 1].send(wire.Replay(session=session, epoch=epoch, step=past.step, hops=count, stop=stop))
            else:
                circuit.send_past()
        windows = 1 + past_bytes(past.pieces, self._expansion) // self._shared.limits.replay.window_bytes
        rebuilt = [legs[index] for index in sorted(needy)]
        await _answered(replies, rebuilt, self._limits.rebuild_s * windows, "did not rebuild the past")

    async def _dial(self, leg: Leg) -> None:
        record, connects = leg.hop.announcement, self._shared.connects
        patient = leg.hop.process in self._late or not record.addresses  # meeting a hidden peer takes several trips
        timeout_s = self._limits.connect_s[2] if patient else connects.wait_s
        began = self._loop.time()
        try:
            remote = Remote(record.peer_id, bytes.fromhex(record.channel_key))
            is_shared = self._shared.dialer.has(remote)
            async with asyncio.timeout(timeout_s):
                leg.channel = await self._shared.dialer.connect(remote, record.ways)
        except TimeoutError:
            self._late.add(leg.hop.process)
            raise leg.broken(f"not connected within {timeout_s:.1f} s") from None
        except NetworkError as error:
            raise leg.broken(str(error)) from None
        if self._circuit.is_closed:
            self._circuit.drop(leg)
            raise leg.broken("the session was closed")
        if not is_shared and leg.channel.carrier.way == "direct":
            connects.observe(self._loop.time() - began)
        self._shared.watch(leg.channel)

    async def _ping(self, leg: Leg) -> None:
        """Measure how far away a hop is."""
        if leg.channel is None:
            return  # it was left out before this began
        try:
            async with asyncio.timeout(self._limits.ping_s):
                leg.hop = replace(leg.hop, latency_ms=1000 * await leg.channel.ping())
            leg.reply(wire.Pong(nonce=0))
        except (TimeoutError, ChannelClosed) as error:
            leg.decline(leg.broken(str(error) or "no answer to a ping"))

    @contextlib.contextmanager
    def _spending(self, phase: str) -> Iterator[None]:
        began = self._loop.time()
        try:
            yield
        finally:
            self._spent[phase] += self._loop.time() - began


async def _answered(
    replies: Sequence["asyncio.Future[Reply]"], legs: Iterable[Leg], timeout_s: float, what: str
) -> list[Reply]:
    """Wait for replies. Raises HopFailed for the first hop that is late."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*replies)
    except TimeoutError:
        late = next((leg for leg, reply in zip(legs, replies, strict=True) if reply.cancelled()), None)
        if late is None:  # the last reply came in the very moment
            return [reply.result() for reply in replies]
        raise late.broken(f"{what} within {timeout_s:.0f} s") from None


async def _all_or_errors(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all at once, to the end. Raises all errors together, so that two hops that are down cost no more than one."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    if failed := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise ExceptionGroup("hops that do not connect", failed)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
