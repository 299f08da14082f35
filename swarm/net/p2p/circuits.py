"""p2pd's circuits: connections that it relays for strangers, or takes through strangers' relays.

The swarm has anchors of its own. p2pd relays for whoever asks, whatever its arguments say. It removes only handlers
that a program has set. So this side sets one in the place of p2pd's own, and removes it.
"""

import asyncio

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from swarm.errors import P2PFailed


async def end_circuits(p2p: P2P, timeout_s: float) -> None:
    """Have p2pd answer nobody who asks for a circuit, nor name the protocols. Raises P2PFailed."""

    async def refuse(_info: object, _reader: object, writer: asyncio.StreamWriter) -> None:
        writer.close()

    try:
        async with asyncio.timeout(timeout_s):
            for end in ("hop", "stop"):
                await p2p.add_binary_stream_handler(f"/libp2p/circuit/relay/0.2.0/{end}", refuse)
                await p2p.remove_binary_stream_handler(f"/libp2p/circuit/relay/0.2.0/{end}")
    except (TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError) as error:
        raise P2PFailed(f"p2pd goes on relaying: {error!r}") from None
