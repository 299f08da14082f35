"""A DHT node for others to join through, which also dials servers back for them."""

import os
import time
from collections.abc import Callable

import structlog

from swarm.commands import Ready, Stop
from swarm.dht.dialback import dialling_as, serve_dial_back
from swarm.dht.nearby import nearby
from swarm.dht.node import NodeConfig, open_node
from swarm.identity import Identity
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.net.p2p import multiaddr_of
from swarm.net.reach import is_public

_log = structlog.get_logger("swarm.bootstrap")


async def bootstrap(
    config: NodeConfig, identity: Identity, ready: Callable[[Ready], None], stop: Stop, *, lan: bool = True
) -> None:
    """Serve until asked to stop. lan: find others on this host's networks, and be found, unless the swarm is public."""
    assert config.p2p.listen is not None
    ways_in = config.initial_peers or config.p2p.announce or (multiaddr_of(*config.p2p.listen),)
    public = config.access.network_key is None and await is_public(ways_in)
    me = Endpoint(identity, ChannelKey(), config.network, config.access)
    async with open_node(config, clock=time.time) as node, nearby(node, config, lan=lan and not public):
        await serve_dial_back(node, dialling_as(me))
        ready(Ready(peer_id=node.peer_id, addresses=node.addresses, pid=os.getpid()))
        _log.info("ready", peer_id=node.peer_id, addresses=list(node.addresses), network=me.network)
        await stop.wait()
        _log.info("stopping")
