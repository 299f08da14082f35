"""Fifty hostile peers in one process, for `hostile.py`, which tells it on stdin when to attack.

A line `SECONDS SESSION` starts an attack; SESSION is an honest client's, which the pushers are after. When it is over,
every connection has ended, and what the attackers did is printed as a line of JSON.

Each attacker has an identity and a source address of its own (127.0.1.x), except for the handshake floods, which come
from addresses all over 127.0.0.0/8.
"""

import asyncio
import contextlib
import itertools
import json
import random
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import uvloop

from swarm.activations import Activations
from swarm.errors import NetworkError
from swarm.identity import Identity
from swarm.net.carriers.tcp import TcpCarrier
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.gate import PROGRESS, Toll
from swarm.net.greeting import PREFACE
from swarm.net.noise import ChannelKey, Handshake, prologue
from swarm.protocol.base import Message
from swarm.protocol.codec import encode
from swarm.protocol.messages import (
    AnyMessage,
    Close,
    Failed,
    Inquiry,
    Open,
    Opened,
    Output,
    Ping,
    Rebuild,
    Refused,
    Reroute,
    Step,
)
from swarm.protocol.tensors import meta_of

PEERS = 50
CHANNELS = 4  # of one peer, where more of them hurt more
BIG_FRAME = 32 << 20
HOARD_TOKENS = 32  # of each session: what is computed to take them is not the attack
UNSENT_MAX = 1 << 16  # in this process


@dataclass(frozen=True, slots=True)
class Target:
    """The server, as its announcement says."""

    host: str
    port: int
    peer: str
    channel_key: str
    network: str
    root: str
    numeric_class: str
    blocks: int
    width: int


@dataclass
class Attacker:
    """One hostile peer."""

    target: Target
    number: int
    victim: str
    did: Counter[str]
    inbox: "asyncio.Queue[AnyMessage]" = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.source = f"127.0.1.{self.number + 1}"
        self.me = Endpoint(Identity.generate(), ChannelKey(), self.target.network)
        self.carriers: dict[Channel, TcpCarrier] = {}

    async def connect(self) -> Channel:
        """A channel whose handshake is over; waits between attempts."""
        remote = Remote(self.target.peer, bytes.fromhex(self.target.channel_key))
        while True:
            carrier = TcpCarrier(lambda carrier: Channel(carrier, self.me, self._heard, remote))
            try:
                async with asyncio.timeout(5):
                    await asyncio.get_running_loop().create_connection(
                        lambda carrier=carrier: carrier,  # type: ignore[misc]
                        self.target.host,
                        self.target.port,
                        local_addr=(self.source, 0),
                    )
                    assert carrier.channel is not None
                    await asyncio.shield(carrier.channel.ready)
            except (OSError, NetworkError, TimeoutError):
                self.did["connections refused"] += 1
                if carrier.channel is not None:
                    carrier.channel.close()
                await asyncio.sleep(0.02)
                continue
            self.did["channels"] += 1
            self.carriers[carrier.channel] = carrier
            return carrier.channel

    def _heard(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        del channel, activations
        self.did["refusals" if isinstance(message, Refused | Failed) else "answers"] += 1
        if isinstance(message, Opened | Output) or self.inbox.qsize() < 100:
            self.inbox.put_nowait(message)
        return PROGRESS

    def open_message(self, **changes: object) -> Open:
        """A request that is in order."""
        request = Open(
            session=secrets.token_hex(16),
            epoch=0,
            root=self.target.root,
            numeric_class=self.target.numeric_class,
            start=0,
            stop=self.target.blocks,
            positions_max=4096,
            rollback_max=0,
        )
        return request.model_copy(update=changes)

    async def opened(self, channel: Channel) -> Open | None:
        """Open a session; None when it is refused."""
        request = self.open_message()
        channel.send(request)
        while True:
            async with asyncio.timeout(5):
                message = await self.inbox.get()
            if getattr(message, "session", None) == request.session:
                return request if isinstance(message, Opened) else None

    def step(self, session: str, number: int, tokens: int, keep: int, want: int) -> tuple[Step, Activations]:
        """A step that is in order."""
        hidden = torch.randn(1, tokens, self.target.width)
        message = Step(
            session=session, epoch=0, step=number, keep=keep, budget_ms=60_000, want=want, hidden=meta_of(hidden)
        )
        return message, Activations(hidden)

    async def push(self, channel: Channel, message: Message, activations: Activations | None = None) -> None:
        """Send as fast as the server takes it."""
        while channel.unsent_bytes > UNSENT_MAX:  # noqa: ASYNC110 - nothing tells when it is less
            await asyncio.sleep(0.002)
        channel.send(message, activations)
        self.did["messages"] += 1
        await asyncio.sleep(0)  # it is the others' turn


def sealed(channel: Channel, plaintext: Sequence[bytes | memoryview]) -> bytes:
    """Seal what a channel itself would never send; so it reaches into it."""
    sealer = channel._greeting.sealer
    assert sealer is not None
    return sealer.seal(plaintext)


async def send_slowly(peer: Attacker) -> None:
    """Begin a large frame, and go on with a byte a second."""

    async def one() -> None:
        while True:
            channel = await peer.connect()
            peer.carriers[channel].write((BIG_FRAME).to_bytes(4, "big") + bytes(BIG_FRAME // 2))
            peer.did["bytes begun"] += BIG_FRAME // 2
            while not channel.closed:
                await asyncio.sleep(1)
                if not channel.closed:
                    peer.carriers[channel].write(b"x")

    await asyncio.gather(*(one() for _ in range(CHANNELS)))


async def hoard(peer: Attacker) -> None:
    """Open all sessions that there are, fill them with positions, ask for more, and let nothing go."""
    while True:
        channel = await peer.connect()
        while not channel.closed:
            request = await peer.opened(channel)
            if request is not None:
                peer.did["sessions"] += 1
                await peer.push(channel, *peer.step(request.session, 1, HOARD_TOKENS, 0, 1))
            await asyncio.sleep(0.02)


async def malform(peer: Attacker) -> None:
    """Send what is no message, one after another, on ever new channels."""
    step, sent = peer.step("ab" * 16, 1, 16, 0, 1)
    header = encode(step, sent)[0]
    nan = torch.full((1, 16, peer.target.width), float("nan"))
    bad: list[Callable[[Channel], list[bytes]]] = [
        lambda _: [secrets.token_bytes(200)],
        lambda _: [(0xFFFFFFFF).to_bytes(4, "big")],
        lambda c: [sealed(c, [b"\xff\xff{}"])],
        lambda c: [sealed(c, [b"\x00\x10" + b"{" * 16])],
        lambda c: [sealed(c, [header, b"too short"])],
        lambda c: [sealed(c, [header.replace(b"float32", b"object8"), bytes(8)])],
        lambda c: [sealed(c, [b"\x7f\xff" + b"[" * 32767])],
        lambda c: [sealed(c, encode(step, Activations(nan))) for _ in range(50)],
    ]
    for make in itertools.cycle(bad):
        channel = await peer.connect()
        for data in make(channel):
            peer.carriers[channel].write(data)
        peer.did["malformed"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.shield(channel.ended)
        channel.close()


async def read_nothing(peer: Attacker) -> None:
    """Ask for long outputs and do not read them."""
    while True:
        channel = await peer.connect()
        request = await peer.opened(channel)
        if request is None:
            channel.close()
            await asyncio.sleep(0.5)
            continue
        peer.carriers[channel].pause_reading()
        for number in itertools.count(1):
            if channel.closed:
                break
            # from the first position again and again, so that the pool does not end it
            await peer.push(channel, *peer.step(request.session, number, 1024, 0, 1024))
            await asyncio.sleep(0.005)


async def replay(peer: Attacker) -> None:
    """Send recorded frames on new channels, and one step of a session's again and again."""
    recorded: list[bytes] = []
    while True:
        channel = await peer.connect()
        for frame in recorded:
            peer.carriers[channel].write(frame)
        if recorded:
            peer.did["frames replayed"] += len(recorded)
            await asyncio.sleep(0.05)
            channel.close()
            channel = await peer.connect()
        request = await peer.opened(channel)
        if request is None:
            channel.close()
            await asyncio.sleep(0.5)
            continue
        message, sent = peer.step(request.session, 1, 64, 0, 64)
        frame = sealed(channel, encode(message, sent))
        recorded = [frame] * 4
        peer.carriers[channel].write(frame)
        for _ in range(500):
            if channel.closed:
                break
            await peer.push(channel, message, sent)
        channel.close()


async def push_into_others(peer: Attacker) -> None:
    """Send steps, pasts, reroutes and ends for an honest client's session, and ask after it, without a pause."""
    small, big = (peer.step(peer.victim, 1, tokens, 0, 1) for tokens in (1, 1024))
    hidden = torch.randn(1, 8, peer.target.width)
    messages: list[tuple[Message, Activations | None]] = [
        small,
        (Rebuild(session=peer.victim, epoch=0, start=0, total=8, hops=1, hidden=meta_of(hidden)), Activations(hidden)),
        (Reroute(session=peer.victim, epoch=9), None),
        (Inquiry(session=peer.victim, epoch=0), None),
        (Failed(session=peer.victim, epoch=0, step=1, blame="self", why="a lie"), None),
        (Close(session=peer.victim), None),
        (Ping(nonce=1), None),
        (peer.open_message(session=peer.victim), None),
        big,
    ]

    async def one() -> None:
        while True:
            channel = await peer.connect()
            for message, sent in itertools.cycle(messages):
                if channel.closed:
                    break
                await peer.push(channel, message, sent)

    await asyncio.gather(*(one() for _ in range(CHANNELS)))


async def flood(peer: Attacker) -> None:
    """Connect from everywhere, send a first message that costs the server a handshake, or none, and stay or leave."""
    target = peer.target
    opening = Handshake(peer.me.key, prologue(target.network), bytes.fromhex(target.channel_key), psk=None)
    first = PREFACE + opening.write()  # a replayed one costs the server as much as a new one
    loop, held = asyncio.get_running_loop(), list[socket.socket]()
    try:
        while True:
            sock = socket.socket()
            sock.setblocking(False)
            held.append(sock)
            with contextlib.suppress(OSError, TimeoutError):
                sock.bind((f"127.{random.randint(2, 250)}.{random.randint(0, 250)}.{random.randint(1, 250)}", 0))
                async with asyncio.timeout(0.5):
                    await loop.sock_connect(sock, (target.host, target.port))
                    peer.did["floods"] += 1
                    if random.random() < 0.8:
                        await loop.sock_sendall(sock, first)
            if len(held) > 100:
                held.pop(random.randrange(len(held))).close()
    finally:
        for sock in held:
            sock.close()


KINDS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "slow senders": send_slowly,
    "lease hoarders": hoard,
    "malformed frames": malform,
    "readers of nothing": read_nothing,
    "replayers": replay,
    "pushers into others' sessions": push_into_others,
    "handshake floods": flood,
}


async def persist(attack: Callable[[Attacker], Awaitable[None]], peer: Attacker) -> None:
    """Begin again whenever the server ends it."""
    while True:
        try:
            await attack(peer)
        except (NetworkError, TimeoutError, OSError):
            peer.did["begun again"] += 1
            await asyncio.sleep(0.05)


def crew(target: Target, victim: str, kinds: list[str]) -> Iterator[tuple[str, Attacker]]:
    for number in range(PEERS):
        yield kinds[number % len(kinds)], Attacker(target, number, victim, Counter())


async def attack(target: Target, seconds: float, victim: str, kinds: list[str]) -> dict[str, dict[str, int]]:
    """Let all of them loose for a while. Returns what each kind did."""
    peers = list(crew(target, victim, kinds))
    tasks = [asyncio.create_task(persist(KINDS[kind], peer)) for kind, peer in peers]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _, peer in peers:
        for carrier in peer.carriers.values():
            carrier.abort()
    await asyncio.sleep(0.1)
    did: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for kind, peer in peers:
        did[kind].update(peer.did)
    return {kind: dict(counter) for kind, counter in did.items()}


def main() -> None:
    target = Target(**json.loads(sys.argv[1]))
    kinds = sys.argv[2].split(",") if len(sys.argv) > 2 else list(KINDS)
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, victim = line.split()
        print(json.dumps(uvloop.run(attack(target, float(seconds), victim, kinds))), flush=True)


if __name__ == "__main__":
    main()
