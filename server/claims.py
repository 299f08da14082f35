"""A server's announcements of spans that are not loaded yet, and withdrawals."""

from dataclasses import dataclass

import structlog

from swarm.activations import NumericClass
from swarm.blocks import Blocks
from swarm.dht.directory import Directory
from swarm.dht.records import Announcement
from swarm.errors import NetworkError
from swarm.model.checkpoint import Checkpoint
from swarm.net.endpoint import Endpoint
from swarm.server.server import ServerOptions, claim

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims spans for one server, so that no other server takes them for missing."""

    directory: Directory
    checkpoint: Checkpoint
    me: Endpoint
    numeric_class: NumericClass
    options: ServerOptions

    def of(self, blocks: Blocks) -> Announcement:
        """Return the announcement of a span that will be here."""
        return claim(self.checkpoint, self.me, blocks, self.numeric_class, self.options)

    async def make(self, blocks: Blocks) -> None:
        """Announce that a span will be here. Raises NetworkError."""
        await self.directory.announce(self.of(blocks))

    async def withdraw(self, blocks: Blocks) -> None:
        """Take back the announcement of a span, if the swarm can be reached."""
        try:
            await self.directory.withdraw(blocks)
        except NetworkError as error:
            _log.warning("not withdrawn; the announcement expires by itself", blocks=str(blocks), why=str(error))
