"""The direct carrier: TCP, by `asyncio.Protocol` (no streams: they cost a tenth of a millisecond a hop)."""

import asyncio
import resource
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_network
from typing import cast

from swarm.activations import Activations
from swarm.errors import AddressInUse, BadConfiguration, Unreachable
from swarm.net.channel import Channel, OnMessage, Remote, Self
from swarm.net.rate import Bucket
from swarm.net.reach import literals, makes_sense
from swarm.protocol.messages import AnyMessage

HANDSHAKE_TIMEOUT_S = 10.0  # for whoever connects
DIAL_TIMEOUT_S = 4.0  # connection and handshake together: some three round trips, and one lost packet
HANDSHAKES_MAX = 256  # connections that have not proven who they are
HANDSHAKES_PER_S, HANDSHAKES_BURST = 4.0, 32.0  # from one source; each takes one to two milliseconds of computing
ALL_HANDSHAKES_PER_S, ALL_HANDSHAKES_BURST = 30.0, 16.0
TURN_WAIT_S = 2.0  # for one's turn to shake hands; whoever would wait longer is turned away
SOURCES_MAX = 4096  # that are remembered
ACCEPTS_PER_S, ACCEPTS_BURST = 75.0, 16.0  # the others wait in the kernel
BACKLOG = 128  # so that a queue of them takes little more than a second
NO_DESCRIPTORS_S = 1.0  # how long to wait when there are none for a connection
CHANNELS_MAX = 4096  # or half of the descriptors that this process may have
CHANNELS_PER_PROCESS_MAX = 4
CHANNELS_PER_PEER_MAX = 64  # who has one identity may run many processes
SILENT_S = 10.0  # a channel that was used since gives way to no other one of its peer
IDLE_S = 120.0  # a channel without a session that says nothing for so long ends
SWEEP_S = 30.0  # a channel whose peer takes nothing of what waits for it, for so long, ends
CLOSE_TIMEOUT_S = 5.0  # for the peer to read what was sent before the end
KERNEL_BYTES = 128 * 1024  # that wait in the kernel to be sent
InUse = Callable[[], Collection[str]]
"""Peers whose channels may be silent for long."""
TCP_NOTSENT_LOWAT = {"linux": 25, "darwin": 0x201}.get(sys.platform)


class _TcpCarrier(asyncio.Protocol):
    """Carries one channel over one connection."""

    def __init__(self, make_channel: "Callable[[_TcpCarrier], Channel]") -> None:
        self._make_channel = make_channel
        self._transport: asyncio.Transport | None = None
        self.channel: Channel | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own are no subclass of it
        _keep_little_in_the_kernel(transport.get_extra_info("socket"))
        self.channel = self._make_channel(self)

    def data_received(self, data: bytes) -> None:
        assert self.channel is not None
        self.channel.receive(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.channel is not None:
            ended_by_peer = exc is None or isinstance(exc, ConnectionResetError | BrokenPipeError)
            self.channel.unreachable = not ended_by_peer
            self.channel.lost(str(exc) if exc is not None else "the other side ended it")

    # Carrier

    def write(self, data: bytes | bytearray) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def unsent_bytes(self) -> int:
        assert self._transport is not None
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def pause_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()


class Listener:
    """Accepts channels on one address.

    Whoever connects has proven nothing yet, so what it may cost is bounded: by how often anybody is let in, by where it
    comes from, and, of those who are too many in the middle of the handshake, the first goes: it had the longest time.
    """

    def __init__(self, me: Self, host: str, port: int) -> None:
        """Take the address, so that nobody else can; port 0 picks one, and `address` says which.

        Raises AddressInUse and BadConfiguration.
        """
        self._me = me
        self._socket = bound(host, port)
        self._listens = False
        self._channels: dict[Channel, str] = {}  # and where each comes from
        self._arriving: set[asyncio.Task[None]] = set()
        self._shaking: dict[Channel, None] = {}  # the oldest first
        self._proven: defaultdict[str, set[Channel]] = defaultdict(set)  # channels of each peer
        self._turns = Turns()
        self._accepts = Bucket(ACCEPTS_PER_S, ACCEPTS_BURST)
        self._channels_max = min(CHANNELS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._sweeper: asyncio.Task[None] | None = None
        self._paused = False
        name = self._socket.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])

    async def start(self, on_message: OnMessage, in_use: InUse | None = None) -> None:
        """Accept from now on, or again after a pause. Raises AddressInUse if somebody took the address just now.

        in_use: without it every channel may be silent for long.
        """
        self._on_message, self._in_use = on_message, in_use
        self._paused = False
        if self._listens:
            return
        try:
            self._socket.listen(BACKLOG)
        except OSError as error:
            raise AddressInUse(f"{self.address[0]}:{self.address[1]}", error.strerror or str(error)) from None
        self._socket.setblocking(False)
        self._sweeper = asyncio.create_task(self._sweep())
        self._listens = True
        self._accept_more()

    def pause(self) -> None:
        """End every accepted channel and keep the address; until the next start, connections are closed at once."""
        self._paused, self._on_message, self._in_use = True, _unheard, None  # who listened before can be forgotten
        for channel in list(self._channels):
            channel.close()

    async def close(self) -> None:
        """Stop listening and end every accepted channel."""
        if self._listens:
            self._listens = False
            asyncio.get_running_loop().remove_reader(self._socket)
        tasks = [*self._arriving, *([self._sweeper] if self._sweeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        for channel in list(self._channels):
            channel.close()

    # Whoever comes

    def _accept_more(self) -> None:
        if self._listens:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Take one connection from the kernel, and then as few as the rate says."""
        loop = asyncio.get_running_loop()
        try:
            sock, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            wait_s = NO_DESCRIPTORS_S
        else:
            wait_s = self._accepts.owe(loop.time())
            self._let_in(sock, address[0])
        if wait_s > 0:
            loop.remove_reader(self._socket)
            loop.call_later(wait_s, self._accept_more)

    def _let_in(self, sock: socket.socket, host: str) -> None:
        turn_s = self._turns.wait_s(host, asyncio.get_running_loop().time())
        busy = len(self._arriving) >= HANDSHAKES_MAX
        if self._paused or busy or turn_s is None or not self._make_room():
            sock.close()
            return
        task = asyncio.create_task(self._receive(sock, _source(host), turn_s))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _make_room(self) -> bool:
        """Whether one more may come. Where there are too many already, one of them ends for it."""
        if len(self._channels) + len(self._arriving) < self._channels_max:
            return True
        channel = gives_way(self._channels, self._in_use() if self._in_use is not None else ())
        if channel is None:
            return False
        self._channels.pop(channel)  # now: whoever comes next must find another one
        channel.cut_off("there are too many channels, and most of them come from where this one does")
        return True

    async def _receive(self, sock: socket.socket, source: str, turn_s: float) -> None:
        """Begin the handshake when it is its turn."""
        try:
            await asyncio.sleep(turn_s)
            sock.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _TcpCarrier(lambda carrier: self._channel(carrier, source)), sock
            )
        except OSError:  # it has gone meanwhile
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    def _channel(self, carrier: _TcpCarrier, source: str) -> Channel:
        channel = Channel(carrier, self._me, self._on_message)
        if len(self._shaking) >= HANDSHAKES_MAX:
            next(iter(self._shaking)).cut_off("too many connections that prove nothing")
        self._shaking[channel] = None
        self._channels[channel] = source
        deadline = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._expire, channel)

        def shaken(_: asyncio.Future[None]) -> None:
            self._shaking.pop(channel, None)
            deadline.cancel()
            if channel.proven:
                self._admit(channel)

        channel.ready.add_done_callback(shaken)
        channel.ended.add_done_callback(lambda _: self._channels.pop(channel, None))
        return channel

    def _admit(self, channel: Channel) -> None:
        """Count a proven peer's channel: of many, a new one ends the one that was silent for longest.

        A peer may have lost the ones before without a word, and minutes can pass before this side finds out. Each
        process makes a channel key at its start, but a peer can make as many as it likes: so both are bounded.
        """
        mine = self._proven[channel.peer]
        crowd = [known for known in mine if known.remote_key == channel.remote_key]
        if len(crowd) < CHANNELS_PER_PROCESS_MAX:
            crowd = list(mine) if len(mine) >= CHANNELS_PER_PEER_MAX else []
        if crowd:
            silent = min(crowd, key=lambda known: known.heard_at)
            if channel.heard_at - silent.heard_at < SILENT_S:
                channel.close()
                return
            mine.discard(silent)
            silent.cut_off("its peer has opened too many others since")
        mine.add(channel)
        channel.ended.add_done_callback(lambda _: self._forget(channel))

    def _forget(self, channel: Channel) -> None:
        mine = self._proven[channel.peer]
        mine.discard(channel)
        if not mine:
            del self._proven[channel.peer]

    async def _sweep(self) -> None:
        """End the channels that nobody reads at the other side, and those that are silent and not in use, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            in_use = self._in_use() if self._in_use is not None else None
            for channel in list(self._channels):
                silent_s = loop.time() - channel.heard_at
                if not channel.reads():
                    channel.cut_off("the peer does not read what it is sent")
                elif silent_s > IDLE_S and in_use is not None and channel.peer not in in_use:
                    channel.close()

    @staticmethod
    def _expire(channel: Channel) -> None:
        if not channel.ready.done():
            channel.close()


def gives_way(channels: Mapping[Channel, str], in_use: Collection[str]) -> Channel | None:
    """Return which one of too many channels ends for a new one; None if all are in use, and no source has so many.

    channels: with the source of each. Identities are free, so who has taken too much is told by where it comes from:
    the source with the most channels that are not in use loses the one that is silent for longest. A source that has
    more than half of all comes first, and loses one even if they are all in use; so does the largest one with more than
    CHANNELS_PER_PEER_MAX where there is nothing else: nobody keeps everybody else out.
    """
    counts = Counter(channels.values())
    crowd = {channel: source for channel, source in channels.items() if counts[source] > len(channels) // 2}
    large = {channel: source for channel, source in channels.items() if counts[source] > CHANNELS_PER_PEER_MAX}
    idle = {channel: source for channel, source in (crowd or channels).items() if channel.peer not in in_use}
    idle = idle or crowd or large
    counts = Counter(idle.values())
    most = max(counts.values(), default=0)
    silent = (channel for channel, source in idle.items() if counts[source] == most)
    return min(silent, key=lambda channel: channel.heard_at, default=None)


class Turns:
    """When whoever connects may begin to shake hands: each source in its own time, and all in everybody's."""

    def __init__(self) -> None:
        self._all = Bucket(ALL_HANDSHAKES_PER_S, ALL_HANDSHAKES_BURST)
        self._sources: dict[str, Bucket] = {}

    def wait_s(self, host: str, now: float) -> float | None:
        """Return how long to wait for one's turn; None if that were too long, and then it costs nobody a turn."""
        source = self._of(_source(host), now)
        if source is None or max(source.wait_s(now), self._all.wait_s(now)) > TURN_WAIT_S:
            return None
        return max(source.owe(now), self._all.owe(now))

    def _of(self, source: str, now: float) -> Bucket | None:
        if source not in self._sources:
            if len(self._sources) >= SOURCES_MAX:
                self._sources = {name: rate for name, rate in self._sources.items() if not rate.is_full(now)}
            if len(self._sources) >= SOURCES_MAX:
                return None
            self._sources[source] = Bucket(HANDSHAKES_PER_S, HANDSHAKES_BURST)
        return self._sources[source]


def _source(host: str) -> str:
    """Where a connection comes from: an IPv4 address, or the network of an IPv6 one."""
    return str(ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host


def _unheard(channel: Channel, message: AnyMessage, activations: Activations | None) -> None:
    """Take a message while nobody listens."""
    del message, activations
    channel.close()


async def dial(address: str, remote: Remote, me: Self, on_message: OnMessage) -> Channel:
    """Connect to "host:port" and prove both sides' identities.

    Raises Unreachable, HandshakeFailed or ProtocolMismatch within DIAL_TIMEOUT_S.
    """
    host, _, port = address.rpartition(":")
    carrier = _TcpCarrier(lambda carrier: Channel(carrier, me, on_message, remote))
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            host = await _sensible(host.strip("[]"), int(port), me.public)
            await asyncio.get_running_loop().create_connection(lambda: carrier, host, int(port))
            assert carrier.channel is not None
            await asyncio.shield(carrier.channel.ready)
            return carrier.channel
    except TimeoutError:
        raise Unreachable(remote.peer, (address,), DIAL_TIMEOUT_S) from None
    except (OSError, ValueError) as error:
        raise Unreachable(remote.peer, (address,), 0.0, str(error)) from None
    finally:
        if carrier.channel is not None and not carrier.channel.proven:
            carrier.channel.close()


async def _sensible(host: str, port: int, public: bool) -> str:
    """Return what to dial: for a public swarm the address itself, so that what is checked is dialled."""
    if public:
        host = (await literals(host, port))[0]
    if not makes_sense(host, public):
        raise OSError(f"{host} makes no sense as an address of {'a public' if public else 'any'} swarm")
    return host


def _keep_little_in_the_kernel(sock: socket.socket) -> None:
    """Let the kernel take what it can send soon: `unsent_bytes` tells then whether what we send gets through."""
    if TCP_NOTSENT_LOWAT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, KERNEL_BYTES)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that has the address but does not listen yet."""
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except socket.gaierror as error:
        raise BadConfiguration(f"--listen {host}:{port}", error.strerror or str(error)) from None
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise AddressInUse(f"{host}:{port}", getattr(error, "strerror", None) or str(error)) from None
    return sock
