"""The life of `swarm-gateway`: the directory, the models and the web server, in one loop."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
import uvicorn

from swarm.access import Access
from swarm.client.session.membership import Member, joined
from swarm.commands import Ready, Stop
from swarm.compute.thread import ComputeThread
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, open_node
from swarm.gateway.app import Gateway, GatewayLimits, make_app
from swarm.gateway.engine import EngineLimits
from swarm.gateway.models import ModelOptions, Models, serving
from swarm.identity import Identity
from swarm.net.carriers.tcp import bound
from swarm.net.p2p import P2PConfig
from swarm.net.reach import is_public

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArguments:
    """The arguments of `swarm-gateway`."""

    listen: tuple[str, int]
    models: tuple[str, ...]
    initial_peers: tuple[str, ...]
    network: str
    network_key: Path | None
    allow_peers: Path | None
    identity: Path | None  # None: a fresh one
    options: ModelOptions
    threads: int | None = None
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    engine: EngineLimits = field(default_factory=EngineLimits)


class GatewayReady(Ready):
    """The ready file: `url` is where requests go."""

    url: str
    models: tuple[str, ...]


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the command has them. on_started: called when it takes requests."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


async def serve_gateway(arguments: GatewayArguments, ready: Callable[[Ready], None], stop: Stop) -> None:
    """Serve until asked to stop. Raises UsageError or NetworkError."""
    path = arguments.identity
    identity = Identity.generate() if path is None else Identity.load_or_create(path)
    with bound(*arguments.listen) as listening, computing(arguments.threads) as compute:
        access = Access.load(arguments.network_key, arguments.allow_peers)
        joining = joined(partial(_directory, arguments, access), identity, network=arguments.network, access=access)
        async with joining as member, serving(_models(member, compute, arguments)) as models:
            for name in arguments.models:
                await models.add(name)
            await _live(Gateway(models, arguments.limits), identity, listening, ready, stop)


async def _live(
    gateway: Gateway, identity: Identity, listening: socket.socket, ready: Callable[[Ready], None], stop: Stop
) -> None:
    config = uvicorn.Config(
        make_app(gateway),
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=1024,  # connections; more are answered with 503
        timeout_graceful_shutdown=2,  # seconds for requests under way
    )
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    names = tuple(gateway.models.names)

    def on_started() -> None:
        ready(GatewayReady(peer_id=identity.peer_id, addresses=(), pid=os.getpid(), url=url, models=names))
        _log.info("ready", url=url, models=names)

    server = _Server(config, on_started)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listening]))
        await stop.wait()
        _log.info("stopping")
        server.should_exit = True
        await serving


def _models(member: Member, compute: ComputeThread, arguments: GatewayArguments) -> Models:
    return Models(member, compute, arguments.options, arguments.engine)


@contextmanager
def computing(threads: int | None) -> Iterator[ComputeThread]:
    """Run a compute thread within the block."""
    compute = ComputeThread(asyncio.get_running_loop(), threads)
    try:
        yield compute
    finally:
        compute.stop()


@asynccontextmanager
async def _directory(arguments: GatewayArguments, access: Access) -> AsyncIterator[Directory]:
    """Join the DHT, to read the directory."""
    peers = arguments.initial_peers
    config = NodeConfig(arguments.network, P2PConfig(identity=None, listen=None), peers, access)
    async with open_node(config, clock=time.time) as node:
        public = access.network_key is None and await is_public(peers)
        yield Directory(node, identity=None, network=arguments.network, clock=time.time, public=public)
