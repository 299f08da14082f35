"""Fifty hostile peers in one process, each on a host of its own, for `nat_hostile.py`: they attack an anchor."""

import asyncio
import itertools
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nat_crowd import connect, socket_on
from nat_peers import Commands, Known, record_of

from swarm.activations import Activations
from swarm.errors import NetworkError
from swarm.identity import Identity
from swarm.net.address import Tcp, parse
from swarm.net.carriers.tcp import dial_on
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint
from swarm.net.gate import PROGRESS, Toll
from swarm.net.halves import WORD
from swarm.net.noise import ChannelKey
from swarm.protocol.base import Message
from swarm.protocol.meeting import Call, Called, Calling, Meet, Moor, Moored, Uncalled
from swarm.protocol.messages import AnyMessage

PEERS = 50
UNSENT_MAX = 1 << 16  # in this process
HALVES_MAX = 16  # of one attacker at one time
HELD_S = 3.0  # a half is kept for so long
CHUNK = bytes(1 << 16)


@dataclass(frozen=True, slots=True)
class Target:
    """An anchor, the honest hidden peer that is moored there, and where a third party listens."""

    anchor: Known
    victim: Known
    trap: str


@dataclass
class Attacker:
    """One hostile peer, with a line to the anchor."""

    path: str
    target: Target
    did: Counter[str]
    line: Channel | None = None
    me: Endpoint | None = None
    halves: set["asyncio.Task[None]"] = field(default_factory=set)
    on_half: "Callable[[Attacker, socket.socket, str], Awaitable[None]] | None" = None
    inner: Tcp = field(default_factory=lambda: Tcp("10.0.0.1", 4000))  # its own address, as it says
    partner: str = ""  # a hostile hidden peer

    async def open(self) -> Channel:
        """Return the line, opening it anew where the anchor has ended it."""
        while self.line is None or self.line.closed:
            try:
                sock, self.me = await connect(self.path, self.target.anchor)
                self.line = await dial_on(sock, "direct", self.target.anchor.remote, self.me, self._heard)
                self.did["lines"] += 1
            except (OSError, NetworkError):
                self.did["lines refused"] += 1
                await asyncio.sleep(0.05)
        return self.line

    async def say(self, message: Message) -> None:
        """Send on the line as soon as a little room is left."""
        line = await self.open()
        while line.unsent_bytes > UNSENT_MAX and not line.closed:  # noqa: ASYNC110 - nothing wakes it
            await asyncio.sleep(0.005)
        with suppress(NetworkError):
            line.send(message)
            self.did[message.kind] += 1

    async def come(self, token: str, role: str) -> None:
        """Open a half, as both sides of a meeting do, and misuse it."""
        sock = socket_on(self.path)
        try:
            async with asyncio.timeout(2 * HELD_S):
                loop, at = asyncio.get_running_loop(), self.target.anchor.via.at
                await loop.sock_connect(sock, (at.host, at.port))
                mapped = b"\0" * 10 + b"\xff\xff" + socket.inet_aton(self.inner.host)
                port = self.inner.port.to_bytes(2, "big")
                await loop.sock_sendall(sock, WORD + bytes.fromhex(token) + mapped + port)
                self.did["halves"] += 1
                if self.on_half is not None:
                    await self.on_half(self, sock, role)
                else:
                    await asyncio.sleep(HELD_S)
        except (OSError, TimeoutError, NetworkError):
            self.did["halves cut off"] += 1
        finally:
            sock.close()

    def _heard(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        del channel, activations
        self.did[f"heard {message.kind}"] += 1
        if isinstance(message, Calling | Called) and len(self.halves) < HALVES_MAX:
            role = "caller" if isinstance(message, Calling) else "callee"
            task = asyncio.create_task(self.come(message.token, role))
            self.halves.add(task)
            task.add_done_callback(self.halves.discard)
        return PROGRESS


def a_call(callee: str, port: int = 0) -> Call:
    """Return a new call."""
    return Call(call=secrets.token_hex(16), callee=callee, port=port, back=secrets.token_hex(32))


# Kinds of attack: each does one thing, again and again


async def meet(me: Attacker, number: int) -> None:
    """Call the honest hidden peer, and peers that are not there."""
    await me.say(a_call(Identity.generate().peer_id if number % 4 == 0 else me.target.victim.peer))


async def flood(me: Attacker, number: int) -> None:
    """Be relayed with a hostile hidden peer, and send bytes both ways; and on the line, larger messages than others."""
    del number
    await me.say(a_call(me.partner))
    await me.say(Uncalled(cause="busy", why="x" * 300, call="0" * 32))


async def read_slowly(me: Attacker, number: int) -> None:
    """The same, where one side does not read; nor does it read the answers of its calls."""
    line = await me.open()
    if number % 64 == 0:
        line.carrier.resume_reading()
        await asyncio.sleep(0.2)
    else:
        line.carrier.pause_reading()
    await me.say(a_call(me.partner))


async def forge(me: Attacker, number: int) -> None:
    """Moor with a record that is not this peer's, or none."""
    await me.open()
    assert me.me is not None
    own, other = record_of(me.me.identity, me.me.key), record_of(Identity.generate(), ChannelKey())
    forged = (other, own[:64] + other[64:], own[:-2] + b" }", other[:64] + own[64:], secrets.token_bytes(2048), b"")
    await me.say(Moor(record=forged[number % len(forged)].hex()))


async def point(me: Attacker, number: int) -> None:
    """Name a third party wherever an address is taken: as the anchor, to the anchor, to the honest hidden peer."""
    trap = parse(me.target.trap)
    me.inner = trap
    call, token = secrets.token_hex(16), secrets.token_hex(32)
    lies = (
        a_call(me.target.victim.peer, trap.port),
        Called(call=call, token=token, caller=me.target.victim.peer, reach=me.target.trap, back=token),
        Meet(token=token, peer=me.target.trap, local=me.target.trap, rtt_ms=1),
        Moored(seen=me.target.trap),
    )
    await me.say(lies[number % len(lies)])


async def send_bytes(me: Attacker, sock: socket.socket, role: str) -> None:
    """Send as fast as they are taken, and read."""
    loop, until = asyncio.get_running_loop(), time.monotonic() + HELD_S
    sink = bytearray(1 << 18)
    reading = asyncio.create_task(_drain(sock, sink)) if role == "caller" or not me.did["slow"] else None
    try:
        while time.monotonic() < until:
            await loop.sock_sendall(sock, CHUNK)
            me.did["KiB"] += 64
    finally:
        if reading is not None:
            reading.cancel()


async def send_and_not_read(me: Attacker, sock: socket.socket, role: str) -> None:
    """Send from one side; the other reads nothing."""
    if role == "callee":
        await asyncio.sleep(HELD_S)
    else:
        await send_bytes(me, sock, role)


async def lie_inside(me: Attacker, sock: socket.socket, role: str) -> None:
    """Prove oneself to the honest peer on the relayed connection, and name the third party there."""
    del role
    assert me.me is not None
    channel = await dial_on(sock.dup(), "relayed", me.target.victim.remote, me.me, lambda *_: PROGRESS)
    me.did["channels to the honest peer"] += 1
    token = secrets.token_hex(32)
    with suppress(NetworkError):
        for _ in range(16):
            caller = me.target.anchor.peer
            channel.send(Called(call=token[:32], token=token, caller=caller, reach=me.target.trap, back=token))
            channel.send(Meet(token=token, peer=me.target.trap, local=me.target.trap, rtt_ms=1))
            await asyncio.sleep(HELD_S / 16)
    channel.close()


async def _drain(sock: socket.socket, sink: bytearray) -> None:
    with suppress(OSError):
        while await asyncio.get_running_loop().sock_recv_into(sock, sink):
            pass


KINDS = {
    "meeting floods": (meet, None),
    "byte floods": (flood, send_bytes),
    "slow readers": (read_slowly, send_and_not_read),
    "forged records": (forge, None),
    "third parties": (point, lie_inside),
}


class Hostile(Commands):
    """All attackers."""

    def __init__(self) -> None:
        self._attackers: dict[str, list[Attacker]] = {}

    async def prepare(self, paths: Sequence[str], anchor: Sequence[str], victim: Sequence[str], trap: str) -> int:
        """Connect them. Of those that are relayed, every second one is moored, and the others call it."""
        target, hosts = Target(Known(*anchor), Known(*victim), trap), itertools.cycle(paths)
        for kind, (_, on_half) in KINDS.items():
            did: Counter[str] = Counter()
            mine = [Attacker(next(hosts), target, did, on_half=on_half) for _ in range(PEERS // len(KINDS))]
            self._attackers[kind] = mine
            for one in mine:
                await one.open()
            if kind in ("byte floods", "slow readers"):
                for hidden, caller in _couples(mine):
                    await self._pair(hidden, caller)
        return PEERS

    async def attack(self, seconds: float) -> dict[str, dict[str, int]]:
        """Attack for so long. Returns what they did."""
        until = time.monotonic() + seconds
        for mine in self._attackers.values():
            mine[0].did.clear()
        works = [
            _again(KINDS[kind][0], one, until)
            for kind, mine in self._attackers.items()
            for one in (mine if kind not in ("byte floods", "slow readers") else [both[1] for both in _couples(mine)])
        ]
        await asyncio.gather(*works)
        for one in itertools.chain(*self._attackers.values()):
            for task in list(one.halves):
                task.cancel()
        return {kind: dict(mine[0].did) for kind, mine in self._attackers.items()}

    async def _pair(self, hidden: Attacker, caller: Attacker) -> None:
        assert hidden.me is not None
        await hidden.say(Moor(record=record_of(hidden.me.identity, hidden.me.key).hex()))
        caller.partner = hidden.me.identity.peer_id


def _couples(attackers: list[Attacker]) -> Iterator[tuple[Attacker, Attacker]]:
    return zip(attackers[::2], attackers[1::2], strict=True)


async def _again(work: Callable[[Attacker, int], Awaitable[None]], one: Attacker, until: float) -> None:
    for number in itertools.count():
        if time.monotonic() > until:
            return
        with suppress(OSError, NetworkError, TimeoutError):
            async with asyncio.timeout(5):
                await work(one, number)
        await asyncio.sleep(0)
