"""Warns a server's operator of other files that the swarm serves under the same name.

A model's root follows from its files: those of the directory, or of the hub's repository, or the one that `--root`
names. Records are claims that cost nothing, so none of them changes a root or keeps a server from starting. Roots are
compared only with those of servers that prove their identity in a handshake, and the comparison ends in a warning.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from swarm.dht.directory import Directory
from swarm.dht.records import Announcement
from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.model.checkpoint import Checkpoint
from swarm.net.dialer import Dialer
from swarm.server.proofs import answers

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class NamesakeLimits:
    """How much a server that starts looks at other roots under its model's name."""

    roots_max: int = limit(8, "roots", "under one name that are looked at; the rest is left out")
    servers_max: int = limit(3, "servers", "of each root that are called; the rest is left out")
    peer_timeout_s: float = limit(5.0, "s", "a server that has proven nothing by then does not count")


class Namesakes:
    """Looks for servers of other files under one model's name."""

    def __init__(
        self,
        directory: Directory,
        checkpoint: Checkpoint,
        dialer: Dialer,
        limits: NamesakeLimits = NamesakeLimits(),
    ) -> None:
        self._directory, self._checkpoint, self._dialer, self._limits = directory, checkpoint, dialer, limits

    async def warn(self) -> None:
        """Log a warning for each other root whose servers answer. Raises nothing that the network causes."""
        try:
            for root in await self.answering():
                _log.warning(
                    "servers that answer announce other files under this name; get the same files to join them",
                    model=self._checkpoint.public_name,
                    root=self._checkpoint.root,
                    theirs=root,
                )
        except NetworkError as error:
            _log.info("other roots of this name are not known", why=str(error))

    async def answering(self) -> tuple[str, ...]:
        """Return the other roots under the model's name that are announced by a server that answers.

        Raises NetworkError.
        """
        found = []
        entries = [
            entry
            for entry in await self._directory.models(self._checkpoint.public_name)
            if entry.root != self._checkpoint.root
        ]
        for entry in entries[: self._limits.roots_max]:
            servers = await self._directory.servers(entry.root, entry.n_blocks)
            if await self._any_answers([signed.announcement for signed in servers[: self._limits.servers_max]]):
                found.append(entry.root)
        return tuple(found)

    async def _any_answers(self, servers: Sequence[Announcement]) -> bool:
        calls = (answers(self._dialer, server, self._limits.peer_timeout_s) for server in servers)
        return any(await asyncio.gather(*calls))
