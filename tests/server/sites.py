"""Servers and peers for tests of what a server does: real channels, real spans, no DHT."""

import asyncio
import itertools
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.compute.task import Probe
from swarm.dht.records import Announcement, sign_announcement
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint
from swarm.model.span import Span
from swarm.net.address import parse
from swarm.net.carriers.tcp import TcpCarrier, dial
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.gate import PROGRESS, Toll
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.protocol.base import Message
from swarm.protocol.messages import AnyMessage, Open, Opened, Output, Rebuild, Rebuilt, Refused, Step
from swarm.protocol.tensors import Coding, meta_of
from swarm.server.limits import HandlerLimits, HostedLimits
from swarm.server.server import Server, ServerLimits, ServerOptions
from swarm.server.session import HostedSession
from tests.support.ways import unhidden

NETWORK = "test"
HIDDEN = 64
TOKEN_BYTES = 4 * HIDDEN
POOL_TOKENS = 200
WINDOW = HostedLimits().inbox.window_steps
WITHIN_S = 10.0
TOLERANCE = 1e-4  # float32; for one product over all positions against several over parts of them
FIRST, SECOND = Blocks(0, 3), Blocks(3, 6)
_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint and two spans of it, loaded once."""

    checkpoint: Checkpoint
    spans: dict[Blocks, Span]


@dataclass(slots=True)
class Site:
    """A server in this process."""

    server: Server
    identity: Identity

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def computed(self) -> int:
        """Steps and pieces of pasts that its compute thread has given back."""
        return self.server.handler.jobs_done

    @property
    def idle(self) -> bool:
        """Whether nothing of any session is left."""
        return not self.server.handler.sessions and not self.server.memory.used

    def session(self, request: Open) -> HostedSession:
        return self.server.handler.sessions[request.session]

    def tighten(self, **limits: object) -> None:
        """Bound sessions otherwise from now on."""
        handler = self.server.handler
        handler.limits = replace(handler.limits, session=replace(handler.limits.session, **limits))

    def record(self, *, signer: Identity | None = None, **changes: object) -> str:
        """The server's announcement, as clients pass it on."""
        now = time.time()
        announcement = self.server.announcement("online").model_copy(update={"issued": now, "expires": now + 60})
        return packed(announcement.model_copy(update=changes), signer or self.identity)


@asynccontextmanager
async def serving(
    loaded: Loaded,
    blocks: Blocks,
    pool_tokens: int = POOL_TOKENS,
    limits: ServerLimits | None = None,
    coding: Coding | None = None,
) -> AsyncIterator[Site]:
    identity = Identity.generate()
    me = Endpoint(identity, ChannelKey(), NETWORK)
    options = ServerOptions(pool_tokens, limits=limits or ServerLimits(), coding=coding)
    server = Server(loaded.checkpoint, loaded.spans[blocks], unhidden(me, Listener(me, "127.0.0.1", 0)), options)
    await server.start()
    try:
        yield Site(server, identity)
    finally:
        await server.stop()


def bounded(**session: object) -> ServerLimits:
    """The limits of a server whose sessions have these."""
    return ServerLimits(handler=HandlerLimits(session=replace(HostedLimits(), **session)))


class Peer:
    """An identity that speaks to servers."""

    def __init__(self, identity: Identity | None = None):
        self.me = Endpoint(identity or Identity.generate(), ChannelKey(), NETWORK)
        self.inbox: asyncio.Queue[tuple[AnyMessage, Activations | None]] = asyncio.Queue()
        self.channels: dict[str, Channel] = {}

    @property
    def peer(self) -> str:
        return self.me.identity.peer_id

    async def to(self, site: Site) -> Channel:
        """This peer's channel to a server."""
        if site.peer not in self.channels or self.channels[site.peer].closed:
            remote = Remote(site.peer, site.server.me.key.public)
            self.channels[site.peer] = await dial(parse(site.server.data_address), remote, self.me, self._received)
        return self.channels[site.peer]

    async def carrier_to(self, site: Site) -> TcpCarrier:
        """The carrier of a new channel to a server, for a peer that sends what it likes."""
        remote, address = Remote(site.peer, site.server.me.key.public), parse(site.server.data_address)
        carrier = TcpCarrier(lambda carrier: Channel(carrier, self.me, self._received, remote))
        await asyncio.get_running_loop().create_connection(lambda: carrier, address.host, address.port)
        assert carrier.channel is not None
        await carrier.channel.ready
        return carrier

    def _received(self, channel: Channel, message: AnyMessage, got: Activations | None) -> Toll:
        self.inbox.put_nowait((message, got))
        return PROGRESS

    async def ask(self, site: Site, message: Message, sent: Activations | None = None) -> AnyMessage:
        """Send a message and return the next that comes, from any server."""
        (await self.to(site)).send(message, sent)
        return await self.next()

    async def next(self) -> AnyMessage:
        async with asyncio.timeout(WITHIN_S):
            return (await self.inbox.get())[0]

    async def output(self) -> Tensor:
        """Return the activations of the next message, which must be an output."""
        async with asyncio.timeout(WITHIN_S):
            message, got = await self.inbox.get()
        assert isinstance(message, Output), message
        assert got is not None
        return got.hidden.clone()

    async def settled(self, site: Site) -> None:
        """Wait until the server has taken everything that was sent to it."""
        async with asyncio.timeout(WITHIN_S):
            await (await self.to(site)).ping()

    def leave(self) -> None:
        for channel in self.channels.values():
            channel.close()


# What peers send


def open_for(site: Site, **changes: object) -> Open:
    """What opens a session of the server's whole span, for its owner alone."""
    span = site.server.span
    request = Open(
        session=f"{next(_names):032x}",
        epoch=0,
        root=site.server.announcement("online").root,
        numeric_class="float32",
        start=span.blocks.start,
        stop=span.blocks.stop,
        positions_max=100,
        rollback_max=0,
    )
    return request.model_copy(update=changes)


async def opened(owner: Peer, site: Site, **changes: object) -> Open:
    request = open_for(site, **changes)
    assert isinstance(await owner.ask(site, request), Opened)
    return request


async def opened_ring(owner: Peer, first: Site, second: Site, **changes: object) -> Open:
    """Open one session on both: first hands on to second, and that to the owner."""
    request = await opened(owner, first, next_record=second.record(), **changes)
    await opened(owner, second, session=request.session, previous=first.peer, **changes)
    return request


def step(
    request: Open,
    number: int,
    hidden: Tensor,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    keep: int = 0,
    want: int = 1,
    coding: Coding | None = None,
    **changes: object,
) -> tuple[Step, Activations]:
    message = Step(
        session=request.session,
        epoch=request.epoch,
        step=number,
        keep=keep,
        budget_ms=60_000,
        want=want,
        hidden=meta_of(hidden, coding),
        positions=None if positions is None else meta_of(positions),
        mask=None if mask is None else meta_of(mask),
    )
    return message.model_copy(update=changes), Activations(hidden, positions, mask)


def rebuild(request: Open, start: int, total: int, piece: Tensor) -> Rebuild:
    return Rebuild(
        session=request.session, epoch=request.epoch, start=start, total=total, hops=1, hidden=meta_of(piece)
    )


def rebuilt(request: Open, stop: int) -> Rebuilt:
    return Rebuilt(session=request.session, epoch=request.epoch, stop=stop)


def packed(announcement: Announcement, signer: Identity) -> str:
    return b64encode(sign_announcement(announcement, signer)).decode()


def activations(rows: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


# What they get, and what servers should compute


def code(answer: AnyMessage) -> str:
    assert isinstance(answer, Refused), answer
    return answer.code


def span_output(loaded: Loaded, blocks: Blocks, hidden: Tensor) -> Tensor:
    with torch.inference_mode():
        return loaded.spans[blocks].forward(hidden, cache=None)


def local(loaded: Loaded, hidden: Tensor) -> Tensor:
    return span_output(loaded, SECOND, span_output(loaded, FIRST, hidden))


def held_up(site: Site) -> asyncio.Event:
    """Keep the server from computing until the event that is returned is set."""
    release, loop = asyncio.Event(), asyncio.get_running_loop()
    waiting = Probe(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result())
    site.server.executor.submit(waiting, lambda _: None)
    return release


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)
