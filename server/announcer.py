"""Keeps a server's announcement alive, and true."""

import asyncio
from collections.abc import Callable
from typing import Literal

import structlog

from swarm.dht.directory import Directory
from swarm.dht.records import RECORD, Announcement, SignedAnnouncement
from swarm.errors import NetworkError

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
        """Announce now. Returns the signed record. Raises NetworkError."""
        published = await self.directory.announce(self._current(self.state))
        if self._alone != (published.replicas == 0):
            self._alone = not self._alone
            if self._alone:
                _log.warning("no other node takes this server's announcement: no client can find it until one does")
            else:
                _log.info("announced to others again", replicas=published.replicas)
        return published.signed

    async def run(self) -> None:
        """Announce for ever; a swarm that cannot be reached just now is tried again."""
        while True:
            self._changed.clear()
            try:
                await self.announce()
            except NetworkError as error:
                _log.warning("not announced", why=str(error))
            try:
                async with asyncio.timeout(RECORD.refresh_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def change(self, state: State | None = None) -> None:
        """Announce soon, in a new state if one is given."""
        self.state = state or self.state
        self._changed.set()
