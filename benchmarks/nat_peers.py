"""Peers in processes of their own on hosts of the lab, for `nat.py`: anchors, hidden peers and callers.

They are `swarm.net`'s own parts. A process is forked from the benchmark's into its host's network, and takes commands
on a socket, one JSON object a line.
"""

import asyncio
import json
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from common import cpu_ms

from swarm.activations import Activations
from swarm.dht.records import Announcement, Span, sign_announcement
from swarm.dht.validator import RecordGate
from swarm.errors import NetworkError
from swarm.events import configure_events
from swarm.identity import Identity
from swarm.loops import new_event_loop
from swarm.net.address import ViaAnchor, parse
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.gate import PROGRESS, Toll
from swarm.net.launch import bind
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.net.traversal import ListeningTraversal, Traversal
from swarm.protocol.messages import AnyMessage, Output, Step
from swarm.protocol.tensors import meta_of
from tests.support import warm
from tests.support.lab import Host

NETWORK = "lab"
PORT = 31330
FRAME_VALUES = 4096  # a frame of 16 KiB
SESSION = "ab" * 16
MOORED_S = 20.0  # to moor, on a busy machine
DESCRIPTORS = 8192


class Known(NamedTuple):
    """A peer as others know it. at: an anchor's address; "" of a hidden peer."""

    peer: str
    key: str
    at: str = ""

    @property
    def remote(self) -> Remote:
        """As a dialler takes it."""
        return Remote(self.peer, bytes.fromhex(self.key))

    @property
    def via(self) -> ViaAnchor:
        """As an anchor's address."""
        return ViaAnchor(self.peer, bytes.fromhex(self.key), parse(self.at))


class PeerProcess:
    """A process on a host, as the benchmark sees it. A context manager: it ends with the block."""

    def __init__(self, host: Host, make: "Callable[[], Commands] | None" = None) -> None:
        """make: the commands' taker, in the process itself; `Peer` unless given."""
        self.host = host
        self._socket, given = socket.socketpair()
        context = multiprocessing.get_context("fork")
        where = str(host.namespace.path)
        self._process = context.Process(target=_run, args=(given, where, make or Peer), daemon=True)
        self._process.start()
        given.close()
        self._lines = self._socket.makefile("rb")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send(self, do: str, **arguments: object) -> None:
        """Give a command; `answer` waits for its end."""
        self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self) -> Any:  # noqa: ANN401 - of the command's own type
        """Return a command's result."""
        line = self._lines.readline()
        assert line, f"a process of the benchmark ended with {self._process.exitcode}"
        return json.loads(line)

    def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - of the command's own type
        """Give a command and return its result."""
        self.send(do, **arguments)
        return self.answer()

    @property
    def cpu_ms(self) -> float:
        """What it has computed so far."""
        return cpu_ms([self.pid])[0]

    def resident_mib(self, field: str = "VmRSS") -> float:
        """Its memory now; "VmHWM": at most, since `forget_most`."""
        found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024

    def forget_most(self) -> None:
        """Let the most memory so far be what it has now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._lines.close()
        self._socket.close()


class Commands:
    """What takes a process's commands: each is a coroutine method of that name."""


def _run(given: socket.socket, where: str, make: Callable[[], Commands]) -> None:
    warm.enter(where)
    if not bind(os.getppid(), DESCRIPTORS, 1 << 46):
        return
    torch.set_num_threads(1)
    configure_events("warning")
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_obey(given, make))


async def _obey(given: socket.socket, make: Callable[[], Commands]) -> None:
    reader, writer = await asyncio.open_connection(sock=given)
    commands = make()
    while line := await reader.readline():
        command = json.loads(line)
        result = await getattr(commands, command.pop("do"))(**command)
        writer.write(json.dumps(result).encode() + b"\n")


def record_of(identity: Identity, key: ChannelKey) -> bytes:
    """Return a hidden server's signed announcement."""
    now = time.time()
    announcement = Announcement(
        network=NETWORK,
        public_key=identity.public_key.hex(),
        root="ab" * 32,
        model="lab/model",
        n_blocks=12,
        blocks=Span(0, 4),
        sequence=int(now * 1000),
        issued=now,
        expires=now + 60,
        version="0.1.0",
        numeric_class="float32",
        addresses=(),
        channel_key=key.public.hex(),
        state="online",
    )
    return sign_announcement(announcement, identity)


class _Hidden(NamedTuple):
    ways: ListeningTraversal
    running: "asyncio.Task[None]"


class _Caller(NamedTuple):
    me: Endpoint
    ways: Traversal


class Peer(Commands):
    """An anchor, hidden peers or callers: what it is asked to be."""

    def __init__(self) -> None:
        self._gate = RecordGate(NETWORK, time.time)
        self._anchor: ListeningTraversal | None = None
        self._hidden: list[_Hidden] = []
        self._callers: list[_Caller] = []
        self._channel: Channel | None = None  # that was called and kept
        self._answered = asyncio.Event()

    async def anchor(self, host: str) -> Known:
        """Be an anchor at this public address."""
        self._anchor = await self._listening(PORT)
        me, load = self._anchor.me, self._anchor.listener
        return Known(me.identity.peer_id, me.key.public.hex(), f"{host}:{load.address.port}")

    async def load(self) -> dict[str, int]:
        """Return the anchor's work."""
        assert self._anchor is not None
        return asdict(self._anchor.anchor.load)

    async def moor(self, anchors: Sequence[Sequence[str]], count: int = 1) -> list[Known]:
        """Become hidden peers, in the place of those that this process was before."""
        await self._leave()
        changed = asyncio.Event()
        for _ in range(count):
            ways = await self._listening(0)
            ways.moorings.on_change = changed.set
            ways.moorings.offer(Known(*anchor).via for anchor in anchors)
            self._hidden.append(_Hidden(ways, asyncio.create_task(ways.moorings.run())))
        async with asyncio.timeout(MOORED_S):
            while any(len(each.ways.moorings.anchors) < len(anchors) for each in self._hidden):
                await changed.wait()
                changed.clear()
        known = (each.ways.me for each in self._hidden)
        return [Known(me.identity.peer_id, me.key.public.hex()) for me in known]

    async def callers(self, count: int, anchor: Sequence[str] | None = None) -> int:
        """Become callers that have proven nothing to any anchor yet, or with lines to one."""
        for caller in self._callers:
            await caller.ways.close()
        self._callers = []
        for _ in range(count):
            me = _endpoint()
            ways = Traversal(me)
            if anchor is not None:
                ways.lines.release(await ways.lines.open(Known(*anchor).via))
            self._callers.append(_Caller(me, ways))
        return count

    async def call(self, anchor: Sequence[str], callee: Sequence[str], caller: int = 0, keep: bool = False) -> Any:  # noqa: ANN401 - JSON
        """Reach a hidden peer. Returns how, and the seconds until its channel was proven; why not, if it failed."""
        me, ways = self._callers[caller]
        began = time.perf_counter()
        try:
            ways.lines.release(await ways.lines.open(Known(*anchor).via))
            line_s = time.perf_counter() - began
            channel = await ways.dial(Known(*anchor).via, Known(*callee).remote, me, self._heard)
            took_s = time.perf_counter() - began
            async with asyncio.timeout(5):
                ping_s = await channel.ping()
        except (NetworkError, TimeoutError) as error:
            return {"way": "", "s": time.perf_counter() - began, "why": str(error)}
        if keep:
            self._channel = channel
        else:
            channel.close()
        return {"way": channel.carrier.way, "s": took_s, "line_s": line_s, "ping_s": ping_s}

    async def echo(self, frames: int) -> float:
        """Send frames on the channel that was kept, each once the one before has come back. Returns seconds."""
        began = time.perf_counter()
        for number in range(frames):
            self._send(number, want=1)
            await self._back()
        return time.perf_counter() - began

    async def flood(self, frames: int, window: int = 64) -> float:
        """Send frames on the channel that was kept, many on their way. Returns seconds."""
        began = time.perf_counter()
        for number in range(1, frames + 1):
            last = number % window == 0
            self._send(number, want=int(last))
            if last:
                await self._back()
        return time.perf_counter() - began

    def _send(self, number: int, want: int) -> None:
        assert self._channel is not None
        hidden = torch.zeros((1, 1, FRAME_VALUES))
        step = Step(session=SESSION, epoch=0, step=number, keep=0, budget_ms=1000, want=want, hidden=meta_of(hidden))
        self._answered.clear()
        self._channel.send(step, Activations(hidden))

    async def _back(self) -> None:
        async with asyncio.timeout(60):
            await self._answered.wait()

    def _heard(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        """Take a message on a channel of a caller, or of a hidden peer, which sends back what is wanted."""
        if isinstance(message, Step) and message.want:
            assert activations is not None
            output = Output(session=SESSION, epoch=0, step=message.step, hidden=message.hidden)
            channel.send(output, activations)
        elif isinstance(message, Output):
            self._answered.set()
        return PROGRESS

    async def _listening(self, port: int) -> ListeningTraversal:
        me = _endpoint()
        listener = Listener(me, "0.0.0.0", port)  # noqa: S104 - the host has one network
        ways = ListeningTraversal(me, listener, self._gate.own_record, lambda: record_of(me.identity, me.key))
        await listener.start(ways.before(self._heard))
        return ways

    async def _leave(self) -> None:
        for each in self._hidden:
            each.running.cancel()
            await asyncio.gather(each.running, return_exceptions=True)
            await each.ways.close()
            await each.ways.listener.close()
        self._hidden = []


def _endpoint() -> Endpoint:
    return Endpoint(Identity.generate(), ChannelKey(), NETWORK, public=True)
