"""Keeps a server's announcement alive, and true."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import structlog

from swarm.dht.directory import Directory
from swarm.dht.records import RECORD, Announcement, SignedAnnouncement, canonical_json
from swarm.errors import NetworkError, RecordError
from swarm.identity import SIGNATURE_BYTES

State = Literal["joining", "online", "draining"]
_log = structlog.get_logger("swarm.server")


class Announcer:
    """Announces every 20 s, and at once when something important changes."""

    def __init__(self, directory: Directory, current: Callable[[State], Announcement]) -> None:
        """current: the announcement as it is true now, in this state."""
        self.state: State = "joining"
        self.directory = directory
        self._current = current
        self._changed = asyncio.Event()
        self._alone = False

    async def announce(self) -> SignedAnnouncement:
        """Announce now. Returns the signed record. Raises NetworkError, or RecordError where no record can be made."""
        published = await self.directory.announce(fitting(self._current(self.state)))
        if self._alone != (published.replicas == 0):
            self._alone = not self._alone
            if self._alone:
                _log.warning("no other node takes this server's announcement: no client can find it until one does")
            else:
                _log.info("announced to others again", replicas=published.replicas)
        return published.signed

    async def attempt(self) -> SignedAnnouncement | None:
        """Announce now. Returns the signed record; None, with a warning, where that fails."""
        self._changed.clear()
        try:
            return await self.announce()
        except (NetworkError, RecordError) as error:
            _log.warning("not announced", why=str(error))
            return None

    async def due(self) -> None:
        """Wait until it is time to announce again, or something has changed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECORD.refresh_s):
                await self._changed.wait()

    async def run(self) -> None:
        """Announce for ever; a swarm that cannot be reached just now is tried again."""
        while True:
            await self.attempt()
            await self.due()

    def change(self, state: State | None = None) -> None:
        """Announce soon, in a new state if one is given."""
        self.state = state or self.state
        self._changed.set()


def fitting(announcement: Announcement) -> Announcement:
    """Return an announcement that fits into a record: the last round trips are left out, as many as have no room."""
    longest = {"sequence": 2**53 - 1, "issued": 1 / 3 + 1e9, "expires": 1 / 3 + 1e9}  # when it is signed
    payload = canonical_json(announcement.model_copy(update=longest).model_dump(mode="json"))
    over = SIGNATURE_BYTES + len(payload) - RECORD.bytes_max
    rtts = list(announcement.rtts)
    while over > 0 and rtts:
        over -= len(canonical_json(rtts.pop())) + 1  # and its comma
    return announcement.model_copy(update={"rtts": tuple(rtts)})
