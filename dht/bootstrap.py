"""A DHT node for others to join through, which also dials servers back for them, and is an anchor for hidden ones."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from swarm.activations import Activations
from swarm.commands import Ready, Stop
from swarm.dht.dialback import Offer
from swarm.dht.helper import serve_dial_back
from swarm.dht.nearby import nearby
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.peermemory import memory_of
from swarm.dht.proof import prove
from swarm.dht.remembered import remembering
from swarm.errors import AddressInUse, InvalidMessage
from swarm.identity import Identity
from swarm.net.address import dialable
from swarm.net.anchor import AnchorLimits
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint
from swarm.net.gate import Toll
from swarm.net.listener import Listener
from swarm.net.noise import ChannelKey
from swarm.net.p2p import host_of, multiaddr_of
from swarm.net.ports import Port
from swarm.net.reach import is_public
from swarm.net.traversal import ListeningTraversal, TraversalLimits
from swarm.protocol.messages import AnyMessage

_log = structlog.get_logger("swarm.bootstrap")


@dataclass(frozen=True, slots=True)
class AnchorOptions:
    """Where an anchor listens, and what it announces. announce: hosts; empty takes those of the DHT's addresses.

    exactly: a port that is taken is an error; else a free one is taken instead.
    """

    listen: tuple[str, Port]
    exactly: bool
    announce: tuple[str, ...] = ()
    limits: AnchorLimits = field(default_factory=AnchorLimits)


async def bootstrap(
    config: NodeConfig,
    identity: Identity,
    anchor: AnchorOptions | None,
    ready: Callable[[Ready], None],
    stop: Stop,
    *,
    lan: bool = True,
) -> None:
    """Serve until asked to stop. anchor: None to be none.

    lan: find others on this host's networks, and be found, unless the swarm is public.
    """
    host, _ = config.p2p.listen or ("127.0.0.1", 0)
    ways_in = config.initial_peers or config.p2p.announce or (multiaddr_of(host, 0),)
    public = config.access.network_key is None and await is_public(ways_in)
    me = Endpoint(identity, ChannelKey(), config.network, config.access, public=public)
    listener = _listener(me, anchor)
    memory = memory_of(config.network, config.access, public=public)
    config = replace(config, met=memory.addresses())
    async with (
        open_node(config, clock=time.time) as node,
        remembering(node, memory),
        nearby(node, config, lan=lan and not public),
    ):
        limits = anchor.limits if anchor is not None else AnchorLimits()
        traversal = ListeningTraversal(me, listener, node.gate.own_record, lambda: b"", TraversalLimits(anchor=limits))
        if anchor is not None:
            await listener.start(traversal.before(_refuse))
        offer = _offer(me, listener, anchor, node) if anchor is not None else None
        for at in dialable(offer.addresses if offer is not None else ())[:1]:  # its own hidden peers dial it, too
            traversal.caller.host, traversal.caller.port = at.host, at.port
        await serve_dial_back(node, me, traversal.dial, lambda: offer)
        proving = asyncio.create_task(prove(node, next(filter(None, map(host_of, config.p2p.announce)), "")))
        try:
            _log.info(
                "ready",
                peer_id=node.peer_id,
                addresses=list(node.addresses),
                network=me.network,
                anchor=list(offer.addresses) if offer is not None else None,
                identity=str(config.p2p.identity),
            )
            ready(Ready(peer_id=node.peer_id, addresses=node.addresses, pid=os.getpid()))
            await stop.wait()
            _log.info("stopping")
        finally:
            proving.cancel()
            await traversal.close()
            await listener.close()


def _listener(me: Endpoint, anchor: AnchorOptions | None) -> Listener:
    host, port = anchor.listen if anchor is not None else ("127.0.0.1", 0)
    try:
        return Listener(me, host, port)
    except AddressInUse:
        if anchor is not None and anchor.exactly:
            raise
        return Listener(me, host, 0)


def _offer(me: Endpoint, listener: Listener, anchor: AnchorOptions, node: SwarmNode) -> Offer:
    """Return where hidden peers may moor: at the hosts of the DHT's addresses unless others are named."""
    hosts = anchor.announce or tuple(parts[2] for address in node.addresses if len(parts := address.split("/")) > 2)
    port = listener.address.port
    addresses = dict.fromkeys(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)
    key = me.identity.public_key.hex()
    return Offer(public_key=key, channel_key=me.key.public.hex(), addresses=tuple(addresses)[:4])


def _refuse(channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
    del channel, activations
    raise InvalidMessage(message.kind, "this node serves no blocks")
