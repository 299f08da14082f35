"""A client and one hop in one process, without sockets, threads or blocks: what the software between them computes."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from common import Samples
from torch import Tensor

from swarm.activations import Activations, NumericClass
from swarm.blocks import Blocks
from swarm.client.hf.runtime import LoopThread
from swarm.client.hf.swarm import WaitingSession
from swarm.client.planning.route import Hop
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import Session
from swarm.client.session.sessions import Sessions
from swarm.compute.task import Done, Executor, Task
from swarm.identity import Identity
from swarm.model.span import Span
from swarm.net.channel import Channel
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.limits import ChannelLimits, ReadLimits
from swarm.net.noise import ChannelKey
from swarm.protocol.naming import new_name
from swarm.server.handler import Handler
from swarm.server.holdings import Memory
from swarm.server.hosting import Hosting
from swarm.server.pool import Pool

ROOT_HASH = "0" * 64
NETWORK = "memory"
BLOCKS = Blocks(0, 2)
POSITIONS_MAX = 1 << 20
NAMES = ("software: a hop, frame in to frame out", "software: client", "software: client, for a thread that waits")


def measure_software(count: int, warm_up: int, hidden_size: int) -> dict[str, Samples]:
    """Time steps of one token: the server's part from a frame in to a frame out, the client's, and all together."""
    loop = LoopThread()
    try:
        ring = loop.run(_open(hidden_size))
        waiting = WaitingSession(loop, ring.opened)
        hidden = torch.randn(1, 1, hidden_size)
        samples = {name: Samples(name) for name in NAMES}
        for number in range(warm_up + count):
            keep = 2 * number
            server, client = loop.run(ring.step(hidden, keep))
            began = time.perf_counter()
            waiting.step(Activations(hidden), keep=keep + 1, rows=None, want=1)
            whole = time.perf_counter() - began
            if number >= warm_up:
                for sample, took_s in zip(samples.values(), (server, client, whole - server), strict=True):
                    sample.ms.append(1000 * took_s)
        return samples
    finally:
        loop.stop()


class _Ring:
    def __init__(self, session: Session, served: "_Wire") -> None:
        self.session = session
        self._served = served

    async def opened(self, *_: int) -> Session:
        """As `Router.open`."""
        return self.session

    async def step(self, hidden: Tensor, keep: int) -> tuple[float, float]:
        """Run one step. Returns seconds that the server took, and that the client took."""
        self._served.took_s = 0.0
        began = time.perf_counter()
        await self.session.step(Activations(hidden), keep=keep, want=1)
        whole = time.perf_counter() - began
        return self._served.took_s, whole - self._served.took_s


async def _open(hidden_size: int) -> _Ring:
    no_limit = ChannelLimits(reading=ReadLimits(bytes_burst=1e15, idle_burst=1e15))
    server, client = (Endpoint(Identity.generate(), ChannelKey(), NETWORK) for _ in range(2))
    span = cast(Span, _Echo(hidden_size))
    memory = Memory.of(Pool(2 * POSITIONS_MAX))
    executor = cast(Executor, _Inline())
    handler = Handler(
        Hosting(ROOT_HASH, NETWORK, span), executor, memory, lambda _: cast(Dialer, SimpleNamespace()), time.time
    )
    dialer = _NoDialer()
    sessions = Sessions(partial(new_name, client.identity.peer_id), lambda _: cast(Dialer, dialer))
    there, back = _Wire(), _Wire()
    remote = Remote(server.identity.peer_id, server.key.public)
    back.channel = Channel(there, server, handler.on_message, flow=FlowControl(no_limit))
    there.channel = Channel(back, client, sessions.on_message, remote, FlowControl(no_limit))
    back.start()
    there.start()
    await there.channel.ready
    dialer.channel = there.channel
    announcement = SimpleNamespace(
        prefill_tps=None,
        span=BLOCKS,
        peer_id=remote.peer,
        channel_key=server.key.public.hex(),
        addresses=(),
        ways=(),
        numeric_class="float32",
    )
    hop = Hop(cast(Any, SimpleNamespace(announcement=announcement, data=b"")), BLOCKS)
    plan = SessionPlan(
        root=ROOT_HASH, positions_max=POSITIONS_MAX, rollback_max=0, step_timeout_s=60.0, wait_for_blocks_s=0.0
    )

    async def planner(*_: object) -> tuple[Hop, ...]:
        return (hop,)

    session = await sessions.open(plan, BLOCKS, planner)
    return _Ring(session, back)


class _Wire:
    """Carries frames to `channel`: the next time that the loop runs, as a socket would."""

    way, host = "direct", "127.0.0.1"

    def __init__(self) -> None:
        self.took_s = 0.0
        self.channel: Channel
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] | None = []

    def start(self) -> None:
        early, self._early = self._early, None
        for data in early or ():
            self.write(data)

    def write(self, data: bytes | bytearray) -> None:
        if self._early is not None:
            self._early.append(bytes(data))
        else:
            self._loop.call_soon(self._deliver, bytes(data))

    def _deliver(self, data: bytes) -> None:
        began = time.perf_counter()
        self.channel.receive(data)
        self.took_s += time.perf_counter() - began

    def unsent_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        raise AssertionError("the client is too quick")

    def resume_reading(self) -> None:
        pass


class _Inline:
    """Computes at once."""

    def submit(self, task: Task, done: Done) -> None:
        done(task.complete())


class _NoDialer:
    """Has the one channel that there is."""

    channel: Channel

    @property
    def heard_at(self) -> float:
        return self.channel.heard_at

    async def connect(self, remote: Remote, addresses: Sequence[str]) -> Channel:
        del remote, addresses
        return self.channel

    def doubt(self, channel: Channel) -> None:
        del channel

    def has(self, remote: Remote) -> bool:
        del remote
        return True

    def release(self, channel: Channel) -> None:
        pass


class _Echo:
    """A span without blocks."""

    blocks = BLOCKS
    dtype = torch.float32
    device = torch.device("cpu")
    numeric_class = NumericClass("float32")
    traits = SimpleNamespace(positions_max=None)
    packs = False

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def part(self, blocks: Blocks) -> "_Echo":
        del blocks
        return self

    def new_cache(self, rollback_max: int = 0) -> Any:  # noqa: ANN401 - stands for a SpanCache
        del rollback_max
        return SimpleNamespace(length=0)

    def forward(self, hidden: Tensor, *, cache: object, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        del cache, positions, mask
        return hidden
