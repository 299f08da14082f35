"""Hidden peers of a virtual network: their moorings, their meetings, and the channels that anchors relay.

Production code moors, calls, bounds, and tells how a peer is reached. The halves of a meeting, the punch and the
relayed bytes are virtual: a relayed channel is two connections of the anchor's process, which forwards between them.
"""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from swarm.errors import ChannelClosed, HandshakeFailed, Unreachable
from swarm.net.address import Address, Tcp, ViaAnchor, parse
from swarm.net.anchor import Anchor, Check
from swarm.net.calling import Caller, _within
from swarm.net.channel import Channel, OnMessage
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.halves import Half, HalfLimits, Halves
from swarm.net.limits import DialerLimits
from swarm.net.lines import Lines
from swarm.net.mooring import Moorings
from swarm.net.relay import Relayed, room_for
from swarm.protocol.meeting import Called, Calling
from tests.simulation.network import Network, Process, VirtualChannel

if TYPE_CHECKING:
    from tests.simulation.harbour import Harbour


class Line(VirtualChannel):
    """One end of a channel to an anchor. Its messages have secrets, which no seed draws: the trace leaves them out."""

    noted = False

    def __init__(self, network: Network, process: Process, remote: Process, peer: str, on_message: Any) -> None:
        super().__init__(network, process, remote, peer, on_message)
        self.carrier = SimpleNamespace(way="direct", host=remote.name)

    async def ping(self) -> float:
        """As `Channel.ping`, without messages: most would be these. A stopped process's timers stand still."""
        if self.process.state == "stopped" and not self.closed:
            return 0.0
        network, other = self._network, self.other.process
        round_s = 2 * network.link(self.process.name, other.name).latency_s
        await asyncio.wait((self.ended,), timeout=round_s)
        if not self.closed and not network.is_cut(self.process.name, other.name):
            answer: asyncio.Future[None] = network.loop.create_future()
            other.enter(lambda: answer.done() or answer.set_result(None))
            await asyncio.wait((self.ended, answer), return_when=asyncio.FIRST_COMPLETED)
        elif not self.closed:
            await asyncio.wait((self.ended,))
        if self.closed:
            raise ChannelClosed(self.peer, self.ended.result())
        return round_s

    def cut_off(self, why: str) -> None:
        """As `Channel.cut_off`."""
        self.process.enter(partial(self.hang_up, why))


class RelayEnd(VirtualChannel):
    """An anchor's end of one half: what comes here goes out at its twin, and they end together."""

    twin: "RelayEnd"

    def receive(self, data: bytes) -> None:
        """Forward a sealed message."""
        if not self.closed:
            self._network.transmit(self.twin, data)

    def end(self, why: str) -> None:
        """It has ended."""
        if not self.closed:
            super().end(why)
            self.twin.hang_up(why)


class VirtualHalf:
    """One side's connection to an anchor, for one meeting; it is its own socket."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.outer = self.inner = Tcp(process.name, 1)
        self.sock = self
        self.joined: asyncio.Future[tuple[Process, bool]] = asyncio.get_running_loop().create_future()

    def getsockopt(self, *_: object) -> bytes:
        """There is no kernel to ask for a round trip."""
        raise OSError

    def close(self) -> None:
        """The anchor ends it."""
        self.joined.cancel()


class VirtualHalves(Halves):
    """Takes halves that come as values."""

    def bring(self, token: bytes, half: Any) -> None:
        """Take one, as `accept` does."""
        take = self._expected.pop(token, None)
        if take is None:
            half.close()
        else:
            take(half)


class VirtualAnchor(Anchor):
    """An anchor whose relay the network plays."""

    def __init__(self, process: Process, check: Check) -> None:
        self.process, self.virtual_halves = process, VirtualHalves()
        super().__init__(self.virtual_halves, check)
        process.on_message = lambda channel, message, _: self.take(channel, message)

    def _join(self, sides: tuple[Channel, Channel], first: Half, second: Half) -> None:
        caller, callee = first.sock, second.sock
        assert isinstance(caller, VirtualHalf)
        assert isinstance(callee, VirtualHalf)
        new = Relayed(sides[0].peer, sides[1].peer, caller.process.name)
        room = room_for(new, self._pairs, self.limits.relay)
        if room.ends is not None:
            room.ends.end("another pair takes its place")
        for half, other in ((caller, callee), (callee, caller)):
            if not half.joined.done():
                half.joined.set_result((other.process, room.is_there))

    def note_pair(self, end: Any, peers: Relayed) -> None:
        """Count a relayed channel for as long as it lives."""
        self._pairs[end] = peers
        end.ended.add_done_callback(lambda _: self._pairs.pop(end))


class VirtualMoorings(Moorings):
    """Moorings whose halves are virtual."""

    def __init__(self, harbour: "Harbour", process: Process, lines: Lines, record: Any) -> None:
        nothing: Any = None
        super().__init__(process.me, lines, nothing, record)
        self._harbour, self._process = harbour, process

    async def _dial_back(self, called: Called) -> bool:
        del called
        return False  # a half, and then the direct way of `Harbour.become`: the same with one more round trip

    async def _meet(self, line: Channel, anchor: ViaAnchor, called: Called) -> None:
        met = self._lines.expect(line, called.token)
        try:
            await self._harbour.open_half(self._process, anchor.at, called.token)
            await asyncio.shield(met)
        finally:
            self._lines.forget(line, called.token)


class VirtualCaller(Caller):
    """A caller whose halves, punches and relayed connections are virtual."""

    def __init__(self, harbour: "Harbour", process: Process, lines: Lines) -> None:
        super().__init__(process.me, lines)
        self._harbour, self._process = harbour, process

    async def _meet(
        self, line: Channel, anchor: ViaAnchor, calling: Calling, remote: Remote, on_message: OnMessage, join: object
    ) -> Channel:
        del join  # nothing moves here
        met, limits = self._lines.expect(line, calling.token), self._limits
        try:
            half = await self._harbour.open_half(self._process, anchor.at, calling.token)
            await _within(met, limits.meet_s, remote.peer, f"it does not come to its anchor {anchor.at}")
            target, relays = await half.joined
        finally:
            self._lines.forget(line, calling.token)
        return await self._harbour.become(self._process, anchor, target, remote, on_message, relays)


class Ways:
    """All ways of one process to others: `Traversal`, without sockets."""

    def __init__(self, harbour: "Harbour", process: Process) -> None:
        self._harbour, self._process = harbour, process
        self.lines = Lines(process.me, self._dial_anchor)
        self.caller = VirtualCaller(harbour, process, self.lines)

    async def dial(self, address: Address, remote: Remote, me: Endpoint, on_message: OnMessage) -> Any:
        """As `Traversal.dial`."""
        if isinstance(address, ViaAnchor):
            return await self.caller.call(address, remote, on_message)
        if self._harbour.hides(str(address)):  # the router lets nothing in
            await asyncio.sleep(DialerLimits().timeout_s)
            raise Unreachable(remote.peer, (str(address),), DialerLimits().timeout_s)
        return await self._harbour.network.dial(self._process, address, remote, me, on_message)

    async def _dial_anchor(self, address: Address, remote: Remote, me: Endpoint, on_message: OnMessage) -> Any:
        await self._harbour.alive(self._process)
        return await self._harbour.network.dial(self._process, address, remote, me, on_message)


async def open_half(network: Network, source: Process, target: Process) -> None:
    """Connect to an anchor, as `swarm.net.halves.open_half` does. The kernel of a stopped process accepts, too."""
    try:
        async with asyncio.timeout(HalfLimits().open_s):
            await asyncio.sleep(2 * network.link(source.name, target.name).latency_s)
            while network.is_cut(source.name, target.name):
                await asyncio.sleep(1.0)  # a SYN is sent again
            if target.state == "vanished":
                await network.loop.create_future()
    except TimeoutError:
        raise OSError(f"{target.name} does not answer") from None
    if target.state == "killed":
        raise OSError("connection refused")


async def punched(network: Network, source: Process, target: Process, remote: Remote, on_message: OnMessage) -> Any:
    """Return the direct channel that a punch or a reverse dial leads to. Raises NetworkError."""
    channel = await network.dial(source, parse(target.address), remote, source.me, on_message)
    channel.carrier = SimpleNamespace(way="punched", host=target.name)
    return channel


async def relayed(
    network: Network, source: Process, anchor: VirtualAnchor, target: Process, remote: Remote, on_message: OnMessage
) -> Any:
    """Return a channel that goes through an anchor, once both ends have shaken hands. Raises NetworkError."""
    try:
        async with asyncio.timeout(DialerLimits().timeout_s):
            return await _shake_hands(network, source, anchor, target, remote, on_message)
    except TimeoutError:
        raise Unreachable(remote.peer, (anchor.process.address,), DialerLimits().timeout_s) from None


async def _shake_hands(
    network: Network, source: Process, anchor: VirtualAnchor, target: Process, remote: Remote, on_message: OnMessage
) -> Any:
    via = anchor.process
    trip_s = network.link(source.name, via.name).latency_s + network.link(via.name, target.name).latency_s
    for process in (via, target):
        while network.is_cut(source.name, via.name) or network.is_cut(via.name, target.name):
            await asyncio.sleep(1.0)
        awake: asyncio.Future[None] = network.loop.create_future()
        process.enter(lambda awake=awake: awake.done() or awake.set_result(None))  # type: ignore[misc]
        await awake
        await asyncio.sleep(2 * trip_s)
    if (target.me.identity.peer_id, target.me.key.public) != (remote.peer, remote.channel_key):
        raise HandshakeFailed(remote.peer, "another process answered")
    if target.dead or via.dead:
        raise HandshakeFailed(remote.peer, "the connection ended")
    assert target.on_message is not None
    ours = VirtualChannel(network, source, target, remote.peer, on_message)
    theirs = VirtualChannel(network, target, source, source.me.identity.peer_id, target.on_message)
    ends = [RelayEnd(network, via, each, "", _nothing) for each in (source, target)]
    for channel, end, twin in ((ours, ends[0], ends[1]), (theirs, ends[1], ends[0])):
        channel.other, end.other, end.twin = end, channel, twin
        channel.carrier = SimpleNamespace(way="relayed", host=via.name)
    anchor.note_pair(ends[0], Relayed(theirs.peer, ours.peer, source.name))
    return ours


def _nothing(*_: object) -> Any:
    raise AssertionError("an anchor reads no relayed message")
