"""Which announced servers are there: they have proven it to this one, by a handshake at an address of their record.

A record costs nothing, so its claims count for little until then (`swarm.server.placement.holders_of`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from swarm.dht.records import Announcement
from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote


@dataclass(frozen=True, slots=True)
class ProofLimits:
    """How many servers are called, and how long an answer counts."""

    at_once_max: int = limit(8, "calls", "to other servers at one time; more wait")
    calls_max: int = limit(64, "calls", "of one look; the other servers stay unproven until the next one")
    look_s: float = limit(10.0, "s", "for all calls of a look; a server not reached by then stays unproven")
    peer_timeout_s: float = limit(5.0, "s", "a server that has proven nothing by then is silent")
    proven_s: float = limit(3600.0, "s", "that a proof counts")
    silent_s: float = limit(600.0, "s", "that a silent server is left alone")
    joining_s: float = limit(1800.0, "s", "a server that joins for longer is silent: it has no address to call")


class Proofs:
    """What one server knows of the others. Lives in the event loop."""

    def __init__(self, dialer: Dialer, random: Random, limits: ProofLimits = ProofLimits()) -> None:
        self._dialer, self._random, self._limits = dialer, random, limits
        self._proven_until: dict[str, float] = {}
        self._silent_until: dict[str, float] = {}
        self._joining_since: dict[str, float] = {}

    async def look(self, servers: Iterable[Announcement]) -> Mapping[str, bool]:
        """Call some of those that have not been called lately, at random.

        Returns by public key whether a server has proven to be there, False where it was silent; without the others.
        """
        now = asyncio.get_running_loop().time()
        self._proven_until = {key: until for key, until in self._proven_until.items() if until > now}
        self._silent_until = {key: until for key, until in self._silent_until.items() if until > now}
        there = {server.public_key: server for server in servers}
        joining = {key for key, server in there.items() if server.state == "joining"}
        self._joining_since = {key: self._joining_since.get(key, now) for key in joining}
        unknown = [
            server
            for key, server in there.items()
            if key not in self._proven_until.keys() | self._silent_until | joining
        ]
        chosen = self._random.sample(unknown, min(len(unknown), self._limits.calls_max))
        turns = asyncio.Semaphore(self._limits.at_once_max)
        calls = [asyncio.create_task(self._call(server, turns)) for server in chosen]
        if calls:
            _, late = await asyncio.wait(calls, timeout=self._limits.look_s)
            for call in late:
                call.cancel()
        waits = {key for key, since in self._joining_since.items() if now - since > self._limits.joining_s}
        return dict.fromkeys(there.keys() & self._proven_until, True) | dict.fromkeys(
            there.keys() & (self._silent_until.keys() | waits), False
        )

    async def close(self) -> None:
        """End the channels of the calls."""
        await self._dialer.close()

    async def _call(self, server: Announcement, turns: asyncio.Semaphore) -> None:
        async with turns:
            answered = await answers(self._dialer, server, self._limits.peer_timeout_s)
        now = asyncio.get_running_loop().time()
        if answered:
            self._proven_until[server.public_key] = now + self._limits.proven_s
        else:
            self._silent_until[server.public_key] = now + self._limits.silent_s


async def answers(dialer: Dialer, server: Announcement, timeout_s: float) -> bool:
    """Return whether a server proves its identity at one of its addresses within so many seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            remote = Remote(server.peer_id, bytes.fromhex(server.channel_key))
            dialer.release(await dialer.connect(remote, server.ways))
    except (NetworkError, TimeoutError):
        return False
    return True
