"""The life of `swarm-serve`: load, join, be reached, serve, leave."""

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from swarm.blocks import Blocks
from swarm.commands import Ready, Stop
from swarm.dht.dialback import ask_dial_back, dialling_as, serve_dial_back
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.records import SignedAnnouncement
from swarm.errors import BadConfiguration, NetworkError, RootMismatch, Unreachable, ungrouped
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import load_span
from swarm.model.span import Span
from swarm.net.channel import Self
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig, multiaddr_of
from swarm.net.tcp import Listener
from swarm.server.announcer import Announcer
from swarm.server.arguments import ServeArguments
from swarm.server.measure import default_pool_tokens
from swarm.server.server import Server, ServerOptions

REACHED_RETRY_S = 30.0  # how often a server that cannot be reached asks again
LEAVE_TIMEOUT_S = 5.0

Result = TypeVar("Result")
_log = structlog.get_logger("swarm.server")


class ServerReady(Ready):
    """The ready file of a server."""

    data_address: str
    model: str
    root: str
    blocks: str


async def serve(
    arguments: ServeArguments, identity: Identity, identity_path: Path, ready: Callable[[Ready], None], stop: Stop
) -> None:
    """Serve until asked to stop. Raises UsageError, CheckpointError or NetworkError while starting."""
    me = Self(identity, ChannelKey(), arguments.network)
    listener = Listener(me, *arguments.listen)
    announced = tuple(multiaddr_of(*address) for address in arguments.p2p_announce_address)
    p2p = P2PConfig(identity_path, arguments.p2p_listen, announced)
    config = NodeConfig(me.network, p2p, arguments.initial_peers)
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(_in_thread(lambda: _load(arguments)))
            async with open_node(config, clock=time.time) as node:
                checkpoint, span, pool_tokens = await loading
                gc.freeze()  # what is there now stays: a full collection would stop all sessions for half a second
                directory = Directory(node, identity=identity, network=me.network, clock=time.time)
                await _check_root(directory, checkpoint, arguments.root)
                options = ServerOptions(
                    cache_tokens=pool_tokens,
                    announce=arguments.announce_address or (_reachable(listener.address),),
                    threads=arguments.threads,
                    public_name=arguments.public_name,
                    journal_bytes=arguments.journal_memory,
                )
                server = Server(checkpoint, span, me, listener, options)
                await server.start()
                try:
                    await _live(server, node, directory, checkpoint, ready, stop, arguments.drain_timeout)
                finally:
                    await server.stop()


async def _live(
    server: Server,
    node: SwarmNode,
    directory: Directory,
    checkpoint: Checkpoint,
    ready: Callable[[Ready], None],
    stop: Stop,
    drain_timeout_s: float,
) -> None:
    """Announce, become online, serve; then drain and withdraw."""
    await serve_dial_back(node, dialling_as(server.me))
    announcer = Announcer(directory, server.announcement)
    async with asyncio.TaskGroup() as group:
        life = group.create_task(_announce(announcer, server, node, checkpoint, ready))
        await stop.wait()
        _log.info("leaving", sessions=len(server.handler.sessions), within_s=drain_timeout_s)
        announcer.change("draining")
        await server.handler.drain(drain_timeout_s)
        life.cancel()
    try:
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await directory.withdraw()
    except (TimeoutError, NetworkError) as error:
        _log.warning("not withdrawn; the announcement expires by itself", why=str(error))


async def _announce(
    announcer: Announcer, server: Server, node: SwarmNode, checkpoint: Checkpoint, ready: Callable[[Ready], None]
) -> None:
    while not await _reached(node, await announcer.announce()):  # noqa: ASYNC110 - nothing wakes it
        await asyncio.sleep(REACHED_RETRY_S)
    announcer.state = "online"
    await announcer.announce()
    span = server.span
    ready(
        ServerReady(
            peer_id=node.peer_id,
            addresses=node.addresses,
            pid=os.getpid(),
            data_address=server.data_address,
            model=checkpoint.model,
            root=checkpoint.root,
            blocks=str(span.blocks),
        )
    )
    _log.info(
        "online",
        blocks=str(span.blocks),
        model=checkpoint.model,
        numeric_class=span.numeric_class,
        weights_mb=span.weight_bytes >> 20,
        cache_tokens=server.pool.capacity_tokens,
        address=server.data_address,
    )
    await server.measure()
    announcer.change()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.round_trips.run(announcer.directory, server.announcement("online")))
        await announcer.run()


async def _reached(node: SwarmNode, signed: SignedAnnouncement) -> bool:
    """Let another peer try to reach us: a record that nobody can use would only cost clients their time."""
    if not node.neighbours():
        _log.warning("nobody is there yet to check that this server can be reached from outside")
        return True
    try:
        result = await ask_dial_back(node, signed)
    except Unreachable as error:
        _log.warning("nobody could check that this server can be reached", why=str(error))
        return True
    if not result.answered:
        _log.error(
            "this server cannot be reached from outside: forward the port, or pass --announce-address",
            addresses=list(result.silent),
            asked=result.helper,
        )
    return bool(result.answered)


def _load(arguments: ServeArguments) -> tuple[Checkpoint, Span, int]:
    """Open the checkpoint and load the span. Returns them and the KV pool's capacity in tokens."""
    checkpoint = open_checkpoint(
        arguments.model,
        revision=arguments.revision,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
        max_disk_bytes=arguments.max_disk_space,
        root=arguments.root,
    )
    blocks = Blocks.parse(arguments.blocks, checkpoint.n_blocks)
    device = _device(arguments.device)
    dtype = "auto" if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    try:
        span = load_span(checkpoint, blocks, dtype=dtype, device=device)
    except (torch.OutOfMemoryError, MemoryError):
        raise BadConfiguration("--blocks", f"blocks {blocks} do not fit into the memory of {device}") from None
    with torch.inference_mode():
        tokens = arguments.cache_tokens or default_pool_tokens(span)
    return checkpoint, span, tokens


def _device(name: str | None) -> torch.device:
    """Return the device of this name, or the one to take where none is named. Raises BadConfiguration."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without it asserts
        raise BadConfiguration(f"--device {name}", str(error).splitlines()[0][:200]) from None
    return device


async def _check_root(directory: Directory, checkpoint: Checkpoint, confirmed: str | None) -> None:
    """Raise RootMismatch if the swarm serves other files under this name, unless our root was asked for."""
    if confirmed is not None:
        return
    for entry in await directory.models(checkpoint.public_name):
        if entry.root != checkpoint.root and await directory.servers(entry.root, entry.n_blocks):
            raise RootMismatch(checkpoint.public_name, entry.root, checkpoint.root)


def _reachable(address: tuple[str, int]) -> str:
    """Return an address of this machine for others to dial: where every interface listens, the one towards outside."""
    host, port = address
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing: only asks the kernel for a route
                host = probe.getsockname()[0]
            except OSError:
                host = "127.0.0.1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in a thread that does not keep a cancelled process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            loop.call_soon_threadsafe(settle, work(), None)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            loop.call_soon_threadsafe(settle, None, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
