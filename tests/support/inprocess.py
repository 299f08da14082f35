"""A swarm inside the test's process: real sockets, channels, compute threads and models; the directory is in memory.

Quicker to start than processes, and a test can look inside. tests/integration has those that need processes or a DHT.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import torch

from swarm.blocks import Blocks
from swarm.client.auditing.auditor import AuditLimits
from swarm.client.hf.drafting import drafting_by_mtp
from swarm.client.hf.head import HeadMode, prepare_head
from swarm.client.hf.lead import Drafting
from swarm.client.hf.local import LocalFirst
from swarm.client.hf.model import DistributedModel, distribute
from swarm.client.hf.runtime import LoopThread
from swarm.client.hf.swarm import ClientOptions, Swarm
from swarm.client.planning.preferences import Preferences
from swarm.client.session.limits import SessionLimits
from swarm.dht.directory import Directory
from swarm.dht.store import MemoryStore
from swarm.identity import Identity
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_ends, load_span
from swarm.model.span import Span
from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.protocol.tensors import Coding
from swarm.server.server import Server, ServerOptions
from tests.support.ways import unhidden

NETWORK = "inprocess"
BEGAN = time.time()
NO_AUDITS = AuditLimits(share=0.0)


def unhurried() -> float:
    """Return the directory's time: records live ten minutes, since a slow machine has a swarm for longer than one."""
    return BEGAN + (time.time() - BEGAN) / 10


class InProcessSwarm:
    """Servers in one event loop, each with its compute thread."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.checkpoint = open_checkpoint(directory)
        self.store = MemoryStore.make(NETWORK, unhurried)
        self.loop = LoopThread()
        self.servers: list[Server] = []
        self._listeners: dict[Server, Listener] = {}

    def serve(
        self,
        blocks: str,
        *,
        cache_tokens: int = 100_000,
        identity: Identity | None = None,
        announce: tuple[str, ...] = (),
        coding: Coding | None = None,
        quantize: str | None = None,
        dtype: torch.dtype | None = None,
        lie: Callable[[Span], object] = lambda _: None,
    ) -> Server:
        """Start a server of these blocks and announce it. announce: addresses, in the place of its own.

        lie: changes the span's computing.
        """
        span = load_span(self.checkpoint, Blocks.parse(blocks), dtype=dtype or self.dtype, quantize=quantize)
        lie(span)

        async def start() -> Server:
            me = Endpoint(identity, ChannelKey(), NETWORK)
            options = ServerOptions(announce=announce, cache_tokens=cache_tokens, threads=1, coding=coding)
            listener = Listener(me, "127.0.0.1", 0)
            server = Server(self.checkpoint, span, unhidden(me, listener), options)
            self._listeners[server] = listener
            await server.start()
            await self.directory(identity).announce(server.announcement("online"))
            return server

        identity = identity or Identity.generate()
        self.servers.append(self.loop.run(start()))
        return self.servers[-1]

    def crash(self, server: Server) -> None:
        """Do as clients and neighbours see it when a process is killed: its record stays until it expires."""

        async def vanish() -> None:
            await self._listeners[server].close()
            await server.handler.links.dialer.close()

        self.loop.run(vanish())

    def directory(self, identity: Identity | None = None) -> Directory:
        """A view of the directory, for reading or for one identity to announce in."""
        return Directory(self.store, identity=identity, network=NETWORK, clock=unhurried)

    def client(
        self,
        *,
        step_timeout_s: float = 30.0,
        wait_for_blocks_s: float = 0.0,
        preferences: Preferences | None = None,
        local_blocks: int = 0,
        quantize: str | None = None,
        limits: SessionLimits | None = None,
        drafting: Drafting | None = None,
        coding: Coding | None = None,
        audits: AuditLimits = NO_AUDITS,
        dtype: torch.dtype | None = None,
        head: HeadMode = "exact",
    ) -> DistributedModel:
        """A distributed model; `close` it. dtype: of its ends, if not the servers'. quantize: of the local blocks."""

        @asynccontextmanager
        async def join() -> AsyncIterator[Directory]:
            yield self.directory()

        options = ClientOptions(
            NETWORK,
            step_timeout_s,
            wait_for_blocks_s,
            preferences or Preferences(),
            local_blocks,
            limits=limits or SessionLimits(),
            coding=coding,
            audits=audits,
        )
        dtype = dtype or self.dtype
        swarm = Swarm(self.checkpoint, dtype, join, Identity.generate(), options)
        here = partial(load_span, self.checkpoint, dtype=dtype, quantize=quantize)
        first = here(Blocks(0, local_blocks)) if local_blocks else None
        ends = load_ends(self.checkpoint, dtype=dtype)
        prepare_head(ends, self.checkpoint.traits, head)
        backend = swarm if first is None else LocalFirst(first, swarm)
        return distribute(ends, self.checkpoint, backend, drafting, partial(drafting_by_mtp, self.checkpoint, ends))

    def close(self) -> None:
        """End every server."""

        async def stop() -> None:
            for server in self.servers:
                await server.stop()

        self.loop.run(stop())
        self.loop.stop()


@contextmanager
def inprocess(directory: Path, *spans: str, dtype: torch.dtype = torch.float32) -> Iterator[InProcessSwarm]:
    """Run servers of these spans while the block runs."""
    swarm = InProcessSwarm(directory, dtype)
    try:
        for blocks in spans:
            swarm.serve(blocks)
        yield swarm
    finally:
        swarm.close()
