"""The life of `swarm-serve`: load, join, be reached, serve, leave."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import structlog
import torch

from swarm.blocks import Blocks
from swarm.commands import Ready, Stop
from swarm.dht.dialback import ask_dial_back, dialling_as, serve_dial_back
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.records import SignedAnnouncement
from swarm.dht.sequence import SequenceInFile
from swarm.errors import BadConfiguration, NetworkError, RootMismatch, SwarmError, Unreachable, ungrouped
from swarm.identity import Identity
from swarm.model.allocator import keep_free_memory
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.kernels import choose_kernels
from swarm.model.loading import block_bytes, expected_dtype, fetch_span, load_span
from swarm.model.span import Span, numeric_class_of
from swarm.net.channel import Self
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig, multiaddr_of
from swarm.net.reach import is_public
from swarm.net.tcp import Listener
from swarm.server.announcer import Announcer
from swarm.server.arguments import ServeArguments
from swarm.server.automatic import Automatic
from swarm.server.measure import blocks_that_fit, cache_prices, tokens_that_fit
from swarm.server.pool import Prices
from swarm.server.server import Server, ServerOptions, claim

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


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is known before the network is. span, pool_tokens: loaded already, where the command says which blocks."""

    checkpoint: Checkpoint
    device: torch.device
    length: int = 0  # of the span that is to be chosen
    loaded: "_Loaded | None" = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A span, its KV pool's capacity and what that charges."""

    span: Span
    pool_tokens: int
    prices: Prices


async def serve(
    arguments: ServeArguments, identity: Identity, identity_path: Path, ready: Callable[[Ready], None], stop: Stop
) -> None:
    """Serve until asked to stop. Raises UsageError, CheckpointError or NetworkError while starting."""
    announced = tuple(multiaddr_of(*address) for address in arguments.p2p_announce_address)
    ways_in = arguments.initial_peers or announced or (multiaddr_of(*arguments.p2p_listen),)
    public = arguments.access.network_key is None and await is_public(ways_in)
    me = Self(identity, ChannelKey(), arguments.network, arguments.access, public=public)
    listener = Listener(me, *arguments.listen)
    p2p = P2PConfig(identity_path, arguments.p2p_listen, announced)
    config = NodeConfig(me.network, p2p, arguments.initial_peers, me.access)
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(_in_thread(lambda: _open(arguments)))
            async with open_node(config, clock=time.time) as node:
                opened = await opening
                sequence = SequenceInFile(identity_path.with_name(f"{identity_path.name}.sequence"))
                directory = Directory(
                    node, identity=identity, network=me.network, clock=time.time, sequence=sequence, public=public
                )
                await _check_root(directory, opened.checkpoint, arguments.root)
                await serve_dial_back(node, dialling_as(me))
                host = _Host(arguments, me, listener, node, directory, opened, ready, stop)
                try:
                    await host.run(opened.loaded)
                finally:
                    await listener.close()


class _Host:
    """One process's place in the swarm: its node and its address stay, its span may change."""

    def __init__(
        self,
        arguments: ServeArguments,
        me: Self,
        listener: Listener,
        node: SwarmNode,
        directory: Directory,
        opened: _Opened,
        ready: Callable[[Ready], None],
        stop: Stop,
    ) -> None:
        self._arguments, self._me, self._listener = arguments, me, listener
        self._node, self._directory, self._ready, self._stop = node, directory, ready, stop
        self._checkpoint, self._device, self._length = opened.checkpoint, opened.device, opened.length
        dtype = expected_dtype(opened.checkpoint, _dtype(arguments))
        self._numeric_class = numeric_class_of(opened.checkpoint.config, dtype)
        key = me.identity.public_key.hex()
        every_s = arguments.rebalance_every if arguments.automatic else 0.0
        self._automatic = Automatic(directory, opened.checkpoint, key, self._numeric_class, every_s, Random())  # noqa: S311 - when to look is no secret
        self._options = ServerOptions(
            cache_tokens=0,
            announce=arguments.announce_address or (_reachable(listener.address),),
            threads=arguments.threads,
            public_name=arguments.public_name,
            journal_bytes=arguments.journal_memory,
            automatic=every_s > 0,
        )

    async def run(self, loaded: _Loaded | None) -> None:
        """Serve one span after the other until asked to stop; then withdraw."""
        if loaded is None:
            loaded = await self._load(await self._automatic.first(self._length, self._claim))
        while loaded is not None and (goal := await self._serve(loaded)) is not None:
            before, loaded = loaded.span.blocks, None  # two spans may not fit into memory
            loaded = await self._or_stopped(self._load(goal, before))
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._directory.withdraw()
        except (TimeoutError, NetworkError) as error:
            _log.warning("not withdrawn; the announcement expires by itself", why=str(error))

    async def _serve(self, loaded: _Loaded) -> Blocks | None:
        """Host one span: its whole life, from the first connection to the drain. Returns whereto to move, if at all."""
        gc.freeze()  # what is there now stays: a full collection would stop all sessions for half a second
        keep_free_memory()
        options = replace(self._options, cache_tokens=loaded.pool_tokens, prices=loaded.prices)
        server = Server(self._checkpoint, loaded.span, self._me, self._listener, options)
        await server.start()
        goal = None
        try:
            announcer = Announcer(self._directory, server.announcement)
            async with asyncio.TaskGroup() as group:
                life = group.create_task(_announce(announcer, server, self._node, self._checkpoint, self._ready))
                goal = await self._leave(server, announcer)
                life.cancel()
            if goal is not None:
                await self._withdraw(loaded.span.blocks)
        finally:
            await server.stop(moving=goal is not None)
        return goal

    async def _leave(self, server: Server, announcer: Announcer) -> Blocks | None:
        """Wait until this server is to leave its span, and let its sessions move. Returns whereto, or None: to stop.

        A session that nobody else can take over keeps the server where it is, unless it is to stop.
        """
        within_s = self._arguments.drain_timeout
        while True:
            goal = await self._or_stopped(self._goal(server.span.blocks))
            _log.info("leaving", sessions=len(server.handler.sessions), within_s=within_s, moving_to=goal and str(goal))
            if goal is not None:
                await self._claim(goal)
            announcer.change("draining")
            await server.handler.drain(within_s)
            if goal is None or self._stop.asked:
                return None
            if not server.handler.sessions:
                return goal
            _log.warning("stays: it has sessions that nobody else can take", blocks=str(server.span.blocks))
            server.handler.admission.draining = False
            announcer.change("online")
            await self._withdraw(goal)

    async def _or_stopped(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return what some work returns, or None as soon as this server is asked to stop."""
        async with asyncio.TaskGroup() as group:
            stopped, working = group.create_task(self._stop.wait()), group.create_task(work)
            await asyncio.wait((stopped, working), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            working.cancel()
        return None if self._stop.asked else working.result()

    async def _goal(self, blocks: Blocks) -> Blocks:
        """Wait until this server is needed elsewhere, and fetch what it needs there while it serves. Returns where."""
        while True:
            goal = await self._automatic.goal()
            _log.info("needed elsewhere", blocks=str(blocks), goal=str(goal))
            try:
                await _in_thread(partial(fetch_span, self._checkpoint, goal))
            except SwarmError as error:
                _log.warning("cannot move: stays where it is", goal=str(goal), why=str(error))
                continue
            return goal

    async def _claim(self, blocks: Blocks) -> None:
        """Say that a span will be here, so that no other server takes it for missing; and no other than this one."""
        now = time.time()
        await self._directory.announce(
            claim(self._checkpoint, self._me, blocks, self._numeric_class, self._options, now)
        )

    async def _load(self, blocks: Blocks, otherwise: Blocks | None = None) -> _Loaded:
        """Load a span while its claim is kept alive; where that fails, the one that was here before."""
        gc.unfreeze()  # the span before this one is garbage now, cycles and all
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        claims = Announcer(
            self._directory,
            lambda _: claim(self._checkpoint, self._me, blocks, self._numeric_class, self._options, time.time()),
        )
        async with asyncio.TaskGroup() as group:
            announcing = group.create_task(claims.run())
            try:
                return await _in_thread(partial(_load, self._arguments, self._checkpoint, blocks, self._device))
            except SwarmError as error:
                if otherwise is None:
                    raise
                _log.error("did not load; back to the blocks before", blocks=str(blocks), why=str(error))
            finally:
                announcing.cancel()
        await self._withdraw(blocks)
        return await self._load(otherwise)

    async def _withdraw(self, blocks: Blocks) -> None:
        try:
            await self._directory.withdraw(blocks)
        except NetworkError as error:
            _log.warning("not withdrawn; the announcement expires by itself", blocks=str(blocks), why=str(error))


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
        cache_tokens=server.pool.capacity,
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


def _open(arguments: ServeArguments) -> _Opened:
    """Open the checkpoint; load the span if it is known already, or tell how many blocks fit."""
    checkpoint = open_checkpoint(
        arguments.model,
        revision=arguments.revision,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
        max_disk_bytes=arguments.max_disk_space,
        root=arguments.root,
    )
    if not arguments.automatic:
        blocks = Blocks.parse(arguments.blocks, checkpoint.n_blocks)
        device = _device(arguments.device)
        return _Opened(checkpoint, device, loaded=_load(arguments, checkpoint, blocks, device))
    device = _device(arguments.device)
    if arguments.num_blocks is not None:
        checkpoint.check(Blocks(0, arguments.num_blocks))
        return _Opened(checkpoint, device, arguments.num_blocks)
    one = block_bytes(checkpoint, _dtype(arguments))
    fit = blocks_that_fit(one, device)
    if fit == 0:
        raise BadConfiguration("--blocks auto", f"one block takes {one >> 20} MB, and {device} has no room for it")
    return _Opened(checkpoint, device, min(fit, checkpoint.n_blocks))


def _load(arguments: ServeArguments, checkpoint: Checkpoint, blocks: Blocks, device: torch.device) -> _Loaded:
    """Load a span, and see how many tokens its KV pool can hold."""
    try:
        span = load_span(checkpoint, blocks, dtype=_dtype(arguments), device=device)
    except (torch.OutOfMemoryError, MemoryError):
        raise BadConfiguration("--blocks", f"blocks {blocks} do not fit into the memory of {device}") from None
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)  # of this thread, so that kernels are timed as they will run
    packed = choose_kernels(span)
    _log.info("kernels chosen", weights="packed by oneDNN" if packed else "as they are", batches=span.packs)
    with torch.inference_mode():
        prices = cache_prices(span)
    return _Loaded(span, arguments.cache_tokens or tokens_that_fit(span, prices, arguments.cache_memory), prices)


def _dtype(arguments: ServeArguments) -> torch.dtype | str:
    return "auto" if arguments.dtype == "auto" else getattr(torch, arguments.dtype)


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
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any longer
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
