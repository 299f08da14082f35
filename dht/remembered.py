"""Notes the nodes that answer in a `PeerMemory`, from time to time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.dht.node import SwarmNode
from swarm.dht.peermemory import PeerMemory
from swarm.errors import Unreachable
from swarm.groups import ungrouped


async def answering(node: SwarmNode) -> tuple[str, ...]:
    """Return the multiaddrs of the nodes that answer this one's calls and are connected to it."""
    if (member := node.member) is None:
        return ()
    try:
        connected = await member.daemon.peers()
    except Unreachable:
        return ()
    known = {str(peer.to_base58()) for peer in member.protocol.routing_table.answering()}
    return tuple(f"{address}/p2p/{peer}" for peer, address in connected.items() if peer in known)


@asynccontextmanager
async def remembering(node: SwarmNode, memory: PeerMemory) -> AsyncIterator[None]:
    """Note the nodes that answer, from time to time while the block runs."""

    async def run() -> None:
        await asyncio.sleep(memory.limits.first_s)
        while True:
            if answered := await answering(node):
                await asyncio.to_thread(memory.note, answered)
            await asyncio.sleep(memory.limits.every_s)

    with ungrouped():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run())
            try:
                yield
            finally:
                task.cancel()
