"""The proofs of other servers: that they are there and compute, and how fast (`swarm.server.probes`).

A record is free, so its claims count for little until then (`swarm.server.weights`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from swarm.blocks import Blocks
from swarm.dht.records import Announcement
from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote
from swarm.server.probes import Prober


@dataclass(frozen=True, slots=True)
class ProofLimits:
    """How many servers are called and probed, and how long an answer counts."""

    at_once_max: int = limit(8, "calls", "to other servers at one time; more wait")
    calls_max: int = limit(64, "calls", "of one look; the other servers stay unproven until the next one")
    probes_max: int = limit(16, "probes", "of one look, of servers that have answered the call; then no more calls")
    look_s: float = limit(15.0, "s", "for all calls of a look; a server not reached by then stays unproven")
    proven_s: float = limit(7200.0, "s", "that a probe counts")
    silent_s: float = limit(600.0, "s", "that a silent server is left alone")
    joining_s: float = limit(1800.0, "s", "a server that joins for longer is silent: it has no address to call")


@dataclass(frozen=True, slots=True)
class Shown:
    """The proof of one server. power: block-tokens/s, 0 where it was silent. blocks: its span at that time."""

    power: float
    blocks: Blocks
    until: float


def callees(
    spans: Mapping[str, Blocks], shown: Mapping[str, Shown], random: Random, limits: ProofLimits = ProofLimits()
) -> list[str]:
    """Return which servers to call, in this order, until enough have been probed. spans: by public key.

    Unproven servers come in random order. Those that have moved come before them, with half of the probes at most: so
    servers that move on purpose leave some for others.
    """
    unknown = [key for key in spans if key not in shown]
    moved = [key for key, blocks in spans.items() if key in shown and shown[key].power and shown[key].blocks != blocks]
    first = random.sample(moved, min(len(moved), limits.probes_max // 2))
    rest = [*unknown, *(key for key in moved if key not in first)]
    return [*first, *random.sample(rest, len(rest))][: limits.calls_max]


class Proofs:
    """One server's knowledge of the others. Lives in the event loop."""

    def __init__(self, prober: Prober, random: Random, limits: ProofLimits = ProofLimits()) -> None:
        self._prober, self._random, self._limits = prober, random, limits
        self._shown: dict[str, Shown] = {}  # by public key
        self._joining_since: dict[str, float] = {}

    async def look(self, servers: Iterable[Announcement]) -> Mapping[str, float]:
        """Probe some servers without a proof that still counts, at random; before them those that have moved since.

        Returns by public key the block-tokens/s that a server has shown, 0 where it was silent; without the others.
        """
        now = asyncio.get_running_loop().time()
        self._shown = {key: shown for key, shown in self._shown.items() if shown.until > now}
        there = {server.public_key: server for server in servers}
        joining = {key for key, server in there.items() if server.state == "joining"}
        self._joining_since = {key: self._joining_since.get(key, now) for key in joining}
        await self._probe_some({key: server for key, server in there.items() if key not in joining})
        waits = {key for key, since in self._joining_since.items() if now - since > self._limits.joining_s}
        return {key: self._shown[key].power for key in there.keys() & self._shown} | dict.fromkeys(waits, 0.0)

    async def close(self) -> None:
        """End the channels of the calls."""
        await self._prober.close()

    async def _probe_some(self, servers: Mapping[str, Announcement]) -> None:
        """Probe at most so many of these, and wait for the answers."""
        spans = {key: server.span for key, server in servers.items()}
        chosen = [servers[key] for key in callees(spans, self._shown, self._random, self._limits)]
        turns, probes = asyncio.Semaphore(self._limits.at_once_max), asyncio.Semaphore(self._limits.probes_max)
        calls = [asyncio.create_task(self._call(server, turns, probes)) for server in chosen]
        try:
            if calls:
                await asyncio.wait(calls, timeout=self._limits.look_s)
        finally:  # also if the look is cancelled
            late = [call for call in calls if not call.done()]
            for call in late:
                call.cancel()
            await asyncio.gather(*late, return_exceptions=True)  # each closes its session

    async def _call(self, server: Announcement, turns: asyncio.Semaphore, probes: asyncio.Semaphore) -> None:
        """Call one server and probe it. probes: those that the look has left; none is given back."""
        async with turns:
            if probes.locked():
                return
            channel = await self._prober.connect(server)
            if channel is None:
                self._note(server, 0.0)
                return
            try:
                if not probes.locked():
                    await probes.acquire()
                    self._note(server, await self._prober.probe(channel, server))
            finally:
                self._prober.release(channel)

    def _note(self, server: Announcement, power: float) -> None:
        now = asyncio.get_running_loop().time()
        until = now + (self._limits.proven_s if power else self._limits.silent_s)
        self._shown[server.public_key] = Shown(power, server.span, until)


async def answers(dialer: Dialer, server: Announcement, timeout_s: float) -> bool:
    """Return whether a server proves its identity at one of its addresses within so many seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            remote = Remote(server.peer_id, bytes.fromhex(server.channel_key))
            dialer.release(await dialer.connect(remote, server.ways))
    except (NetworkError, TimeoutError):
        return False
    return True
