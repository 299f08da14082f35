"""Round trips to the peers that may come before or after this server in a route: measured, so that routes can be short.

Once a minute, over channels that sessions between the two would use as well.
"""

import asyncio
from collections.abc import Collection, Sequence
from random import Random

import structlog

from swarm.blocks import Blocks
from swarm.dht.directory import Directory
from swarm.dht.records import RTTS_MAX, Announcement, Rtt, SignedAnnouncement
from swarm.errors import NetworkError
from swarm.net.address import dialable
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Remote

EVERY_S = 60.0
AT_ONCE_MAX = 4  # peers pinged at one time
PINGS = 3  # of each peer; the quickest counts, since a busy machine only adds
PEER_TIMEOUT_S = 5.0  # for a connection and all its pings
SILENT_S = 600.0  # whoever does not answer is left alone for so long
NEARBY_KEPT = RTTS_MAX * 3 // 4  # of the nearest peers that were measured before; the others are drawn anew

_log = structlog.get_logger("swarm.server")


def choose_peers(
    servers: Sequence[SignedAnnouncement],
    me: Announcement,
    measured: dict[str, float],
    silent: Collection[str],
    random: Random,
) -> list[SignedAnnouncement]:
    """Choose up to RTTS_MAX peers to be measured, as many before this span as after it where there are enough.

    Those first whose span begins where this one ends, or ends where this one begins; then those that hold the next
    block or the one before. Of several, those that were nearest, and some others, so that all have their turn.
    measured: round trips in ms, and silent: who did not answer, both by public key.
    """
    chosen: dict[str, SignedAnnouncement] = {}
    sides = [_by_rank(servers, me, silent, after=after) for after in (True, False)]
    for rank in (0, 1):
        queues = [_near_and_others(side[rank], measured, random) for side in sides]
        for place in range(max(map(len, queues))):
            for queue in queues:
                if place < len(queue) and len(chosen) < RTTS_MAX:
                    chosen.setdefault(queue[place].announcement.public_key, queue[place])
    return list(chosen.values())


class RoundTrips:
    """What one server has measured. Lives in the event loop."""

    def __init__(self, dialer: Dialer, random: Random | None = None) -> None:
        self.latest: tuple[Rtt, ...] = ()
        self._dialer = dialer
        self._random = random or Random()  # noqa: S311 - whom to measure is no secret
        self._measured: dict[str, float] = {}
        self._silent_until: dict[str, float] = {}

    async def run(self, directory: Directory, me: Announcement) -> None:
        """Measure every minute, for ever. me: this server's own announcement, for its model and its span."""
        while True:
            try:
                await self.measure(await directory.servers(me.root, me.n_blocks), me)
            except NetworkError as error:
                _log.info("round trips not measured", why=str(error))
            await asyncio.sleep(EVERY_S)

    async def measure(self, servers: Sequence[SignedAnnouncement], me: Announcement) -> None:
        """Measure those of these servers that matter to this one; `latest` has what came of it."""
        now = asyncio.get_running_loop().time()
        self._silent_until = {key: until for key, until in self._silent_until.items() if until > now}
        chosen = choose_peers(servers, me, self._measured, self._silent_until, self._random)
        turns = asyncio.Semaphore(AT_ONCE_MAX)
        found = await asyncio.gather(*(self._round_trip_ms(signed.announcement, turns) for signed in chosen))
        keys = [signed.announcement.public_key for signed in chosen]
        self._measured = {key: ms for key, ms in zip(keys, found, strict=True) if ms is not None}
        self._silent_until |= {key: now + SILENT_S for key, ms in zip(keys, found, strict=True) if ms is None}
        self.latest = tuple(Rtt(key[:16], round(ms, 1)) for key, ms in self._measured.items())

    async def _round_trip_ms(self, peer: Announcement, turns: asyncio.Semaphore) -> float | None:
        """Return the quickest of a few pings, or None where there is no answer."""
        async with turns:
            try:
                async with asyncio.timeout(PEER_TIMEOUT_S):
                    remote = Remote(peer.peer_id, bytes.fromhex(peer.channel_key))
                    channel = await self._dialer.connect(remote, dialable(peer.addresses))
                    try:
                        return 1000 * min([await channel.ping() for _ in range(PINGS)])
                    finally:
                        self._dialer.release(channel)
            except (NetworkError, TimeoutError):
                return None


def _by_rank(
    servers: Sequence[SignedAnnouncement], me: Announcement, silent: Collection[str], *, after: bool
) -> tuple[list[SignedAnnouncement], list[SignedAnnouncement]]:
    """Return who is right next to our span on one side, and who else holds the block there."""
    mine = me.span
    edge, block = (mine.stop, mine.stop) if after else (mine.start, mine.start - 1)
    ranks: tuple[list[SignedAnnouncement], list[SignedAnnouncement]] = ([], [])
    for signed in servers:
        a = signed.announcement
        usable = a.state == "online" and a.numeric_class == me.numeric_class and a.public_key != me.public_key
        if usable and a.public_key not in silent and block in a.span:
            ranks[0 if edge == _near_edge(a.span, after=after) else 1].append(signed)
    return ranks


def _near_edge(span: Blocks, *, after: bool) -> int:
    return span.start if after else span.stop


def _near_and_others(
    peers: list[SignedAnnouncement], measured: dict[str, float], random: Random
) -> list[SignedAnnouncement]:
    known = sorted((s for s in peers if s.announcement.public_key in measured), key=lambda s: _ms(s, measured))
    others = [s for s in peers if s.announcement.public_key not in measured]
    random.shuffle(others)
    return [*known[: NEARBY_KEPT // 2], *others, *known[NEARBY_KEPT // 2 :]]


def _ms(signed: SignedAnnouncement, measured: dict[str, float]) -> float:
    return measured[signed.announcement.public_key]
