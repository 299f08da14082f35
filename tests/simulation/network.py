"""A virtual network: processes, the links between them, and channels on which messages really travel as bytes.

`VirtualChannel` has the methods of `swarm.net.channel.Channel`, and a `Dialer` dials with `Network.dial`. Sealing
and sockets are left out.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from swarm.activations import Activations
from swarm.errors import ChannelClosed, HandshakeFailed, SwarmError, Unreachable
from swarm.net.address import Address
from swarm.net.channel import OnMessage
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.limits import DialerLimits
from swarm.protocol.base import Message
from swarm.protocol.codec import decode, encode
from swarm.protocol.messages import Ping, Pong

RESET_AFTER_S = 25.0  # a connection whose bytes do not arrive for so long is ended by the sender's kernel


class Trace:
    """Everything that happened, as a digest, and as lines if the caller asks for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lines: list[str] | None = None) -> None:
        self.lines = lines
        self.events = 0
        self._loop = loop
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, what: str, *facts: object, data: bytes = b"") -> None:
        """Note one event. data: bytes that count for the digest and are not shown."""
        line = f"{self._loop.time():.6f} {what} {' '.join(map(str, facts))}"
        self.events += 1
        self._hash.update(line.encode())
        self._hash.update(data)
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """The same for two runs that did the same."""
        return self._hash.hexdigest()


@dataclass(eq=False, slots=True)
class Process:
    """A server's or client's process. Messages that reach it while it is stopped wait until it goes on."""

    name: str
    me: Any
    address: str
    on_message: OnMessage | None = None
    takes: "Takes | None" = None  # is asked before `on_message`
    sends: "Sends | None" = None  # is asked before a message is sent
    state: str = "running"  # or "stopped", "killed", "vanished"
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    channels: dict["VirtualChannel", None] = field(default_factory=dict)
    ends: "type[VirtualChannel] | None" = None  # the kind of the channels that it is dialled by, where that is another

    @property
    def dead(self) -> bool:
        """Whether it will never do anything again."""
        return self.state in {"killed", "vanished"}

    def enter(self, work: Callable[[], None]) -> None:
        """Run something in this process: now, when it goes on, or never."""
        if self.state == "running" and not self.waiting:
            work()
        elif not self.dead:
            self.waiting.append(work)

    def stop(self) -> None:
        """As SIGSTOP."""
        if not self.dead:
            self.state = "stopped"

    def resume(self) -> None:
        """As SIGCONT: everything that came meanwhile is there at once."""
        if self.state == "stopped":
            self.state = "running"
            while self.waiting and self.state == "running":
                self.waiting.popleft()()


Takes = Callable[["VirtualChannel", Any, Activations | None], bool]
"""Let a liar act on a message that arrives. Returns whether that was all: then its handler does not get it."""

Sends = Callable[["VirtualChannel", Any, Activations | None], Iterable[tuple[Message, Activations | None]]]
"""Return a liar's message in the place of a message."""


@dataclass(slots=True)
class Link:
    """One direction between two processes."""

    latency_s: float
    jitter_s: float
    bytes_per_s: float
    disorder: float = 0.0  # the share of messages that come twice or late


class Network:
    """All links, and which processes reach each other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int, trace: Trace) -> None:
        """seed: a link between two processes is the same whenever it is first used."""
        self.loop = loop
        self.trace = trace
        self.disorder = 0.0
        self.slow_links = 0.0  # the share of links that are slow
        self.kernel_buffer_bytes = 1 << 16  # of one connection
        self.processes: dict[str, Process] = {}  # by address
        self._seed = seed
        self._rng = Random(f"network {seed}")
        self._holding: dict[VirtualChannel, None] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._cut: dict[frozenset[str], int] = {}

    # Connectivity

    def cut(self, a: str, b: str) -> None:
        """Let nothing through between two processes any more; "*" stands for all."""
        pair = frozenset((a, b))
        self._cut[pair] = self._cut.get(pair, 0) + 1

    def mend(self, a: str, b: str) -> None:
        """Take back one `cut`."""
        pair = frozenset((a, b))
        self._cut[pair] -= 1
        if not self._cut[pair]:
            del self._cut[pair]
            self._release()

    def is_cut(self, a: str, b: str) -> bool:
        """Whether nothing comes through between two processes."""
        return bool(self._cut) and any(frozenset(pair) in self._cut for pair in ((a, b), (a, "*"), (b, "*")))

    def link(self, a: str, b: str) -> Link:
        """The link from one process to another; drawn when it is first used."""
        link = self._links.get((a, b))
        if link is None:
            rng = Random(f"link {self._seed} {min(a, b)} {max(a, b)}")
            latency_s = rng.uniform(0.005, 0.06)
            bytes_per_s = rng.choice((2e6, 1e7))
            if rng.random() < self.slow_links:
                latency_s, bytes_per_s = rng.uniform(0.1, 0.4), 5_000.0
            link = self._links[a, b] = Link(latency_s, latency_s / 4, bytes_per_s, self.disorder)
        return link

    # Connections

    async def dial(
        self, source: Process, address: Address, remote: Remote, me: Endpoint, on_message: OnMessage
    ) -> "VirtualChannel":
        """Dial as `swarm.net.carriers.tcp.dial` does, in this network. Raises Unreachable or HandshakeFailed."""
        try:
            async with asyncio.timeout(DialerLimits().timeout_s):
                return await self._shake_hands(source, address, remote, me, on_message)
        except TimeoutError:
            raise Unreachable(remote.peer, (str(address),), DialerLimits().timeout_s) from None

    async def _shake_hands(
        self, source: Process, address: Address, remote: Remote, me: Endpoint, on_message: OnMessage
    ) -> "VirtualChannel":
        target = self.processes.get(str(address))
        assert target is not None
        link = self.link(source.name, target.name)
        await asyncio.sleep(2 * link.latency_s)
        while self.is_cut(source.name, target.name):
            await asyncio.sleep(1.0)  # a SYN is sent again
        if target.state == "vanished":
            await self.loop.create_future()
        if target.state == "killed":
            raise Unreachable(remote.peer, (str(address),), 0.0, "connection refused")
        done: asyncio.Future[None] = self.loop.create_future()
        target.enter(lambda: done.done() or done.set_result(None))
        await done
        await asyncio.sleep(2 * link.latency_s)
        if (target.me.identity.peer_id, target.me.key.public) != (remote.peer, remote.channel_key):
            raise HandshakeFailed(remote.peer, "another process answered")
        if target.dead:
            raise HandshakeFailed(remote.peer, "the connection ended")
        assert target.on_message is not None
        kind = target.ends or VirtualChannel
        ours = kind(self, source, target, remote.peer, on_message)
        theirs = kind(self, target, source, me.identity.peer_id, target.on_message)
        ours.other, theirs.other = theirs, ours
        return ours

    # Faults

    def kill(self, process: Process) -> None:
        """It crashes: its kernel ends its connections."""
        process.state = "killed"
        process.waiting.clear()
        for channel in list(process.channels):
            channel.hang_up("reset by the peer")

    def vanish(self, process: Process) -> None:
        """Its machine is gone, and no peer is told."""
        process.state = "vanished"
        process.waiting.clear()

    def transmit(self, channel: "VirtualChannel", data: bytes | None, why: str = "") -> None:
        """Carry a message to the other end, or the end of the connection where data is None."""
        source, target = channel.process, channel.other.process
        link = self.link(source.name, target.name)
        delay_s = link.latency_s + self._rng.random() * link.jitter_s
        if data is not None:
            channel.busy_until = max(channel.busy_until, self.loop.time()) + len(data) / link.bytes_per_s
            delay_s += channel.busy_until - self.loop.time()
        due = max(self.loop.time() + delay_s, channel.last_due + 1e-6)
        if link.disorder and data is not None and self._rng.random() < link.disorder:
            late_s = self._rng.uniform(0.0, 0.5)
            if self._rng.random() < 0.5:
                self.loop.call_at(due + late_s, self._arrive, channel, data, why, False)  # it comes twice
            else:
                self.loop.call_at(due + late_s, self._arrive, channel, data, why, False)  # others overtake it
                return
        channel.last_due = due
        self.loop.call_at(due, self._arrive, channel, data, why, True)

    def _arrive(self, channel: "VirtualChannel", data: bytes | None, why: str, ordered: bool) -> None:
        target = channel.other.process
        if (ordered and channel.held) or self.is_cut(channel.process.name, target.name):
            if not channel.held:
                self._holding[channel] = None
                self.loop.call_later(RESET_AFTER_S, self._give_up, channel, channel.holds)
            channel.held.append((data, why))
            return
        self._hand_over(channel, data, why)

    def _hand_over(self, channel: "VirtualChannel", data: bytes | None, why: str) -> None:
        other = channel.other
        if data is None:
            other.process.enter(partial(other.end, why))
        else:
            other.process.enter(partial(other.receive, data))

    def _give_up(self, channel: "VirtualChannel", holds: int) -> None:
        if channel.held and channel.holds == holds:
            channel.process.enter(channel.cannot_reach)
            channel.held.append((None, "the other side gave up"))

    def _release(self) -> None:
        for channel in list(self._holding):
            if not self.is_cut(channel.process.name, channel.other.process.name):
                del self._holding[channel]
                channel.holds += 1
                while channel.held:
                    self._hand_over(channel, *channel.held.popleft())


class VirtualChannel:
    """One end of a connection."""

    carrier = SimpleNamespace(way="direct", host="")
    noted = True  # with its bytes, in the trace
    ready = SimpleNamespace(result=lambda: SimpleNamespace(skips=True))

    def __init__(self, network: Network, process: Process, remote: Process, peer: str, on_message: OnMessage) -> None:
        self.process = process
        self.peer = peer
        self.ended: asyncio.Future[str] = network.loop.create_future()
        self.heard_at = network.loop.time()
        self.unreachable = False
        self.other: VirtualChannel
        self.last_due = self.busy_until = 0.0
        self.held: deque[tuple[bytes | None, str]] = deque()  # on their way, and waiting for the network
        self.holds = 0
        self._network = network
        self._on_message = on_message
        self._name = f"{process.name}>{remote.name}"
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._nonce = 0
        self._written = 0
        process.channels[self] = None

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self.ended.done()

    def send(self, message: Message, activations: Activations | None = None, *, soon: bool = False) -> None:
        """As `Channel.send`. This network has messages, and no frames that they could share."""
        del soon
        if self.closed:
            raise ChannelClosed(self.peer, self.ended.result())
        if self.process.dead:
            return
        if self.process.sends is None:
            self._send(message, activations)
            return
        for each in self.process.sends(self, message, activations):
            self._send(*each)

    def _send(self, message: Message, activations: Activations | None) -> None:
        data = b"".join(encode(message, activations))
        self._written += len(data)
        self._network.transmit(self, data)

    @property
    def unsent_bytes(self) -> int:
        """As `Channel.unsent_bytes`: bytes for which even the kernel has no room."""
        loop, link = self._network.loop, self._network.link(self.process.name, self.other.process.name)
        queued = max(0.0, self.busy_until - loop.time()) * link.bytes_per_s
        return max(0, int(queued) - self._network.kernel_buffer_bytes)

    @property
    def sent_bytes(self) -> int:
        """As `Channel.sent_bytes`."""
        return self._written - self.unsent_bytes

    async def ping(self) -> float:
        """As `Channel.ping`."""
        self._nonce += 1
        nonce, began = self._nonce, self._network.loop.time()
        answer = self._pings[nonce] = self._network.loop.create_future()
        try:
            self.send(Ping(nonce=nonce))
            await answer
        finally:
            del self._pings[nonce]
        return self._network.loop.time() - began

    def receive(self, data: bytes) -> None:
        """A message has arrived."""
        if self.closed:
            return
        self._network.trace.note("message", self._name, data=data if self.noted else b"")
        self.heard_at = self._network.loop.time()
        try:
            message, activations = decode(memoryview(bytearray(data)))
            if isinstance(message, Ping):
                self.send(Pong(nonce=message.nonce))
            elif isinstance(message, Pong):
                waiting = self._pings.get(message.nonce)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
            elif self.process.takes is None or not self.process.takes(self, message, activations):
                self._on_message(self, message, activations)  # type: ignore[arg-type]
        except SwarmError as error:
            self.hang_up(str(error))

    @property
    def is_paused(self) -> bool:
        """As `Channel.is_paused`."""
        return False

    def close(self) -> None:
        """As `Channel.close`."""
        self.hang_up("closed by this side")

    def hang_up(self, why: str) -> None:
        """End it on this side, and tell the other."""
        if not self.closed:
            self.end(why)
            self._network.transmit(self, None, f"the other side ended it: {why}")

    def cannot_reach(self) -> None:
        """This side's kernel ends it: the network has failed."""
        self.unreachable = not self.closed
        self.end("the network is down")

    def end(self, why: str) -> None:
        """It has ended."""
        if self.closed:
            return
        self._network.trace.note("ended", self._name, why)
        self.process.channels.pop(self, None)
        self.ended.set_result(why)
        for waiting in self._pings.values():
            if not waiting.done():
                waiting.set_exception(ChannelClosed(self.peer, why))
