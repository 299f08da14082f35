"""The hops of one session as they are now: the one place where a fault stops the route, and where legs are dropped.

`layout` is the latest route, whether steps can travel on it or not; `standing` is there while they can. An attempt
adopts a new layout and makes it stand; a fault takes the standing away, and waits in `faults` for the repair.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from swarm.client.session.avoidance import Avoidance
from swarm.client.session.leg import Leg, LegState
from swarm.client.session.limits import SessionLimits
from swarm.client.session.recovery import Fault
from swarm.client.session.standing import Edge, Layout, Standing
from swarm.client.session.timeout import Timeout
from swarm.errors import ChannelClosed, EdgeDown, HopFailed, Refused
from swarm.net.channel import Channel
from swarm.net.dialer import Dialer
from swarm.protocol import messages as wire
from swarm.protocol.replay import PastSender


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sessions of one client share. watch: has the client told of a channel's end.

    others: whether there is more than one session, so that steps may travel together.
    """

    dialer: Dialer
    avoidance: Avoidance
    connects: Timeout
    turns: asyncio.Semaphore
    watch: Callable[[Channel], None]
    others: Callable[[], bool] = lambda: False
    limits: SessionLimits = field(default_factory=SessionLimits)


@dataclass(frozen=True, slots=True)
class Rebuilding:
    """A past on its way. lacking: legs that get it. due: positions that it has. sender: the client's part, if any."""

    lacking: frozenset[int]
    due: int
    sender: PastSender | None

    def hops_from(self, index: int) -> int:
        """Return how many legs in a row, from this one on, get it."""
        return next(n for n in count() if index + n not in self.lacking)


class Circuit:
    """The legs of one session."""

    def __init__(self, session: str, shared: Shared) -> None:
        self.session = session
        self.layout = Layout()
        self.standing: Standing | None = None
        self.rebuilding: Rebuilding | None = None
        self.behind_opens: Callable[[], None] | None = None  # called when the first attempt has sent its Opens
        self.is_closed = False
        self._shared = shared
        self._listener: Callable[[Fault], None] = lambda _: None
        self._faults: list[Fault] = []
        self._reconnected: set[Edge] = set()  # that broke, with no answer since
        self._regained = 0  # how often the client was cut off, with no answer since

    # Faults

    def on_fault(self, listener: Callable[[Fault], None]) -> None:
        """Have each fault that is news told to the session's steps: those in flight will not be answered."""
        self._listener = listener

    def report(self, fault: Fault) -> None:
        """Stop the route: steps in flight, and an attempt that awaits replies, learn of the fault."""
        if isinstance(fault, HopFailed) and not self._fail(fault.peer):
            return  # known
        if any(_same(fault, known) for known in self._faults):
            return  # an idle session looks at none of them, and a hop may go on for ever
        self._faults.append(fault)
        self.standing = None
        for leg in self.layout.legs:
            leg.decline(fault)
        self._listener(fault)

    @property
    def is_standing(self) -> bool:
        """Whether steps can travel."""
        return self.standing is not None

    @property
    def is_broken(self) -> bool:
        """Whether a fault waits to be repaired."""
        return bool(self._faults)

    def knows(self, fault: BaseException) -> bool:
        """Whether this very fault waits to be repaired."""
        return fault in self._faults

    def take_faults(self) -> list[Fault]:
        """Return the faults since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def lose(self, leg: Leg, since: float) -> None:
        """A hop that was asked has given no sign of life since then."""
        if self._regained < self._shared.limits.recovery.regained_max:
            self._shared.avoidance.lost(leg.hop.process, since)

    def reconnects(self, edge: Edge) -> bool:
        """Note that an edge is connected again. Returns whether that was so before, with no answer since."""
        before = edge in self._reconnected
        self._reconnected.add(edge)
        return before

    def regained(self) -> None:
        """The client was cut off, and is not any more: faults since then say nothing about hops."""
        self._faults.clear()
        self._regained += 1

    def answered(self) -> None:
        """A step was answered: the route works."""
        self._reconnected.clear()
        self._regained = 0

    # Layouts

    def adopt(self, layout: Layout) -> None:
        """Take another layout, and drop the legs that are not in it."""
        self.standing = None
        for leg in self.layout.legs:
            if not layout.has(leg):
                self.drop(leg)
        self.layout = layout

    def leave(self) -> None:
        """Give back what the session has on all hops: the next attempt opens it anew, and its past is replayed."""
        self.adopt(Layout(self.layout.epoch))

    def renew(self) -> None:
        """Have the next attempt reroute all hops, though none has failed: that grants anew."""
        self.standing = None

    def let_go(self, leg: Leg) -> None:
        """A hop has ended the session in good order: the next attempt opens it anew, perhaps on the same hop."""
        self.standing = None
        self.drop(leg)

    def close(self) -> None:
        """End the session on every hop that can still be told."""
        self.is_closed = True
        for leg in self.layout.legs:
            self.drop(leg)

    def drop(self, leg: Leg) -> None:
        """End the session on one hop."""
        leg.decline(leg.broken("it was left out"))
        if leg.channel is None:
            return
        with contextlib.suppress(ChannelClosed):
            leg.channel.send(wire.Close(session=self.session))
        if leg.has_failed:
            self._shared.dialer.doubt(leg.channel)
        self._shared.dialer.release(leg.channel)
        leg.channel = None

    # The past on its way to hops that lack it

    def send_past(self) -> None:
        """Send to the first hop as much of the past as its window has room for. Raises HopFailed."""
        sender = self.rebuilding.sender if self.rebuilding is not None else None
        while sender is not None and (piece := sender.take()) is not None:
            self.layout.legs[0].send(*piece)

    def confirm_past(self, index: int, rebuilt: wire.Rebuilt) -> None:
        """A hop has more of the past: the sender may go on. Raises HopFailed."""
        leg = self.layout.legs[index]
        if self.rebuilding is not None and rebuilt.stop >= self.rebuilding.due:
            leg.reply(rebuilt)
        if leg.past.confirmed(rebuilt.stop) is None:
            return
        if index == 0:
            self.send_past()
        else:
            self.layout.legs[index - 1].send(rebuilt)  # the client relays the pieces, and so their confirmations

    def _fail(self, peer: str) -> bool:
        """Mark a hop as failed. Returns whether that is news."""
        news = [leg for leg in self.layout.legs if leg.hop.peer_id == peer and not leg.has_failed]
        for leg in news:
            leg.state = LegState.FAILED
            if leg.channel is not None and leg.channel.unreachable:
                self.lose(leg, asyncio.get_running_loop().time())
        return bool(news)


def _same(fault: Fault, other: Fault) -> bool:
    """Whether two faults say the same of the same hop or edge."""
    match fault, other:
        case EdgeDown(), EdgeDown():
            return fault.edge == other.edge
        case Refused(), Refused():
            return (fault.peer, fault.code) == (other.peer, other.code)
    return False
