"""A DHT node's own proof that others can call it: they try its libp2p port, again and again, since networks change."""

import asyncio
from dataclasses import dataclass

import structlog

from swarm.dht.dialback import ask_dial_back
from swarm.dht.node import SwarmNode
from swarm.errors import TooBusy, Unreachable
from swarm.limits import limit
from swarm.net.p2p import port_of

_log = structlog.get_logger("swarm.dht")


@dataclass(frozen=True, slots=True)
class ProofLimits:
    """How often a node has its port tried."""

    look_s: float = limit(300.0, "s", "until a node that others could call is tried again")
    again_s: float = limit(30.0, "s", "the same, for a node that they could not call, or where none could say")


async def prove(node: SwarmNode, host: str = "", limits: ProofLimits = ProofLimits()) -> None:
    """Keep a node without a record a server of the DHT while others can call it, and a client while they cannot.

    host: a literal address beside the one from which its own connections come; "" names none. Runs until cancelled.
    """
    said = False
    while True:
        called, wait_s = await _called(node, host, limits)
        if called:
            await node.promote()
        elif called is not None:
            node.demote()
        if called is False and not said:
            _log.error("other nodes cannot reach this one: forward its port, or pass --announce-address")
        said = called is False
        await asyncio.sleep(wait_s)


async def _called(node: SwarmNode, host: str, limits: ProofLimits) -> tuple[bool | None, float]:
    """Whether others can call this node, and the seconds until it is asked again.

    Yes if no other node can try. None if those that can have no time.
    """
    port = port_of(next(iter(node.addresses), ""))
    try:
        called = (await ask_dial_back(node, None, p2p_port=port, p2p_host=host)).p2p
    except TooBusy:
        return None, limits.again_s
    except Unreachable as error:
        _log.debug("no other node could check that this one can be reached", why=str(error))
        return True, limits.again_s
    return called, limits.look_s if called else limits.again_s
