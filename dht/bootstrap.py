"""A DHT node for others to join through, which also dials servers back for them."""

import os
import time
from collections.abc import Callable

import structlog

from swarm.commands import Ready, Stop
from swarm.dht.dialback import dialling_as, serve_dial_back
from swarm.dht.node import NodeConfig, open_node
from swarm.identity import Identity
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey

_log = structlog.get_logger("swarm.bootstrap")


async def bootstrap(config: NodeConfig, identity: Identity, ready: Callable[[Ready], None], stop: Stop) -> None:
    """Serve until asked to stop."""
    me = Endpoint(identity, ChannelKey(), config.network, config.access)
    async with open_node(config, clock=time.time) as node:
        await serve_dial_back(node, dialling_as(me))
        ready(Ready(peer_id=node.peer_id, addresses=node.addresses, pid=os.getpid()))
        _log.info("ready", peer_id=node.peer_id, addresses=list(node.addresses), network=me.network)
        await stop.wait()
        _log.info("stopping")
