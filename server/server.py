"""A running server: the span, its sessions and its listener. It builds its announcement; the DHT is elsewhere."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import torch

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.compute.task import Probe
from swarm.compute.thread import ComputeThread
from swarm.config import PROTOCOL_VERSION
from swarm.dht.records import Announcement
from swarm.dht.records import Span as AnnouncedSpan
from swarm.limits import limit
from swarm.model.allocator import return_free_memory
from swarm.model.checkpoint import Checkpoint
from swarm.model.span import Span
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.traversal import ListeningTraversal
from swarm.protocol.tensors import Coding
from swarm.server.announcer import State
from swarm.server.handler import Handler
from swarm.server.holdings import Memory
from swarm.server.hosting import Hosting
from swarm.server.limits import HandlerLimits, MemoryLimits
from swarm.server.measure import Throughput, device_name, measure_throughput
from swarm.server.pool import Pool, Prices
from swarm.server.roundtrips import RoundTrips
from swarm.version import __version__

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on one server, and on what peers ask of it."""

    inflow_share: float = limit(2.0, "times", "activations are read so much faster than the span computes a prefill")
    inflow_bytes_per_s_min: float = limit(16.0 * 2**20, "bytes/s", "are read at least, however slow the span is")
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    handler: HandlerLimits = field(default_factory=HandlerLimits)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server serves. announce: addresses ("host:port") to announce; empty takes the one it listens on.

    cache_tokens, prices: the KV pool's capacity and its charges; None a token for each. journal_bytes: host memory
    for outputs that repairs replay. threads: cores for one operation; None leaves torch's choice. automatic: the server
    chose the span itself, and may move. coding: of activations, for sessions that ask for it.
    """

    cache_tokens: int
    announce: tuple[str, ...] = ()
    threads: int | None = None
    public_name: str = ""
    journal_bytes: int = 1 << 30
    automatic: bool = False
    coding: Coding | None = None
    prices: Prices | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)


class Server:
    """One span, served. Lives in the event loop; `start` and `stop` are its life."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        span: Span,
        traversal: ListeningTraversal,
        options: ServerOptions,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """traversal: its listener is bound already, so that a port in use was noticed before weights were loaded."""
        self.span = span
        self.throughput: Throughput | None = None
        limits, cache = options.limits, Pool(options.cache_tokens)
        self.memory = Memory.of(cache, prices=options.prices, journal_bytes=options.journal_bytes, limits=limits.memory)
        self._checkpoint = checkpoint
        self.traversal = traversal
        self.options = options
        self.executor = ComputeThread(asyncio.get_running_loop(), options.threads, check=self._check)
        self.handler = Handler(
            Hosting(checkpoint.root, traversal.me.network, span, options.coding, traversal.me.identity),
            self.executor,
            self.memory,
            lambda take: Dialer(traversal.me, take, traversal.dial),
            wall_clock,
            limits=limits.handler,
        )
        self.round_trips = RoundTrips(self.handler.links.dialer)
        self._sweeper: asyncio.Task[None] | None = None

    def _check(self) -> None:
        """Compute a step that no peer has a part in. Raises where the device is broken; in the compute thread."""
        if self.throughput is not None:  # it has borne this once
            hidden = torch.zeros(1, 1, self.span.hidden_size, dtype=self.span.dtype, device=self.span.device)
            self.span.forward(hidden, cache=self.span.new_cache()).sum().item()  # item(): wait for the device

    @property
    def pool(self) -> Pool:
        """The cache, in tokens."""
        return self.memory.cache

    async def start(self) -> None:
        """Accept channels from now on."""
        limits = self.options.limits.handler
        for peer, gateway in limits.gateways.items():
            per_opening = limits.accounts.opening_messages
            self.listener.flow.grant(peer, per_opening * gateway.openings_per_s, per_opening * gateway.sessions)
        await self.listener.start(self.traversal.before(self.handler.on_message), self.handler.peers_in_use)
        self._sweeper = asyncio.create_task(self.handler.sweep())

    async def watch(self) -> None:
        """Raise the error of whatever of this server has ended by itself: it would announce itself, and not serve."""
        assert self._sweeper is not None
        watching = asyncio.create_task(self.executor.watch())
        try:
            ended, _ = await asyncio.wait((watching, self._sweeper), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        for task in ended:
            task.result()

    async def stop(self, *, moving: bool = False) -> None:
        """End every session and every channel. moving: the address is kept, for the next span's server."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        await self.handler.close()
        if moving:
            self.listener.pause()
        else:
            await self.listener.close()
        await self.handler.links.dialer.close()
        await asyncio.to_thread(self.executor.stop)  # a long step must not keep the loop from a second signal

    @property
    def me(self) -> Endpoint:
        """This side, as it presents itself."""
        return self.traversal.me

    @property
    def listener(self) -> Listener:
        """Where channels are accepted."""
        return self.traversal.listener

    @property
    def data_address(self) -> str:
        """Where channels are accepted, as "host:port"."""
        return str(self.listener.address)

    async def measure(self) -> None:
        """Measure the span's throughput, in the compute thread and so between the steps of sessions.

        A span that does not bear it serves all the same, and announces no throughput.
        """
        done: asyncio.Future[Throughput | None] = asyncio.get_running_loop().create_future()

        def finish(result: Throughput | Exception) -> None:
            if isinstance(result, Exception):
                _log.warning("throughput not measured", error=type(result).__name__, exc_info=result)
            if not done.done():  # else the server is leaving
                done.set_result(result if isinstance(result, Throughput) else None)

        def measured() -> Throughput:
            try:
                return measure_throughput(self.span)
            finally:
                return_free_memory()  # of loading, too

        self.executor.submit(Probe(measured), finish)
        self.throughput = await done
        if self.throughput is not None:
            limits, token_bytes = self.options.limits, self.span.hidden_size * self.span.dtype.itemsize
            computed = self.throughput.prefill_tps * token_bytes
            self.listener.flow.read.change(max(limits.inflow_bytes_per_s_min, limits.inflow_share * computed))

    def announcement(self, state: State) -> Announcement:
        """Return the announcement of this server as it is now. Sequence and times are set when it is signed."""
        measured = self.throughput
        bare = claim(self._checkpoint, self.me, self.span.blocks, self.span.numeric_class, self.options)
        return bare.model_copy(
            update={
                "addresses": self.options.announce or (self.data_address,),
                "decode_tps": measured.decode_tps if measured else None,
                "prefill_tps": measured.prefill_tps if measured else None,
                "free_tokens": self.pool.free(),
                "load": float(self.handler.steps_under_way),
                "batches": self.span.packs,
                "state": state,
                "rtts": self.round_trips.latest,
                "device": device_name(self.span.device),
            }
        )


def claim(
    checkpoint: Checkpoint,
    me: Endpoint,
    blocks: Blocks,
    numeric_class: NumericClass,
    options: ServerOptions,
) -> Announcement:
    """Return the announcement of a span that is not loaded yet: others place theirs elsewhere, and no client calls it.

    Sequence and times are set when it is signed.
    """
    return Announcement(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        network=me.network,
        public_key=me.identity.public_key.hex(),
        root=checkpoint.root,
        model=checkpoint.public_name,
        n_blocks=checkpoint.n_blocks,
        blocks=AnnouncedSpan(blocks.start, blocks.stop),
        numeric_class=str(numeric_class),
        addresses=(),
        channel_key=me.key.public.hex(),
        state="joining",
        automatic=options.automatic,
        codings=() if options.coding is None else (options.coding,),
        public_name=options.public_name,
        sequence=0,
        issued=1,
        expires=2,
    )
