"""A node and the others of its swarm on the same network: it tells them where it is, and calls on those it hears.

    async with open_node(config, clock=time.time) as node, nearby(node, config, lan=True) as here:
        here.root = checkpoint.root

Two first nodes that start at the same moment hear each other, and one swarm comes of both (`SwarmNode.meet`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import IPv4Interface, ip_address

import structlog

from swarm.dht.node import NodeConfig, SwarmNode
from swarm.errors import SwarmError
from swarm.groups import ungrouped
from swarm.net.lan import Hint, LanLimits, Sought, Watch, announced, networks, told, watching

_log = structlog.get_logger("swarm.lan")


class Nearby:
    """One node's part in it. Made by `nearby`. root: of the model that it serves, once that is known."""

    def __init__(self, node: SwarmNode, config: NodeConfig, limits: LanLimits) -> None:
        self.root = ""
        self.looked = asyncio.Event()  # for the first time
        self._node, self._config, self._limits = node, config, limits
        self._sought = Sought.of(config.network, config.access, node.peer_id)

    async def run(self) -> None:
        """Tell and listen until cancelled, on the networks that this host has at the time."""
        has_warned = False
        while True:
            where, again_s = self._networks(), None
            try:
                if where:
                    await self._on(where)
            except OSError as error:
                if not has_warned:
                    _log.warning("others on this network cannot find this node by themselves yet", why=str(error))
                has_warned, again_s = True, self._limits.again_s
            self.looked.set()
            await self._stay(where, again_s)

    async def _stay(self, where: Sequence[IPv4Interface], at_most_s: float | None) -> None:
        """Wait while this host has these networks."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while self._networks() == where:  # noqa: ASYNC110 - nothing wakes it
                    await asyncio.sleep(self._limits.poll_s)

    async def _on(self, where: Sequence[IPv4Interface]) -> None:
        """Tell and listen on these networks, as long as this host has them. Raises OSError."""
        hint = Hint(network=self._sought.tag, peer=self._node.peer_id, root=self.root[:16])
        async with AsyncExitStack() as stack:
            announcement = await stack.enter_async_context(announced(hint, self._node.port, where))
            watch = await stack.enter_async_context(watching(self._sought, where, self._limits))
            if not self.looked.is_set():
                await self._look(watch)
            while self._networks() == where:
                if await watch.news(self._limits.poll_s):
                    await self._meet(watch.peers)
                await announcement.change(self.root)

    async def _look(self, watch: Watch) -> None:
        """Look around for the first time. A node without initial peers joins those that it finds, or is the first."""
        if not self._config.initial_peers:
            if found := await watch.first(self._limits.server_s):
                _log.info(told(found))
                await self._meet(found)
            else:
                _log.info("first on this network; others on it find this server by themselves")
        self.looked.set()

    async def _meet(self, peers: Sequence[str]) -> None:
        try:
            await self._node.meet(peers)
        except SwarmError as error:
            _log.warning("cannot join others on this network", why=str(error))

    def _networks(self) -> tuple[IPv4Interface, ...]:
        """Return the networks from which this node can be reached."""
        assert self._config.p2p.listen is not None
        host = self._config.p2p.listen[0]
        try:
            listening = ip_address(host)
        except ValueError:
            return ()
        return tuple(each for each in networks() if listening.is_unspecified or listening == each.ip)


@asynccontextmanager
async def nearby(node: SwarmNode, config: NodeConfig, *, lan: bool) -> AsyncIterator[Nearby]:
    """Find others, and be found, on this host's networks while the block runs. lan: whether.

    The block of a node without initial peers begins when it has looked around once.
    """
    limits = LanLimits()
    here = Nearby(node, config, limits)
    if not lan:
        yield here
        return
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            life = group.create_task(here.run())
            looking = group.create_task(here.looked.wait())
            await asyncio.wait((looking,), timeout=limits.server_s + limits.meet_s)
            looking.cancel()
            try:
                yield here
            finally:
                life.cancel()
