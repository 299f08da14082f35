"""Many peers in one process, each on a host of its own, for `nat.py`: moored ones.

A socket belongs to the network in which it was made. So the process enters a host's network, makes a socket, and uses
it from wherever it is then.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from nat_peers import NETWORK, Commands, Known, record_of

from swarm.activations import Activations
from swarm.errors import NetworkError
from swarm.identity import Identity
from swarm.net.carriers.tcp import dial_on
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint
from swarm.net.gate import PROGRESS, Toll
from swarm.net.noise import ChannelKey
from swarm.protocol.meeting import Moor, Moored
from swarm.protocol.messages import AnyMessage
from tests.support import warm

PING_S = 3.0  # as often as hidden peers ping
AT_ONCE = 8  # handshakes
ANSWER_S = 10.0


def socket_on(path: str) -> socket.socket:
    """Return a new socket of the host with this network."""
    warm.enter(path)
    made = socket.socket()
    made.setblocking(False)
    return made


async def connect(path: str, anchor: Known) -> tuple[socket.socket, Endpoint]:
    """Connect to an anchor from a host. Returns the connection, and a new identity. Raises OSError."""
    sock = socket_on(path)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (anchor.via.at.host, anchor.via.at.port))
    except BaseException:
        sock.close()
        raise
    return sock, Endpoint(Identity.generate(), ChannelKey(), NETWORK, public=True)


class Crowd(Commands):
    """Moored peers."""

    def __init__(self) -> None:
        self._lines: dict[Channel, asyncio.Task[None]] = {}
        self._moored = asyncio.Semaphore(0)  # counts the answers
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def moor(self, paths: Sequence[str], anchor: Sequence[str], count: int) -> int:
        """Moor so many peers, spread over the hosts, and wait until they are. Returns how many."""
        at = Known(*anchor)
        await asyncio.gather(*(self._moor(paths[i % len(paths)], at) for i in range(count)))
        async with asyncio.timeout(ANSWER_S):
            for _ in range(count):
                await self._moored.acquire()
        return count

    async def leave(self) -> None:
        """End all moorings."""
        for line, pinging in self._lines.items():
            pinging.cancel()
            line.close()
        self._lines = {}

    async def _moor(self, path: str, anchor: Known) -> None:
        while True:
            with suppress(OSError, NetworkError):
                async with self._turns:
                    sock, me = await connect(path, anchor)
                    line = await dial_on(sock, "direct", anchor.remote, me, self._heard)
                    line.send(Moor(record=record_of(me.identity, me.key).hex()))
                self._lines[line] = asyncio.create_task(_ping(line))
                return

    def _heard(self, channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        del channel, activations
        if isinstance(message, Moored):
            self._moored.release()
        return PROGRESS


async def _ping(line: Channel) -> None:
    with suppress(NetworkError):
        while True:
            await asyncio.sleep(PING_S)
            await line.ping()
