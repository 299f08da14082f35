"""The directory as one client read it last: one look-up at a time, whose first answers can be used before the last."""

import asyncio
from collections.abc import Sequence

from swarm.dht.directory import Directory, Survey
from swarm.dht.validator import Entry


class Surveys:
    """The latest survey of one model. Runs in the client's event loop."""

    def __init__(self, directory: Directory, root: str, n_blocks: int) -> None:
        self.latest = Survey((), ())
        self._read_at = float("-inf")
        self._directory, self._root, self._n_blocks = directory, root, n_blocks
        self._reading: asyncio.Task[Survey] | None = None
        self._heard: dict[bytes, Entry] = {}  # by the look-up that is under way
        self._n_merged = 0  # of them, in the latest survey

    @property
    def age_s(self) -> float:
        """How long ago the directory was read; infinite where it never was."""
        return asyncio.get_running_loop().time() - self._read_at

    @property
    def looking(self) -> "asyncio.Task[Survey] | None":
        """The look-up that is under way."""
        return None if self._reading is None or self._reading.done() else self._reading

    @property
    def n_heard(self) -> int:
        """How many records the look-up that is under way has brought."""
        return len(self._heard)

    async def read(self) -> Survey:
        """Read the directory, or wait for the look-up that is under way. Raises NetworkError."""
        return await asyncio.shield(self.begin())

    def begin(self) -> "asyncio.Task[Survey]":
        """Begin to read the directory, unless a look-up is under way. Cancel a wait for it through a shield only."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # may end unobserved
        return self._reading

    def known(self) -> Survey:
        """Return the latest survey, with the records that the look-up under way has brought so far."""
        if self.looking is not None and self.n_heard != self._n_merged:
            self._n_merged = self.n_heard
            self.latest = self._directory.updated(self.latest, self._root, self._n_blocks, self._heard.values())
        return self.latest

    async def _read(self) -> Survey:
        self._heard, self._n_merged = {}, 0
        self.latest = await self._directory.survey(self._root, self._n_blocks, self._hear)
        self._read_at = asyncio.get_running_loop().time()
        return self.latest

    def _hear(self, entries: Sequence[Entry]) -> None:
        self._heard |= {entry.data: entry for entry in entries}
