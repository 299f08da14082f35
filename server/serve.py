"""The life of `swarm-serve`: load, join, be reached, serve, leave."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import structlog

from swarm.blocks import Blocks
from swarm.commands import Ready, Stop
from swarm.dht.directory import Directory
from swarm.dht.helper import serve_dial_back
from swarm.dht.nearby import nearby
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.peermemory import memory_of
from swarm.dht.remembered import remembering
from swarm.dht.sequence import SequenceInFile
from swarm.errors import ComputeFailed, NetworkError, SwarmError
from swarm.groups import ungrouped
from swarm.identity import Identity
from swarm.model.allocator import bound_kernels, keep_free_memory
from swarm.model.weightcache import WeightCache
from swarm.net.addresses import changes
from swarm.net.anchor import AnchorLimits
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.listener import Listener
from swarm.net.mapping import Mapped, map_ports
from swarm.net.noise import ChannelKey
from swarm.net.p2p import P2PConfig, multiaddr_of, port_of
from swarm.net.reach import is_public
from swarm.net.relay import RelayLimits
from swarm.net.traversal import ListeningTraversal, TraversalLimits
from swarm.protocol.naming import new_name
from swarm.protocol.tensors import coding_of
from swarm.server.announcer import Announcer
from swarm.server.arguments import ServeArguments
from swarm.server.automatic import Automatic
from swarm.server.claims import Claims
from swarm.server.limits import HandlerLimits, PrefixLimits
from swarm.server.loader import Loaded, Opened, in_thread, open_model, written
from swarm.server.metrics import answering, metrics_of
from swarm.server.namesakes import Namesakes
from swarm.server.probes import Prober
from swarm.server.proofs import Proofs
from swarm.server.reachable import Listening, Reachability
from swarm.server.server import Server, ServerLimits, ServerOptions

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
    bound_kernels()
    wanted, moves = arguments.network, changes()
    announced = tuple(multiaddr_of(*address) for address in wanted.p2p_announce_address)
    ways_in = wanted.initial_peers or announced or (multiaddr_of(wanted.p2p_listen[0], 0),)
    public = wanted.access.network_key is None and await is_public(ways_in)
    me = Endpoint(identity, ChannelKey(), wanted.network, wanted.access, public=public)
    listener = Listener(me, *wanted.listen)
    p2p = P2PConfig(identity_path, wanted.p2p_listen, announced)
    memory = memory_of(me.network, me.access, public=public)
    config = NodeConfig(me.network, p2p, wanted.initial_peers, me.access, proven=False, met=memory.addresses())
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(in_thread(lambda: open_model(arguments)))
            async with (
                _mapped(listener.address.port, wanted.map_port and public and not wanted.announce_address) as mapped,
                open_node(config, clock=time.time) as node,
                remembering(node, memory),
                nearby(node, config, lan=wanted.lan and not public) as here,
            ):
                await _tried(mapped)
                sequence = SequenceInFile(identity_path.with_name(f"{identity_path.name}.sequence"))
                directory = Directory(
                    node, identity=identity, network=me.network, clock=time.time, sequence=sequence, public=public
                )
                relay = RelayLimits(bytes_per_s=float(wanted.relay_bandwidth))
                traversal = ListeningTraversal(
                    me,
                    listener,
                    node.gate.own_record,
                    lambda: directory.latest.data if directory.latest else b"",
                    TraversalLimits(anchor=AnchorLimits(relay=relay)),
                )
                p2p_port = port_of(next(iter(node.addresses), ""))
                _log.info("listening", at=str(listener.address), p2p_port=p2p_port, identity=str(identity_path))
                listening = Listening(wanted.announce_address, listener.address, p2p_port)
                reach = Reachability(node, me, traversal, listening, moves, mapped)
                watching = group.create_task(reach.watch())
                try:
                    opened = await opening
                    here.root = opened.loader.checkpoint.root
                    await serve_dial_back(node, me, traversal.dial, reach.offer)
                    host = _Host(arguments, traversal, reach, node, directory, opened, ready, stop)
                    await host.run(opened.loaded)
                finally:
                    watching.cancel()
                    await reach.close()
                    await traversal.close()
                    await listener.close()


@asynccontextmanager
async def _mapped(port: int, wanted: bool) -> AsyncIterator[Mapped | None]:
    """Ask the home router to forward a port, if that is wanted. It is asked while the node joins."""
    if not wanted:
        yield None
        return
    async with map_ports((port,), wait=False) as mapped:
        yield mapped


async def _tried(mapped: Mapped | None) -> None:
    """Wait until the router was asked, and tell what it forwards."""
    if mapped is None:
        return
    await mapped.tried()
    for mapping in mapped.mappings:
        _log.info("the router forwards the port", internal=mapping.internal, at=str(mapping.external), by=mapping.by)


class _Host:
    """One process's place in the swarm: its node and its address stay, its span may change."""

    def __init__(
        self,
        arguments: ServeArguments,
        traversal: ListeningTraversal,
        reach: Reachability,
        node: SwarmNode,
        directory: Directory,
        opened: Opened,
        ready: Callable[[Ready], None],
        stop: Stop,
    ) -> None:
        self._traversal, self._reach, self._node = traversal, reach, node
        self._ready, self._stop, self._drain_timeout_s = ready, stop, arguments.drain_timeout
        self._metrics, self._root_is_pinned = arguments.metrics, arguments.checkpoint.root is not None
        self._loader, self._length = opened.loader, opened.length
        every_s = arguments.rebalance_every if arguments.span.automatic else 0.0
        options = ServerOptions(
            cache_tokens=0,
            threads=arguments.span.threads,
            public_name=arguments.public_name,
            journal_bytes=arguments.journal_memory,
            automatic=every_s > 0,
            coding=coding_of(arguments.wire or ""),
            limits=ServerLimits(
                handler=HandlerLimits(
                    gateways=dict(arguments.gateway), prefixes=PrefixLimits(pool_share=arguments.prefix_share)
                )
            ),
        )
        checkpoint, numeric_class = opened.loader.checkpoint, opened.loader.numeric_class
        self._claims = Claims(directory, checkpoint, traversal.me, numeric_class, options)
        key = traversal.me.identity.public_key.hex()
        random = Random()  # noqa: S311 - whom to call and when to look is no secret
        prober = Prober(
            partial(Dialer, traversal.me, dial=traversal.dial),
            partial(new_name, traversal.me.identity.peer_id),
            checkpoint.traits.hidden_size,
        )
        proofs = Proofs(prober, random)
        self._automatic = Automatic(directory, checkpoint, key, numeric_class, every_s, random, proofs)

    async def run(self, loaded: Loaded | None) -> None:
        """Serve one span after the other until asked to stop; then withdraw."""
        try:
            await self._run(loaded)
        finally:
            await self._automatic.close()

    async def _run(self, loaded: Loaded | None) -> None:
        if loaded is None:
            loaded = await self._load(await self._automatic.first(self._length, self._claims.make))
        try:
            while loaded is not None and (goal := await self._serve(loaded)) is not None:
                before, loaded = loaded.span.blocks, None  # two spans may not fit into memory
                loaded = await self._or_stopped(self._load(goal, before))
        except* ComputeFailed:
            await self._withdraw()
            raise
        await self._withdraw()

    async def _withdraw(self) -> None:
        try:
            async with asyncio.timeout(5.0):  # then the announcement expires by itself
                await self._claims.directory.withdraw()
        except (TimeoutError, NetworkError) as error:
            _log.warning("not withdrawn; the announcement expires by itself", why=str(error))

    async def _serve(self, loaded: Loaded) -> Blocks | None:
        """Host one span: its whole life, from the first connection to the drain. Returns whereto to move, if at all."""
        gc.freeze()  # the present objects stay: a full collection would stop all sessions for half a second
        keep_free_memory()
        options = replace(self._claims.options, cache_tokens=loaded.pool_tokens, prices=loaded.prices)
        server = Server(self._loader.checkpoint, loaded.span, self._traversal, options)
        await server.start()
        goal = None
        try:
            announcer = Announcer(self._claims.directory, lambda state: self._reach.applied(server.announcement(state)))
            self._reach.on_change = announcer.change
            async with answering(self._metrics, lambda: metrics_of(server)), asyncio.TaskGroup() as group:
                life = group.create_task(self._live(announcer, server, loaded.rounded))
                watching = group.create_task(server.watch())
                warning = group.create_task(self._warn(server))
                goal = await self._leave(server, announcer)
                life.cancel()
                watching.cancel()
                warning.cancel()
            if goal is not None:
                await self._claims.withdraw(loaded.span.blocks)
        finally:
            self._reach.on_change = lambda: None  # the announcer leads to the span, for which there is soon no room
            await server.stop(moving=goal is not None)
        return goal

    async def _live(self, announcer: Announcer, server: Server, rounded: WeightCache | None) -> None:
        """Go online as soon as somebody can reach this server, and stay there. rounded: is written meanwhile."""
        reach = self._reach
        while not await reach.find(announcer.attempt):
            await reach.news()
        announcer.state = "online"
        while await announcer.attempt() is None:
            await announcer.due()
        self._tell(server)
        await server.measure()
        announcer.change()
        async with asyncio.TaskGroup() as group:
            group.create_task(server.round_trips.run(announcer.directory, server.announcement("online")))
            group.create_task(reach.run(lambda: announcer.directory.latest))
            group.create_task(written(rounded))
            await announcer.run()

    def _tell(self, server: Server) -> None:
        """Say that this server is online: to the log, then to the ready file, whose readers may look into the log."""
        checkpoint, node, span = self._loader.checkpoint, self._node, server.span
        _log.info(
            "online",
            blocks=str(span.blocks),
            model=checkpoint.model,
            numeric_class=str(span.numeric_class),
            weights_mb=span.weight_bytes >> 20,
            cache_tokens=server.pool.capacity,
            address=server.data_address,
            reached=self._reach.text,
        )
        self._ready(
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

    async def _warn(self, server: Server) -> None:
        """Say once that the swarm serves other files under this name; with --root they were chosen."""
        if not self._root_is_pinned:
            self._root_is_pinned = True
            checkpoint, dialer = self._loader.checkpoint, server.handler.links.dialer
            await Namesakes(self._claims.directory, checkpoint, dialer).warn()

    async def _leave(self, server: Server, announcer: Announcer) -> Blocks | None:
        """Wait until this server is to leave its span, and let its sessions move. Returns whereto, or None: to stop.

        A session that no other server can take over keeps this one where it is, unless it is to stop.
        """
        within_s = self._drain_timeout_s
        while True:
            goal = await self._or_stopped(self._goal(server.span.blocks))
            _log.info("leaving", sessions=len(server.handler.sessions), within_s=within_s, moving_to=goal and str(goal))
            if goal is not None:
                try:
                    await self._claims.make(goal)
                except NetworkError as error:
                    _log.warning("stays: the directory cannot be reached", why=str(error))
                    continue
            announcer.change("draining")
            await server.handler.drain(within_s)
            if goal is None or self._stop.asked:
                return None
            if not server.handler.sessions:
                return goal
            _log.warning("stays: it has sessions that no other server can take", blocks=str(server.span.blocks))
            server.handler.admission.draining = False
            announcer.change("online")
            await self._claims.withdraw(goal)

    async def _or_stopped(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of some work, or None as soon as this server is asked to stop."""
        async with asyncio.TaskGroup() as group:
            stopped, working = group.create_task(self._stop.wait()), group.create_task(work)
            await asyncio.wait((stopped, working), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            working.cancel()
        return None if self._stop.asked else working.result()

    async def _goal(self, blocks: Blocks) -> Blocks:
        """Wait until this server is needed elsewhere, and fetch that span while it serves. Returns the span."""
        while True:
            goal = await self._automatic.goal()
            _log.info("needed elsewhere", blocks=str(blocks), goal=str(goal))
            try:
                await self._loader.fetch(goal)
            except SwarmError as error:
                _log.warning("cannot move: stays where it is", goal=str(goal), why=str(error))
                continue
            return goal

    async def _load(self, blocks: Blocks, otherwise: Blocks | None = None) -> Loaded:
        """Load a span while its claim is kept alive; where that fails, the one that was here before."""
        claims = Announcer(self._claims.directory, lambda _: self._claims.of(blocks))
        async with asyncio.TaskGroup() as group:
            announcing = group.create_task(claims.run())
            try:
                return await self._loader.load(blocks)
            except SwarmError as error:
                if otherwise is None:
                    raise
                _log.error("did not load; back to the blocks before", blocks=str(blocks), why=str(error))
            finally:
                announcing.cancel()
        await self._claims.withdraw(blocks)
        return await self._load(otherwise)
