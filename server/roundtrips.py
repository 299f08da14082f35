"""Round trips to the peers that may come before or after this server in a route: measured, so that routes can be short.

Once a minute, over channels that sessions between the two would use as well.
"""

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import structlog

from swarm.activations import tier_of
from swarm.blocks import Blocks
from swarm.dht.directory import Directory
from swarm.dht.records import RECORD, Announcement, Rtt, SignedAnnouncement
from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class RoundTripLimits:
    """How often round trips are measured, and how many."""

    every_s: float = limit(60.0, "s", "all chosen peers are measured this often")
    large: int = limit(128, "servers", "of a model; where there are more, the directory is read rarely")
    reread_s: float = limit(600.0, "s", "so often; else before each measurement")
    at_once_max: int = limit(4, "peers", "pinged at one time; more wait")
    pings: int = limit(3, "pings", "of each peer; the quickest counts, because a busy machine only adds")
    peer_timeout_s: float = limit(5.0, "s", "for a connection and all its pings; then the peer counts as silent")
    silent_s: float = limit(600.0, "s", "that a silent peer is left alone")
    nearby_kept: int = limit(RECORD.rtts_max * 3 // 4, "peers", "of those measured before; the others are drawn anew")


def choose_peers(
    servers: Sequence[SignedAnnouncement],
    me: Announcement,
    measured: dict[str, float],
    silent: Collection[str],
    random: Random,
    limits: RoundTripLimits = RoundTripLimits(),
) -> list[SignedAnnouncement]:
    """Choose up to RECORD.rtts_max peers to be measured, as many before this span as after it where there are enough.

    Those first whose span begins where this one ends, or ends where this one begins; then those that hold the next
    block or the one before. Of several, those that were nearest, and some others, so that all have their turn.
    measured: round trips in ms, and silent: peers that did not answer, both by public key.
    """
    chosen: dict[str, SignedAnnouncement] = {}
    sides = [_by_rank(servers, me, silent, after=after) for after in (True, False)]
    for rank in (0, 1):
        queues = [_near_and_others(side[rank], measured, random, limits.nearby_kept) for side in sides]
        for place in range(max(map(len, queues))):
            for queue in queues:
                if place < len(queue) and len(chosen) < RECORD.rtts_max:
                    chosen.setdefault(queue[place].announcement.public_key, queue[place])
    return list(chosen.values())


class RoundTrips:
    """The measurements of one server. Lives in the event loop."""

    def __init__(
        self, dialer: Dialer, random: Random | None = None, limits: RoundTripLimits = RoundTripLimits()
    ) -> None:
        self._limits = limits
        self.latest: tuple[Rtt, ...] = ()
        self._dialer = dialer
        self._random = random or Random()  # noqa: S311 - the choice of peers is no secret
        self._measured: dict[str, float] = {}
        self._silent_until: dict[str, float] = {}
        self._salt = self._random.randbytes(8)  # one for good: the measured peers stay in the sample

    async def run(self, directory: Directory, me: Announcement) -> None:
        """Measure every minute, for ever. me: this server's own announcement, for its model and its span."""
        servers: Sequence[SignedAnnouncement] = ()
        time, read_at = asyncio.get_running_loop().time, -math.inf
        while True:
            try:
                if len(servers) <= self._limits.large or time() - read_at >= self._limits.reread_s:
                    servers, read_at = await directory.servers(me.root, me.n_blocks, self._salt), time()
                await self.measure(servers, me)
            except NetworkError as error:
                _log.info("round trips not measured", why=str(error))
            await asyncio.sleep(self._limits.every_s)

    async def measure(self, servers: Sequence[SignedAnnouncement], me: Announcement) -> None:
        """Measure those of these servers that matter to this one. `latest` has the results."""
        now = asyncio.get_running_loop().time()
        self._silent_until = {key: until for key, until in self._silent_until.items() if until > now}
        chosen = choose_peers(servers, me, self._measured, self._silent_until, self._random, self._limits)
        turns = asyncio.Semaphore(self._limits.at_once_max)
        found = await asyncio.gather(*(self._round_trip_ms(signed.announcement, turns) for signed in chosen))
        keys = [signed.announcement.public_key for signed in chosen]
        self._measured = {key: ms for key, ms in zip(keys, found, strict=True) if ms is not None}
        self._silent_until |= {
            key: now + self._limits.silent_s for key, ms in zip(keys, found, strict=True) if ms is None
        }
        self.latest = tuple(Rtt(key[:16], round(ms, 1)) for key, ms in self._measured.items())

    async def _round_trip_ms(self, peer: Announcement, turns: asyncio.Semaphore) -> float | None:
        """Return the quickest of a few pings, or None where there is no answer."""
        async with turns:
            try:
                async with asyncio.timeout(self._limits.peer_timeout_s):
                    remote = Remote(peer.peer_id, bytes.fromhex(peer.channel_key))
                    channel = await self._dialer.connect(remote, peer.ways)
                    try:
                        return 1000 * min([await channel.ping() for _ in range(self._limits.pings)])
                    finally:
                        self._dialer.release(channel)
            except (NetworkError, TimeoutError):
                return None


def _by_rank(
    servers: Sequence[SignedAnnouncement], me: Announcement, silent: Collection[str], *, after: bool
) -> tuple[list[SignedAnnouncement], list[SignedAnnouncement]]:
    """Return the peers right next to our span on one side, and the others that hold the block there."""
    mine = me.span
    edge, block = (mine.stop, mine.stop) if after else (mine.start, mine.start - 1)
    tier = tier_of(me.numeric_class)
    ranks: tuple[list[SignedAnnouncement], list[SignedAnnouncement]] = ([], [])
    for signed in servers:
        a = signed.announcement
        usable = a.state == "online" and tier_of(a.numeric_class) == tier and a.public_key != me.public_key
        if usable and a.public_key not in silent and block in a.span:
            ranks[0 if edge == _near_edge(a.span, after=after) else 1].append(signed)
    return ranks


def _near_edge(span: Blocks, *, after: bool) -> int:
    return span.start if after else span.stop


def _near_and_others(
    peers: list[SignedAnnouncement], measured: dict[str, float], random: Random, kept: int
) -> list[SignedAnnouncement]:
    known = sorted((s for s in peers if s.announcement.public_key in measured), key=lambda s: _ms(s, measured))
    others = [s for s in peers if s.announcement.public_key not in measured]
    random.shuffle(others)
    return [*known[: kept // 2], *others, *known[kept // 2 :]]


def _ms(signed: SignedAnnouncement, measured: dict[str, float]) -> float:
    return measured[signed.announcement.public_key]
